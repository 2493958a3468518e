"""Stage `eval`: sample, grade, score. Three passes: the second and third read only what the first one stored."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bridge.artifacts import read_seal
from bridge.config.stages import EvalSettings
from bridge.metrics import score
from bridge.progress import progress
from bridge.rollout.engine import Engine, Sampling, sample_seed
from bridge.rollout.hf import TransformersEngine
from bridge.stages.job import Job, StopEarlyError
from bridge.tasks.grading import Grade, Response, grade_all
from bridge.train.chat import Chat
from bridge.train.dataset import Dataset, read_dataset
from bridge.train.model import load_model, load_tokenizer, model_folder, setup, stop_ids

STORED = pa.schema(
    [
        ("question", pa.int64()),
        ("sample", pa.int64()),
        ("seed", pa.uint64()),
        ("ids", pa.list_(pa.int64())),
        ("truncated", pa.bool_()),
    ]
)
Stored = dict[str, Any]


def run(job: Job) -> dict[str, Any]:
    """Write eval.json (scores) and samples.parquet (every sample with its grade) into `job.out`."""
    settings = job.settings
    assert isinstance(settings, EvalSettings)
    device = setup(job.threads, settings.seed)
    source = model_folder(job.inputs["model"])
    model, tokenizer = load_model(source, device), load_tokenizer(source)
    data = read_dataset(job.inputs["data"], job.task, settings.limit)
    chat = Chat(tokenizer, data.response_prefix, stop_ids(model))
    golds, options = data.golds(), data.options()

    engine = TransformersEngine(model, chat.stop_ids, chat.vocabulary, settings.rollout_batch)
    sample_all(job, engine, chat.prompts([example.prompt for example in data.examples]), settings)
    rows = load_samples(job.scratch)

    texts = [chat.response_text(row["ids"]) for row in rows]
    responses = [
        Response(text, golds[row["question"]], row["truncated"], options[row["question"]])
        for row, text in zip(rows, texts, strict=True)
    ]
    with progress(f"{job.label}: grading", len(rows), "answers") as meter:
        grades = grade_all(meter.counted(responses), data.answer_kind, policy=settings.grading)

    result = {
        "model": name_of(job.inputs["model"]),
        "data": name_of(job.inputs["data"]),
        "settings": settings.model_dump(mode="json", exclude={"resources", "model", "data"}),
        **scores(rows, grades, settings.samples, ties_lose=settings.grading.ties == "lose"),
    }
    write_samples(job.out / "samples.parquet", data, rows, texts, grades)
    (job.out / "eval.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def sample_all(job: Job, engine: Engine, prompts: Sequence[Sequence[int]], settings: EvalSettings) -> None:
    """Sample every question that `job.scratch` does not hold yet, a chunk of whole questions at a time.

    Raises StopEarlyError between two chunks when the job is asked to stop.
    """
    done = {row["question"] for row in load_samples(job.scratch)}
    todo = [question for question in range(len(prompts)) if question not in done]
    size = max(settings.rollout_batch // settings.samples, 1)
    sampling = Sampling(settings.temperature, settings.top_p, settings.max_new_tokens)
    with progress(job.label, len(prompts), "questions", done=len(done)) as meter:
        for start in range(0, len(todo), size):
            if job.stop.requested:
                raise StopEarlyError(f"{job.label}: stopped after {meter.done} of {len(prompts)} questions; saved")
            part = todo[start : start + size]
            seeds = [
                [sample_seed(settings.seed, question, index) for index in range(settings.samples)] for question in part
            ]
            sampled = engine.sample([prompts[question] for question in part], seeds, sampling)
            store_samples(
                job.scratch,
                [
                    {"question": question, "sample": index, "seed": seed, "ids": c.ids, "truncated": c.truncated}
                    for question, own_seeds, completions in zip(part, seeds, sampled, strict=True)
                    for index, (seed, c) in enumerate(zip(own_seeds, completions, strict=True))
                ],
            )
            meter.advance(len(part))


def store_samples(scratch: Path, rows: Sequence[Stored]) -> None:
    """Write a chunk so that it is there whole or not at all."""
    path = scratch / f"samples-{rows[0]['question']:08d}.parquet"
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=STORED), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_samples(scratch: Path) -> list[Stored]:
    """Every stored sample, by question and then by sample index. A damaged chunk is deleted."""
    rows: list[Stored] = []
    for path in sorted(scratch.glob("samples-*.parquet")):
        try:
            rows += pq.read_table(path).to_pylist()
        except (pa.ArrowInvalid, OSError):
            path.unlink()
    return sorted(rows, key=lambda row: (row["question"], row["sample"]))


def scores(rows: Sequence[Stored], grades: Sequence[Grade], samples: int, *, ties_lose: bool = False) -> dict[str, Any]:
    """The metric table with intervals over questions, and the rates that belong beside every accuracy."""
    correct = np.array([verdict.correct for verdict in grades]).reshape(-1, samples)
    answers = [[verdict.answer for verdict in grades[i : i + samples]] for i in range(0, len(grades), samples)]
    reasons = Counter(verdict.reason for verdict in grades)
    return {
        **score(correct, answers, sizes(samples), ties_lose=ties_lose),
        "truncated": sum(row["truncated"] for row in rows) / len(rows),
        "no_answer": sum(verdict.answer is None for verdict in grades) / len(grades),
        "tokens": sum(len(row["ids"]) for row in rows) / len(rows),
        "reasons": dict(sorted(reasons.items())),
    }


def sizes(samples: int) -> list[int]:
    """The k of pass@k and majority@k: powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def write_samples(
    path: Path, data: Dataset, rows: Sequence[Stored], texts: Sequence[str], grades: Sequence[Grade]
) -> None:
    """One row for each sample: what was asked, said, found and decided."""
    examples = [data.examples[row["question"]] for row in rows]
    columns = {
        "question": [example.id for example in examples],
        "sample": [row["sample"] for row in rows],
        "prompt": [example.prompt[-1]["content"] for example in examples],
        "completion": list(texts),
        "tokens": [len(row["ids"]) for row in rows],
        "truncated": [row["truncated"] for row in rows],
        "gold": [example.gold for example in examples],
        "answer": pa.array([verdict.answer for verdict in grades], pa.string()),
        "correct": [verdict.correct for verdict in grades],
        "reason": [str(verdict.reason) for verdict in grades],
        "seed": pa.array([row["seed"] for row in rows], pa.uint64()),
    }
    pq.write_table(pa.table(columns), path)


def name_of(path: Path) -> str:
    """`RUN/STAGE/ELEMENT` of an artifact, or the path or hub name as it was given."""
    seal = read_seal(path)
    return seal.made_by if seal else str(path)
