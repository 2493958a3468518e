"""Stage `data`: one split of a task as Parquet, with a description and, if asked, a tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bridge import behaviors
from bridge.config.stages import DataSettings
from bridge.config.tasks import TaskSettings
from bridge.progress import progress
from bridge.stages.job import Job
from bridge.tasks import Example, load_task
from bridge.tasks.tables import write_table
from bridge.tasks.tokenizer import build_tokenizer

Advance = Callable[[int], None]


def run(job: Job) -> dict[str, object]:
    """Write data.parquet, dataset.json and, if asked, tokenizer/ into `job.out`; returns what dataset.json holds."""
    settings = job.settings
    assert isinstance(settings, DataSettings)
    job.out.mkdir(parents=True, exist_ok=True)
    with progress(job.label, settings.size, "rows") as meter:
        summary = write_split(job.task, settings, job.out / "data.parquet", meter.advance)
    if settings.tokenizer:
        phrases = load_task(job.task).vocabulary() + behaviors.phrases(job.task.style)
        summary["vocabulary"] = build_tokenizer(phrases, job.out / "tokenizer")
    (job.out / "dataset.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def write_split(
    task: TaskSettings, data: DataSettings, path: Path, advance: Advance = lambda amount: None
) -> dict[str, object]:
    """Write one split to a Parquet file, under a temporary name until it is whole; returns its description."""
    source = load_task(task)
    write = behaviors.writer(data.behavior, task.style)
    rejected: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    ops: Counter[int] = Counter()

    def counted() -> Iterator[Example]:
        for row in source.rows(data.split, data.size, data.seed, write, rejected):
            answers[row.gold] += 1
            ops[int(str(row.extra["num_ops"]))] += 1
            advance(1)
            yield row

    temporary = path.with_name(path.name + ".tmp")
    try:
        facts = {"answer_kind": source.answer_kind, "response_prefix": source.response_prefix}
        rows = write_table(counted(), data.split, task.name, temporary, facts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    top, count = answers.most_common(1)[0]
    return {
        "task": task.model_dump(mode="json"),
        "split": data.split,
        "seed": data.seed,
        "behavior": data.behavior.model_dump(mode="json"),
        "answer_kind": source.answer_kind,
        "response_prefix": source.response_prefix,
        "rows": rows,
        "rejected": dict(sorted(rejected.items())),
        "top_answer": {"answer": top, "share": count / rows},
        "ops": {str(number): ops[number] for number in sorted(ops)},
    }
