"""Stage `rl`: reinforcement learning with a verifiable reward (GRPO)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bridge.config.stages import RlSettings
from bridge.errors import WorkFailedError
from bridge.rollout.engine import Completion, Engine, Sampling, sample_seed
from bridge.rollout.hf import TransformersEngine
from bridge.stages.job import Job, StopEarlyError
from bridge.stages.steps import kept_steps
from bridge.tasks.grading import Grade, Response, format_reward, grade_all
from bridge.train.advantages import group_advantages, mixed_groups
from bridge.train.batches import Row, aligned, batch_logprobs, collate, micro_batches
from bridge.train.chat import Chat
from bridge.train.dataset import read_dataset
from bridge.train.journal import open_journal
from bridge.train.loop import Training
from bridge.train.losses import k3, masked_sum, policy_loss
from bridge.train.model import copy_configuration, load_model, load_tokenizer, model_folder, setup, stop_ids
from bridge.train.starts import Start, by_state, chosen, start_states

TABLE_ROWS = 16  # completions in a sample table
GRADING_SECONDS = 60.0  # for all of a rollout batch; LaTeX answers that are not compared by then count as grader_error
GAP_LIMIT = 0.1  # nats; float32 on both sides stays below 1e-3, a wrong position or temperature is far above


@dataclass(frozen=True)
class Sample:
    """One completion and what it earned."""

    prompt: Sequence[int]
    completion: Completion
    text: str
    gold: str
    grade: Grade
    reward: float


@dataclass
class Policy:
    """The model that learns and what its loss needs."""

    model: nn.Module
    reference: nn.Module | None
    """The starting model, where KL has a weight."""
    vocabulary: int
    settings: RlSettings


@dataclass
class Tally:
    """Sums over the counted tokens of one update."""

    tokens: int = 0
    clipped: int = 0
    kl: float = 0.0
    gap: float = 0.0
    """Largest |training − sampling| log-probability. Before the first update of a step it is rounding only."""


@dataclass(frozen=True)
class Item:
    """One sequence of an update: prompt and sampled tokens as they are, and the group's verdict on them."""

    row: Row
    old_logprobs: Sequence[float]
    advantage: float


def run(job: Job) -> dict[str, Any]:
    """Train; writes checkpoint.pt, the configs, metrics.jsonl and samples.jsonl into `job.out`."""
    settings = job.settings
    assert isinstance(settings, RlSettings)
    device = setup(job.threads, settings.seed)
    source = model_folder(job.inputs["model"])
    model, tokenizer = load_model(source, device), load_tokenizer(source)
    data = read_dataset(job.inputs["data"], job.task)
    chat = Chat(tokenizer, data.response_prefix, stop_ids(model))
    states = start_states(chat, data, settings.starts)
    golds, options = data.golds(), data.options()
    engine = TransformersEngine(model, chat.stop_ids, chat.vocabulary, settings.rollout_batch)
    policy = Policy(model, load_model(source, device) if settings.kl else None, chat.vocabulary, settings)

    saved = job.scratch / "checkpoints"
    with (
        open_journal(settings, job.label, job.out, job.scratch) as journal,
        kept_steps(saved, job.out / "steps", settings.keep_every) as kept,
    ):
        training = Training(
            model, settings, settings.steps, journal, saved, updates=settings.minibatches, wanted=kept.wanted
        )
        training.resume()
        saved.mkdir(exist_ok=True)
        copy_configuration(source, saved, chat.stop_ids)  # of the models of single steps
        kept.start(training.step)
        for step in training.steps(lambda: job.stop.requested, job.label):
            started = time.monotonic()
            batch = chosen(states, settings.starts, step, settings.steps, settings.prompts, settings.seed)
            sampled = rollout(engine, [start.prompt for start in batch], settings, step)
            sampled_at = time.monotonic()
            groups = judge(
                chat,
                [
                    (start, golds[start.row], options[start.row], group)
                    for start, group in zip(batch, sampled, strict=True)
                ],
                data.answer_kind,
                settings,
            )
            training.record(
                {
                    "sample_seconds": sampled_at - started,
                    "grade_seconds": time.monotonic() - sampled_at,
                    **rollout_metrics(groups),
                }
            )
            correct = [sum(sample.grade.correct for sample in group) / len(group) for group in groups]
            training.record(by_state(batch, correct))
            rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
            advantages = group_advantages(rewards)
            learn(training, policy, usable(groups, advantages, mixed_groups(rewards), settings), step)
            if settings.samples_every and (step + 1) % settings.samples_every == 0:
                asked = [chat.prompt_text(data.examples[start.row].prompt) for start in batch]
                journal.samples(step + 1, sample_table(asked, groups, advantages))
        if training.step < settings.steps:
            raise StopEarlyError(f"{job.label}: stopped after step {training.step} of {settings.steps}; saved")
        training.finish(job.out / "checkpoint.pt")
        models = kept.finish()
        last = journal.last()
    copy_configuration(source, job.out, chat.stop_ids)
    return {
        "steps": settings.steps,
        "models": models,
        "prompts": len(states),
        "reward": last["reward"],
        "correct": last["correct"],
    }


def rollout(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: RlSettings, step: int
) -> list[list[Completion]]:
    """A group of completions for each prompt. The randomness depends on the seed, the step and the place only."""
    seeds = [
        [sample_seed(settings.seed, step, slot, index) for index in range(settings.group)]
        for slot in range(len(prompts))
    ]
    return engine.sample(prompts, seeds, Sampling(settings.temperature, max_new_tokens=settings.max_new_tokens))


def judge(
    chat: Chat,
    asked: Sequence[tuple[Start, str, Sequence[str], Sequence[Completion]]],
    kind: str,
    settings: RlSettings,
) -> list[list[Sample]]:
    """The reward of each completion: 1 for the right answer, plus the weighted format reward.

    What a start state gives of the solution counts as text of the response, and is not learnt from.

    Args:
        asked: start state, right answer, options and completions of each group.
    """
    said = [
        (
            start.prompt,
            completion,
            Response(chat.response_text([*start.given, *completion.ids]), gold, completion.truncated, options),
        )
        for start, gold, options, group in asked
        for completion in group
    ]
    verdicts = grade_all((r for _, _, r in said), kind, policy=settings.grading, seconds=GRADING_SECONDS)
    samples = [
        Sample(prompt, completion, response.text, response.gold, verdict, reward(response.text, verdict, settings))
        for (prompt, completion, response), verdict in zip(said, verdicts, strict=True)
    ]
    return [samples[start : start + settings.group] for start in range(0, len(samples), settings.group)]


def reward(text: str, verdict: Grade, settings: RlSettings) -> float:
    """1 for the right answer, plus the weighted format reward."""
    extra = settings.format_reward * format_reward(text, settings.format_rule) if settings.format_reward else 0.0
    return float(verdict.correct) + extra


def usable(groups: Sequence[Sequence[Sample]], advantages: Tensor, mixed: Tensor, settings: RlSettings) -> list[Item]:
    """The sequences that the update is made of.

    A group whose rewards are all the same teaches nothing and is left out, so that it does not dilute the token
    mean either. A truncated completion may be left out by setting; its reward still counts in its group's mean. One
    that could not be graded is always left out: nobody knows whether its reward of 0 is deserved.
    """
    return [
        Item(
            Row([*sample.prompt, *sample.completion.ids], len(sample.prompt)),
            sample.completion.logprobs,
            float(advantages[index, place]),
        )
        for index, group in enumerate(groups)
        if mixed[index]
        for place, sample in enumerate(group)
        if not (settings.mask_truncated and sample.completion.truncated) and sample.grade.reason != "grader_error"
    ]


def learn(training: Training, policy: Policy, items: Sequence[Item], step: int) -> None:
    """The optimizer updates of one rollout batch: its items, shuffled, in `minibatches` parts."""
    settings = policy.settings
    order = np.random.default_rng([settings.seed, step]).permutation(len(items))
    for number, part in enumerate(np.array_split(order, settings.minibatches)):
        if not len(part):
            continue
        tally = Tally()
        training.record({"lr": training.lr})
        loss, norm = training.update(losses(policy, [items[i] for i in part], tally))
        if number == 0:
            if tally.gap > GAP_LIMIT:
                raise WorkFailedError(
                    f"step {step + 1}: sampling and training disagree on log-probabilities by {tally.gap:.3g}"
                )
            training.record({"logprob_gap": tally.gap})
        training.record({"loss": loss, "grad_norm": norm, "clip_fraction": tally.clipped / tally.tokens})
        if policy.reference is not None:
            training.record({"kl": tally.kl / tally.tokens})


def losses(policy: Policy, items: Sequence[Item], tally: Tally) -> Iterator[Tensor]:
    """The loss of each micro-batch; together the mean over all sampled tokens of `items`."""
    settings = policy.settings
    device = next(policy.model.parameters()).device
    rows = [item.row for item in items]
    total = tally.tokens = sum(row.targets for row in rows)
    for part in micro_batches(rows, settings.micro_batch):
        batch = collate([rows[i] for i in part], device)
        old = aligned([items[i].old_logprobs for i in part], [rows[i] for i in part], batch)
        advantages = torch.tensor([items[i].advantage for i in part], device=device)
        logprobs = batch_logprobs(policy.model, batch, policy.vocabulary, settings.temperature)
        result = policy_loss(logprobs, old, advantages, batch.mask, total, settings.clip_ratio)
        loss = result.loss
        if policy.reference is not None:
            with torch.no_grad():
                reference = batch_logprobs(policy.reference, batch, policy.vocabulary, settings.temperature)
            divergence = masked_sum(k3(logprobs, reference), batch.mask)
            loss = loss + settings.kl * divergence / total
            tally.kl += divergence.item()
        tally.clipped += result.clipped
        tally.gap = max(tally.gap, float(((logprobs.detach() - old).abs() * batch.mask).max()))
        yield loss


def rollout_metrics(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """What is worth logging about a rollout batch."""
    samples = [sample for group in groups for sample in group]
    lengths = [len(sample.completion.ids) for sample in samples]
    constant = [group for group in groups if len({sample.reward for sample in group}) == 1]

    def share(found: Sequence[bool]) -> float:
        return sum(found) / len(found)

    return {
        "reward": sum(sample.reward for sample in samples) / len(samples),
        "correct": share([sample.grade.correct for sample in samples]),
        "no_answer": share([sample.grade.answer is None for sample in samples]),
        "truncated": share([sample.completion.truncated for sample in samples]),
        "grader_error": share([sample.grade.reason == "grader_error" for sample in samples]),
        "length": sum(lengths) / len(lengths),
        "entropy": -sum(sum(sample.completion.logprobs) for sample in samples) / sum(lengths),
        "groups_skipped": len(constant) / len(groups),
        "groups_all_correct": share([all(sample.grade.correct for sample in group) for group in groups]),
        "tokens": sum(len(sample.prompt) for sample in samples) + sum(lengths),
    }


def sample_table(asked: Sequence[str], groups: Sequence[Sequence[Sample]], advantages: Tensor) -> list[dict[str, Any]]:
    """The first completions of a rollout batch."""
    table = [
        {
            "prompt": question,
            "completion": sample.text,
            "reward": sample.reward,
            "advantage": float(advantages[index, place]),
            "answer": sample.grade.answer,
            "gold": sample.gold,
            "truncated": sample.completion.truncated,
        }
        for index, (question, group) in enumerate(zip(asked, groups, strict=True))
        for place, sample in enumerate(group)
    ]
    return table[:TABLE_ROWS]
