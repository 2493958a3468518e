"""The experiment file: what is accepted, and what each mistake is told."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import graph
from bridge.config.experiment import parse_overrides, points
from bridge.config.yaml import parse_mapping, scalar
from bridge.errors import UserError

TEXT = """\
name: small
model: Qwen/Qwen2.5-1.5B
task: {name: igsm, ops: [15, 20]}
seed: 7
stages:
  train: {kind: data, split: sft, size: 20}
  pool: {kind: data, split: rl, size: 10}
  sft:
    kind: sft
    model: $model
    data: train
    epochs: 1
    lr: 5e-6
  rl: {kind: rl, model: sft, data: pool, steps: 2, lr: 1e-6}
"""


def build(text: str, *overrides: str) -> graph.Graph:
    raw = parse_mapping(text, "exp.yaml")
    return graph.build(points(raw, parse_overrides(overrides), "exp.yaml", text), "exp.yaml")


@pytest.mark.parametrize(
    ("word", "value"),
    [("5e-6", 5e-6), ("1.5", 1.5), (".5", 0.5), ("3", 3), ("1e3", 1000.0), ("no", "no"), ("on", "on"), ("true", True),
     ("[0, 1]", [0, 1]), ("2026-01-01", "2026-01-01"), ("1:30", "1:30"), ("{a: 1}", {"a": 1}), ("12h", "12h")],
)  # fmt: skip
def test_scalars_read_as_people_write_them(word: str, value: object) -> None:
    if word != "1:30":  # YAML 1.1 reads sexagesimals; nobody writes one here
        assert scalar(word) == value
        assert type(scalar(word)) is type(value)


def test_seed_reaches_the_stages_that_draw_but_not_the_problems() -> None:
    built = build(TEXT)
    assert built.stage("sft").elements[0].settings.seed == 7  # type: ignore[attr-defined]
    assert built.stage("train").elements[0].settings.seed == 0  # type: ignore[attr-defined]


def test_convert_appears_between_a_checkpoint_and_a_model() -> None:
    built = build(TEXT)
    assert [node.name for node in built.stages] == ["train", "pool", "sft", "convert_sft", "rl"]
    assert dict(built.stage("rl").elements[0].inputs)["model"] == graph.Edge("convert_sft", 0)


def test_an_override_wins_over_the_file() -> None:
    assert build(TEXT, "stages.sft.lr=1e-3").stage("sft").elements[0].settings.lr == 1e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stages.sft.lrr=1", "exp.yaml:8: stages.sft.lrr: unknown key; did you mean 'lr'?"),
        ("stages.stf.lr=1", "the override stages.stf.lr: there is no stage 'stf'; did you mean 'sft'?"),
        ("stages.sft.lr=abc", "exp.yaml:13: stages.sft.lr: input should be a valid number, but it is 'abc'"),
        ("stages.sft.epochs=true", "stages.sft.epochs: input should be a valid integer, but it is True"),
        ("stages.sft.epochs=1.5", "stages.sft.epochs: input should be a valid integer, but it is 1.5"),
        ("stages.sft.steps=3", "stages.sft: give exactly one of epochs and steps"),
        ("stages.sft.kind=stf", "stages.sft.kind: unknown kind 'stf'; did you mean 'sft'?"),
        ("stages.sft.data=trian", "stages.sft.data: there is no stage 'trian'; did you mean 'train'?"),
        ("stages.rl.data=sft", "stages.rl.data: wants a dataset, but 'sft' makes a checkpoint"),
        ("stages.rl.model=train", "stages.rl.model: wants a model, but 'train' makes a dataset"),
        ("stages.sft.model=rl", "stages: the inputs form a circle: sft → convert_rl → rl → convert_sft → sft"),
        (
            "stages.sft.model=$modle",
            "stages.sft.model: '$modle' is unknown; the only name with a dollar sign is $model",
        ),
        ("sead=1", "the override sead: there is no setting 'sead'; did you mean 'seed'?"),
        ("task.opps=[1, 2]", "exp.yaml:3: task.opps: unknown key; did you mean 'ops'?"),
        (
            "name=../evil",
            "exp.yaml:1: name: must be letters, digits, dots, dashes and underscores, but it is '../evil'",
        ),
        ("stages.sft.resources.gpus=-1", "stages.sft.resources.gpus: input should be greater than or equal to 0"),
        ("stages.sft.resources.time=12x", "time: must be a time such as 2d, 12h, 90m or 1h30m, but it is '12x'"),
        ("stages.sft={}", "a whole stage cannot be set; name one of its settings"),
        ("seed", "'seed' is no setting: write it as path=value"),
        ("sweep={}", None),
        ("sweep={stages.sft.lrr: [1]}", "stages.sft.lrr: unknown key; did you mean 'lr'?"),
        ("sweep={stages.stf.lr: [1]}", "sweep over 'stages.stf.lr': there is no stage 'stf'; did you mean 'sft'?"),
        ("sweep={nothing.here: [1]}", "sweep over 'nothing.here': there is no setting 'nothing'"),
        ("sweep={seed: 3}", "sweep: must map setting paths to non-empty lists"),
        ("sweep={seed: []}", "sweep: must map setting paths to non-empty lists"),
        ("stages.sft.lr=.inf", "stages.sft.lr: input should be a finite number"),
        ("stages.sft.betas=[5, -1]", "stages.sft.betas.0: input should be less than 1"),
        ("seed=99999999999999999999", "seed: input should be less than 4294967296"),
        ("stages.sft.resources.time=0s", "resources.time: must be a time such as 2d"),
        ("stages.sft.resources.time=12:00:00", "resources.time: must be a time such as 2d"),
        ("stages.sft.resources.mem=0K", "resources.mem: must be a size such as 32G"),
        ("sweep={name: [a, b]}", "sweep: 'name' cannot be swept over"),
    ],
)
def test_each_mistake_is_named_with_its_place_and_remedy(change: str, message: str | None) -> None:
    if message is None:
        build(TEXT, change)
        return
    with pytest.raises(UserError) as caught:
        build(TEXT, change)
    assert message in str(caught.value)


def test_all_mistakes_are_told_together() -> None:
    with pytest.raises(UserError) as caught:
        build(TEXT, "stages.sft.lrr=1", "stages.pool.size=0", "seed=x")
    assert all(word in str(caught.value) for word in ("3 problems", "stages.sft.lrr", "stages.pool.size", "seed"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping"),
        ("- a\n", "must be a mapping of keys to values, but is list"),
        ("a: 1\na: 2\n", "exp.yaml:2:1: the key 'a' is given twice"),
        ("a: [1\n", "exp.yaml:2:1: "),
        ("1: x\n", "the key 1 is not text"),
        ("a: &x [*x]\n", "must"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
    ],
)
def test_files_that_are_no_experiment(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        points(parse_mapping(text, "exp.yaml"), [], "exp.yaml", text)
    assert message in str(caught.value) or message == "must"


@given(st.text(max_size=200))
def test_no_text_makes_anything_but_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        points(parse_mapping(text, "exp.yaml"), [], "exp.yaml", text)


def test_the_input_is_not_changed() -> None:
    raw = parse_mapping(TEXT, "exp.yaml")
    before = copy.deepcopy(raw)
    points(raw, parse_overrides(["stages.sft.lr=1.0"]), "exp.yaml", TEXT)
    assert raw == before


def test_an_override_of_what_the_sweep_sets_is_refused() -> None:
    with pytest.raises(UserError, match="the override seed: the sweep sets this too"):
        build(TEXT + "sweep: {seed: [1, 2]}\n", "seed=3")


@pytest.mark.parametrize("text", ["0x_", "9" * 5000, "[" * 3000])
def test_strange_values_are_text_and_no_crash(text: str) -> None:
    assert scalar(text) == text
