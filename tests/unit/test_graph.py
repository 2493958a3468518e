"""Experiment → graph → arrays: worked out by hand, and properties of every plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config.experiment import parse_overrides, points
from bridge.config.yaml import parse_mapping
from bridge.errors import UserError
from bridge.graph import After, Array, Edge, Graph, arrays, build, fingerprints, ranges

TEXT = """\
name: paper
model: {init: {tokenizer: train}}
task: {name: igsm}
sweep:
  stages.train.behavior: [vanilla, bridge]
  seed: [0, 1, 2]
stages:
  train: {kind: data, split: sft, size: 20, tokenizer: true}
  pool: {kind: data, split: rl, size: 10}
  held: {kind: data, split: test, size: 10}
  sft: {kind: sft, model: $model, data: train, epochs: 1, lr: 1e-3}
  rl: {kind: rl, model: sft, data: pool, steps: 2, lr: 1e-4}
  eval: {kind: eval, model: [$model, sft, rl], data: held}
"""


def graph(*overrides: str, text: str = TEXT) -> Graph:
    return build(points(parse_mapping(text, "e"), parse_overrides(overrides), "e"), "e")


def test_elements_are_the_sweep_values_that_matter_to_a_stage() -> None:
    counts = {node.name: len(node.elements) for node in graph().stages}
    assert counts == {
        "train": 2, "pool": 1, "held": 1, "base": 6, "sft": 6, "convert_sft": 6, "rl": 6, "convert_rl": 6, "eval": 18,
    }  # fmt: skip


def test_labels_say_what_tells_elements_apart() -> None:
    built = graph()
    assert [e.label for e in built.stage("train").elements] == ["behavior=vanilla", "behavior=bridge"]
    assert built.stage("sft").elements[4].label == "behavior=bridge seed=1"
    assert built.stage("eval").elements[0].label == "base behavior=vanilla seed=0"
    assert built.stage("eval").elements[17].label == "rl behavior=bridge seed=2"
    assert built.stage("pool").elements[0].label == ""


def test_arrays_and_edges_by_hand() -> None:
    six = tuple(range(6))
    corr, ok = "aftercorr", "afterok"
    assert arrays(graph().parents()) == [
        Array("train", "train", (0, 1), ()),
        Array("pool", "pool", (0,), ()),
        Array("held", "held", (0,), ()),
        Array("base", "base", six, (After(ok, "train"),)),
        Array("sft", "sft", six, (After(corr, "base"), After(ok, "train"))),
        Array("convert_sft", "convert_sft", six, (After(corr, "sft"),)),
        Array("rl", "rl", six, (After(corr, "convert_sft"), After(ok, "pool"))),
        Array("convert_rl", "convert_rl", six, (After(corr, "rl"),)),
        # the evaluation of SFT does not wait for RL
        Array("eval.0", "eval", six, (After(corr, "base"), After(ok, "held"))),
        Array("eval.1", "eval", tuple(range(6, 12)), (After(corr, "convert_sft"), After(ok, "held"))),
        Array("eval.2", "eval", tuple(range(12, 18)), (After(corr, "convert_rl"), After(ok, "held"))),
    ]


def test_a_sealed_stage_is_not_submitted_and_gets_no_edge() -> None:
    sealed = frozenset({("train", 0), ("train", 1), ("pool", 0), ("held", 0)} | {("base", i) for i in range(6)})
    planned = arrays(graph().parents(), sealed)
    assert planned[0] == Array("sft", "sft", tuple(range(6)), ())
    assert {a.stage for a in planned} == {"sft", "convert_sft", "rl", "convert_rl", "eval"}


def test_only_what_is_left_is_submitted_element_by_element() -> None:
    parents = {"a": ((), (), ()), "b": ((Edge("a", 0),), (Edge("a", 1),), (Edge("a", 2),))}
    assert arrays(parents, frozenset({("a", 1)})) == [
        Array("a", "a", (0, 2), ()),
        Array("b.0", "b", (0, 2), (After("aftercorr", "a"),)),
        Array("b.1", "b", (1,), ()),
    ]


def test_a_parent_that_is_still_running_is_named_by_its_job() -> None:
    parents = {"a": ((), ()), "b": ((Edge("a", 0),), (Edge("a", 1),))}
    planned = arrays(parents, frozenset({("a", 0)}), {("a", 1): "12_1"})
    assert planned == [Array("b", "b", (0, 1), (After("afterok", jobs=("12_1",)),))]


def test_long_arrays_are_split_and_the_edges_follow() -> None:
    parents = {"a": ((),) * 5, "b": tuple((Edge("a", i),) for i in range(5))}
    assert arrays(parents, max_array=2) == [
        Array("a.0", "a", (0, 1), ()),
        Array("a.1", "a", (2, 3), ()),
        Array("a.2", "a", (4,), ()),
        Array("b.0", "b", (0, 1), (After("aftercorr", "a.0"),)),
        Array("b.1", "b", (2, 3), (After("aftercorr", "a.1"),)),
        Array("b.2", "b", (4,), (After("aftercorr", "a.2"),)),
    ]


@st.composite
def small_graphs(draw: st.DrawFn) -> dict[str, tuple[tuple[Edge, ...], ...]]:
    found: dict[str, tuple[tuple[Edge, ...], ...]] = {}
    for number in range(draw(st.integers(1, 5))):
        earlier = [Edge(stage, i) for stage, needs in found.items() for i in range(len(needs))]
        edges = st.lists(st.sampled_from(earlier), max_size=3, unique=True) if earlier else st.just([])
        found[f"s{number}"] = tuple(tuple(draw(edges)) for _ in range(draw(st.integers(1, 6))))
    return found


@given(small_graphs(), st.data(), st.integers(1, 4))
def test_every_plan_runs_each_element_once_and_never_before_its_parents(
    parents: dict[str, tuple[tuple[Edge, ...], ...]], data: st.DataObject, limit: int
) -> None:
    everything = [(stage, i) for stage, needs in parents.items() for i in range(len(needs))]
    sealed = frozenset(data.draw(st.sets(st.sampled_from(everything))))
    planned = arrays(parents, sealed, max_array=limit)
    members = [(a.stage, i) for a in planned for i in a.elements]
    assert sorted(members) == sorted(set(everything) - sealed)
    assert all(len(a.elements) <= limit for a in planned)
    place = {(a.stage, i): (a.name, task) for a in planned for task, i in enumerate(a.elements)}
    names = [a.name for a in planned]
    assert len(set(names)) == len(names)
    for array in planned:
        kinds = {after.array: after.kind for after in array.after}
        assert all(names.index(parent) < names.index(array.name) for parent in kinds)
        waited = {place[e][0] for i in array.elements for e in parents[array.stage][i] if e in place}
        assert set(kinds) == waited  # no edge is missing and none is too many
        for task, index in enumerate(array.elements):
            for edge in parents[array.stage][index]:
                if edge in place and kinds[place[edge][0]] == "aftercorr":
                    assert place[edge][1] == task


def test_the_fingerprint_follows_everything_that_matters_and_nothing_else() -> None:
    def prints(*overrides: str, code: str = "c") -> dict[tuple[str, int], str]:
        return fingerprints(graph("sweep={}", *overrides), code, {})

    same = prints()
    assert prints("stages.sft.resources.gpus=2") == same
    changed = prints("stages.sft.lr=2e-3")
    assert {key for key in same if same[key] != changed[key]} == {
        ("sft", 0), ("convert_sft", 0), ("rl", 0), ("convert_rl", 0), ("eval", 1), ("eval", 2),
    }  # fmt: skip
    assert all(same[key] != other for key, other in prints(code="d").items())
    assert len(set(same.values())) == len(same)


def test_ranges() -> None:
    assert [ranges(x) for x in ([], [0], [0, 1, 2, 5], [1, 3, 4], [7, 8])] == ["", "0", "0-2,5", "1,3-4", "7-8"]


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_exactly_these_numbers(numbers: set[int]) -> None:
    text = ranges(sorted(numbers))
    back: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        back |= set(range(int(first), int(last or first) + 1))
    assert back == numbers


def test_a_model_from_scratch_needs_a_stage_that_builds_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"stages\.train\.tokenizer: must be true"):
        graph("stages.train.tokenizer=false")


def test_a_sweep_may_change_the_shape_of_the_graph() -> None:
    """Inputs that are swept over: every point gets the stages, the converts and the evaluations that it needs."""
    built = graph("sweep={stages.eval.model: [[sft], [sft, rl]]}")
    assert [e.label for e in built.stage("eval").elements] == ["sft", 'rl model=["sft","rl"]']
    assert built.stage("convert_rl").elements
    swapped = graph("sweep={stages.eval.model: [[sft, rl], [sft]]}")
    assert len(swapped.stage("eval").elements) == 2
    started = graph("sweep={stages.rl.model: [$model, sft]}", "stages.eval.model=[rl]")
    assert [dict(e.inputs)["model"] for e in started.stage("rl").elements] == [Edge("base", 0), Edge("convert_sft", 0)]
    assert [e.label for e in started.stage("eval").elements] == ["rl model=$model", "rl model=sft"]
    assert len(arrays(started.parents())) > 0
