"""The GRPO update on a real (tiny) model: what enters it, and what must not change it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small import settings, write_model

from bridge.config.stages import RlSettings
from bridge.rollout.engine import Completion, Sampling, sample_seed
from bridge.rollout.hf import TransformersEngine
from bridge.stages.rl import Item, Policy, Sample, Tally, judge, losses, rollout, rollout_metrics, usable
from bridge.tasks.grading import Grade
from bridge.train.advantages import group_advantages, mixed_groups
from bridge.train.batches import Row
from bridge.train.model import load_model
from bridge.train.starts import Start

CPU = torch.device("cpu")
PROMPTS = [[6, 15, 7, 16, 2], [5, 2], [9, 9, 15, 9, 9, 16, 2]]


def rl_settings(**values: Any) -> RlSettings:
    stage = settings("rl", **{"steps": 1, "lr": 1e-3, "group": 4, "prompts": 3, "max_new_tokens": 16, **values})
    assert isinstance(stage, RlSettings)
    return stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), init_std=0.4)


@pytest.fixture
def model(folder: Path) -> torch.nn.Module:
    return load_model(folder, CPU)


def items(model: torch.nn.Module, temperature: float = 1.0) -> list[Item]:
    engine = TransformersEngine(model, {1}, 19)
    sampled = rollout(engine, PROMPTS, rl_settings(temperature=temperature), step=0)
    return [
        Item(Row([*prompt, *c.ids], len(prompt)), c.logprobs, advantage)
        for prompt, group in zip(PROMPTS, sampled, strict=True)
        for c, advantage in zip(group, (1.5, -0.5, -0.5, -0.5), strict=True)
    ]


def gradient(policy: Policy, made: list[Item], tally: Tally) -> tuple[float, torch.Tensor]:
    policy.model.zero_grad()
    total = 0.0
    for loss in losses(policy, made, tally):
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_update_nothing_is_clipped_and_the_kl_is_zero(
    model: torch.nn.Module, temperature: float
) -> None:
    tally = Tally()
    policy = Policy(model, copy.deepcopy(model), 19, rl_settings(kl=0.1, temperature=temperature))
    made = items(model, temperature)
    loss, _ = gradient(policy, made, tally)
    assert tally.clipped == 0
    assert tally.gap < 1e-4
    assert tally.kl == pytest.approx(0, abs=1e-5)
    assert tally.tokens == sum(len(item.old_logprobs) for item in made)
    expected = -sum(item.advantage * len(item.old_logprobs) for item in made) / tally.tokens
    assert loss == pytest.approx(expected, abs=1e-5)


def test_scoring_at_another_temperature_shows_in_the_gap(model: torch.nn.Module) -> None:
    tally = Tally()
    gradient(Policy(model, None, 19, rl_settings(temperature=1.0)), items(model, 0.7), tally)
    assert tally.gap > 0.1


@pytest.mark.parametrize("size", [1, 3, 12])
def test_micro_batches_do_not_change_the_gradient(model: torch.nn.Module, size: int) -> None:
    reference = copy.deepcopy(model)
    made = items(model)
    with torch.no_grad():  # off policy, so that ratio, clip and KL all count
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    one, whole = gradient(Policy(model, reference, 19, rl_settings(kl=0.5, micro_batch=100)), made, Tally())
    tally = Tally()
    two, split = gradient(Policy(model, reference, 19, rl_settings(kl=0.5, micro_batch=size)), made, tally)
    assert tally.clipped > 0 and tally.kl > 0
    assert two == pytest.approx(one, abs=1e-5)
    assert torch.allclose(split, whole, atol=1e-4 * float(whole.abs().max()))


def test_a_step_makes_good_completions_likelier_and_bad_ones_less_likely(model: torch.nn.Module) -> None:
    from bridge.train.batches import batch_logprobs, collate

    made = items(model)
    policy = Policy(model, None, 19, rl_settings())

    def score() -> float:
        with torch.no_grad():
            parts = [collate([item.row], CPU) for item in made]
            sums = [float((batch_logprobs(model, b, 19) * b.mask).sum()) for b in parts]
        return sum(item.advantage * value for item, value in zip(made, sums, strict=True))

    before = score()
    gradient(policy, made, Tally())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    assert score() > before


def sample(reward: int, truncated: bool = False) -> Sample:
    verdict = Grade("7" if reward else None, bool(reward), "correct" if reward else "no_answer", "hash")
    return Sample([6, 2], Completion([7, 1], [-0.5, -0.25], truncated), "2", "7", verdict, float(reward))


def test_what_enters_an_update() -> None:
    groups = [
        [sample(1), sample(0), sample(0, truncated=True)],
        [sample(1), sample(1), sample(1)],
        [sample(0), sample(0), sample(0)],
    ]
    rewards = torch.tensor([[s.reward for s in group] for group in groups])
    advantages, mixed = group_advantages(rewards), mixed_groups(rewards)
    kept = usable(groups, advantages, mixed, rl_settings())
    # one right of three: √(2 · 2/3) and −√(1/2 · 2/3)
    assert [item.advantage for item in kept] == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert all(item.row == Row([6, 2, 7, 1], 2) for item in kept)  # the sampled ids, the end token with them
    masked = usable(groups, advantages, mixed, rl_settings(mask_truncated=True))
    assert [item.advantage for item in masked] == pytest.approx([1.1547, -0.57735], abs=1e-4)


def test_what_could_not_be_graded_teaches_nothing() -> None:
    unknown = dataclasses.replace(sample(0), grade=Grade(None, False, "grader_error", "box"))
    groups = [[sample(1), sample(0), unknown]]
    rewards = torch.tensor([[s.reward for s in group] for group in groups])
    kept = usable(groups, group_advantages(rewards), mixed_groups(rewards), rl_settings())
    assert [item.advantage for item in kept] == pytest.approx([1.1547, -0.57735], abs=1e-4)
    assert rollout_metrics(groups)["grader_error"] == pytest.approx(1 / 3)


class Words:
    """A chat whose tokens stand for whole responses."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def response_text(self, ids: Sequence[int]) -> str:
        return self.texts[ids[0]]


def test_a_rollout_batch_is_judged_as_one() -> None:
    chat = Words("#### 7", "#### 35%", "<think>a</think><answer>7</answer>", "The answer is iron")
    settings = rl_settings(group=2, format_reward=0.25, grading={"percent": "hundredth"})
    one, two = [Completion([0], [-1.0], False), Completion([2], [-1.0], False)], [Completion([1], [-1.0], False)] * 2
    groups = judge(
        chat, [(Start(0, 0, [5], []), "7", (), one), (Start(1, 0, [6], []), "0.35", (), two)], "number", settings
    )  # type: ignore[arg-type]
    assert [[s.reward for s in group] for group in groups] == [[1.0, 1.25], [1.0, 1.0]]
    assert [[s.prompt for s in group] for group in groups] == [[[5], [5]], [[6], [6]]]
    # what a start state gives is text of the response too
    asked = [(Start(0, 1, [5, 3], [3]), "B", ("wood", "iron"), [Completion([0], [-1.0], False)] * 2)]
    (group,) = judge(chat, asked, "choice", settings)  # type: ignore[arg-type]
    assert [s.reward for s in group] == [1.0, 1.0]


def test_rollout_metrics_by_hand() -> None:
    groups = [[sample(1), sample(0, truncated=True)], [sample(1), sample(1)], [sample(0), sample(0)]]
    got = rollout_metrics(groups)
    assert got == pytest.approx(
        {
            "reward": 0.5, "correct": 0.5, "no_answer": 0.5, "truncated": 1 / 6, "length": 2.0, "entropy": 0.375,
            "groups_skipped": 2 / 3, "groups_all_correct": 1 / 3, "tokens": 6 * 4, "grader_error": 0.0,
        }
    )  # fmt: skip


def test_a_rollout_depends_on_seed_step_and_place_only(model: torch.nn.Module) -> None:
    engine = TransformersEngine(model, {1}, 19)
    first = rollout(engine, PROMPTS, rl_settings(seed=1), step=3)
    assert rollout(engine, PROMPTS, rl_settings(seed=1), step=3) == first
    assert rollout(engine, PROMPTS, rl_settings(seed=1), step=4) != first
    assert rollout(engine, PROMPTS, rl_settings(seed=2), step=3) != first
    alone = engine.sample([PROMPTS[1]], [[sample_seed(1, 3, 1, 2)]], Sampling(max_new_tokens=16))
    assert alone[0][0].ids == first[1][2].ids
    twice = rollout(engine, [PROMPTS[0], PROMPTS[0]], rl_settings(), step=0)
    assert twice[0] != twice[1]  # the same prompt twice in a batch gets other samples
