"""Stage `sft`: supervised fine-tuning on worked solutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.config.stages import SftSettings
from bridge.errors import UserError
from bridge.rollout.engine import Sampling
from bridge.rollout.hf import TransformersEngine
from bridge.stages.job import Job, StopEarlyError
from bridge.stages.steps import kept_steps
from bridge.tasks.grading import grade
from bridge.train.batches import Row, batch_logprobs, collate, micro_batches, stream
from bridge.train.chat import Chat
from bridge.train.dataset import Dataset, read_dataset
from bridge.train.journal import open_journal
from bridge.train.loop import Training
from bridge.train.losses import sft_loss
from bridge.train.model import copy_configuration, load_model, load_tokenizer, model_folder, positions, setup, stop_ids
from bridge.train.parallel import Group, together

TABLE_ROWS = 4  # completions in a sample table


@dataclass(frozen=True)
class Encoded:
    """The rows of a dataset as token ids."""

    rows: list[Row]
    cut: int
    """Rows that were longer than max_length."""
    dropped: int
    """Rows of which nothing was left to train on."""


def run(job: Job) -> dict[str, Any]:
    """Train; writes checkpoint.pt, the configs, metrics.jsonl and samples.jsonl into `job.out`."""
    settings = job.settings
    assert isinstance(settings, SftSettings)
    device = setup(job.threads, settings.seed)
    source = model_folder(job.inputs["model"])
    model, tokenizer = load_model(source, device), load_tokenizer(source)
    data = read_dataset(job.inputs["data"], job.task)
    chat = Chat(tokenizer, data.response_prefix, stop_ids(model))
    limit = min(settings.max_length, positions(model))
    encoded = encode(chat, data, limit, settings.loss_on)
    held_out = read_dataset(job.inputs["eval_data"], job.task) if "eval_data" in job.inputs else None
    eval_rows = encode(chat, held_out, limit, settings.loss_on).rows if held_out else []

    rows = encoded.rows
    total = settings.steps or math.ceil(len(rows) * (settings.epochs or 1) / settings.batch)
    saved, group = job.scratch / "checkpoints", together()
    with (
        open_journal(settings, job.label, job.out, job.scratch) as journal,
        kept_steps(saved, job.out / "steps", settings.keep_every if group.leads else 0) as kept,
    ):
        training = Training(model, settings, total, journal, saved, wanted=kept.wanted)
        training.resume()
        if group.leads:
            saved.mkdir(exist_ok=True)
            copy_configuration(source, saved, chat.stop_ids)  # of the models of single steps
        kept.start(training.step)
        model.train()
        for step in training.steps(lambda: job.stop.requested, job.label):
            start = step * settings.batch
            # A run of whole epochs ends with them, so its last step may be a smaller one.
            count = (
                settings.batch if settings.steps else min(settings.batch, len(rows) * (settings.epochs or 1) - start)
            )
            batch = [rows[i] for i in stream(len(rows), start, count, settings.seed)]
            training.record({"lr": training.lr})
            loss, norm = training.update(losses(model, batch, settings.micro_batch, chat.vocabulary, group))
            training.record({"loss": loss, "grad_norm": norm, "tokens": sum(len(row.ids) for row in batch)})
            if eval_rows and ((step + 1) % settings.eval_every == 0 or step + 1 == total):
                value = mean_loss(model, eval_rows, settings.micro_batch, chat.vocabulary, group)
                training.record({"eval_loss": value})
            if settings.samples_every and (step + 1) % settings.samples_every == 0:
                table = group.lead(lambda: sample_table(model, chat, held_out or data, limit))
                journal.samples(step + 1, table)
        if training.step < total:
            raise StopEarlyError(f"{job.label}: stopped after step {training.step} of {total}; saved")
        training.finish(job.out / "checkpoint.pt")
        models = group.lead(kept.finish)
        last = group.lead(journal.last)
    group.lead(lambda: copy_configuration(source, job.out, chat.stop_ids))
    return {
        "steps": total,
        "models": models,
        "rows": len(rows),
        "rows_cut": encoded.cut,
        "rows_dropped": encoded.dropped,
        "loss": last["loss"],
        "eval_loss": last.get("eval_loss"),
    }


def encode(chat: Chat, data: Dataset, limit: int, loss_on: str) -> Encoded:
    """Token ids of every row, cut on the right at `limit`. Raises UserError when nothing is left to train on."""
    pairs = chat.pairs([example.prompt for example in data.examples], data.responses())
    whole = [Row([*prompt, *rest], len(prompt) if loss_on == "response" else 1) for prompt, rest in pairs]
    rows = [Row(row.ids[:limit], row.first) for row in whole]
    kept = [row for row in rows if row.targets]
    if not kept:
        raise UserError(f"{data.path}: no row has a response token within max_length {limit}")
    cut = sum(len(row.ids) > limit for row in whole)
    return Encoded(kept, cut, len(rows) - len(kept))


def losses(model: nn.Module, rows: Sequence[Row], size: int, vocabulary: int, group: Group) -> Iterator[Tensor]:
    """The loss of each micro-batch of this process; over all processes together the mean over the trained tokens."""
    device = next(model.parameters()).device
    total = sum(row.targets for row in rows)
    own = [rows[i] for i in group.share([len(row.ids) for row in rows])]
    for part in micro_batches(own, size):
        batch = collate([own[i] for i in part], device)
        yield sft_loss(batch_logprobs(model, batch, vocabulary), batch.mask, total)


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Sequence[Row], size: int, vocabulary: int, group: Group) -> float:
    """Loss per trained token of held-out rows, without dropout."""
    was_training = model.training
    model.eval()
    value = sum(loss.item() for loss in losses(model, rows, size, vocabulary, group))
    model.train(was_training)
    return group.sum(value)


def sample_table(model: nn.Module, chat: Chat, data: Dataset, limit: int) -> list[dict[str, Any]]:
    """Greedy completions of the first rows, graded where there is a right answer."""
    examples = data.examples[:TABLE_ROWS]
    pairs = chat.pairs([example.prompt for example in examples], data.responses()[:TABLE_ROWS])
    prompts = [prompt for prompt, _ in pairs]
    # Twice the longest worked solution shows whether the model comes to an end, as far as there is room.
    room = min(2 * max(len(rest) for _, rest in pairs), limit - max(map(len, prompts)))
    if room < 1:
        return []
    engine = TransformersEngine(model, chat.stop_ids, chat.vocabulary)
    sampled = engine.sample(prompts, [[0]] * len(prompts), Sampling(0.0, max_new_tokens=room))
    table = []
    for example, (completion,) in zip(examples, sampled, strict=True):
        text = chat.response_text(completion.ids)
        table.append(
            {
                "prompt": chat.prompt_text(example.prompt),
                "completion": text,
                "reward": reward(text, example.gold, data.answer_kind, completion.truncated),
                "gold": example.gold,
            }
        )
    return table


def reward(text: str, gold: str, kind: str, truncated: bool) -> float | None:
    """1 for the right answer, else 0; None where the data have no right answer of this kind: SFT needs none."""
    try:
        return float(grade(text, gold, kind, truncated=truncated).correct)
    except UserError:
        return None
