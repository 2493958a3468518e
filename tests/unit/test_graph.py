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


def whole(array: str) -> After:
    return After("afterok", array)


def only(array: str, *tasks: int) -> After:
    return After("afterok", array, tasks=tasks)


def corr(array: str) -> After:
    return After("aftercorr", array)


def test_arrays_and_edges_by_hand() -> None:
    """Three seeds share a train set: were all six in one array, a failed train set would block the other's models."""
    first, second, three = (0, 1, 2), (3, 4, 5), (0, 1, 2)
    assert arrays(graph().parents()) == [
        Array("train", "train", (0, 1), (0, 1), ()),
        Array("pool", "pool", (0,), (0,), ()),
        Array("held", "held", (0,), (0,), ()),
        Array("base.0", "base", first, three, (only("train", 0),)),
        Array("base.1", "base", second, three, (only("train", 1),)),
        Array("sft.0", "sft", first, three, (corr("base.0"), only("train", 0))),
        Array("sft.1", "sft", second, three, (corr("base.1"), only("train", 1))),
        Array("convert_sft.0", "convert_sft", first, three, (corr("sft.0"),)),
        Array("convert_sft.1", "convert_sft", second, three, (corr("sft.1"),)),
        Array("rl.0", "rl", first, three, (corr("convert_sft.0"), whole("pool"))),
        Array("rl.1", "rl", second, three, (corr("convert_sft.1"), whole("pool"))),
        Array("convert_rl.0", "convert_rl", first, three, (corr("rl.0"),)),
        Array("convert_rl.1", "convert_rl", second, three, (corr("rl.1"),)),
        # the evaluation of SFT does not wait for RL
        Array("eval.0", "eval", first, three, (corr("base.0"), whole("held"))),
        Array("eval.1", "eval", second, three, (corr("base.1"), whole("held"))),
        Array("eval.2", "eval", (6, 7, 8), three, (corr("convert_sft.0"), whole("held"))),
        Array("eval.3", "eval", (9, 10, 11), three, (corr("convert_sft.1"), whole("held"))),
        Array("eval.4", "eval", (12, 13, 14), three, (corr("convert_rl.0"), whole("held"))),
        Array("eval.5", "eval", (15, 16, 17), three, (corr("convert_rl.1"), whole("held"))),
    ]


def test_a_sealed_stage_is_not_submitted_and_gets_no_edge() -> None:
    sealed = frozenset({("train", 0), ("train", 1), ("pool", 0), ("held", 0)} | {("base", i) for i in range(6)})
    planned = arrays(graph().parents(), sealed)
    assert planned[0] == Array("sft", "sft", tuple(range(6)), tuple(range(6)), ())
    assert [(a.stage, len(a.elements)) for a in planned] == [
        ("sft", 6), ("convert_sft", 6), ("rl", 6), ("convert_rl", 6), ("eval", 6), ("eval", 6), ("eval", 6),
    ]  # fmt: skip


def test_only_what_is_left_is_submitted_element_by_element() -> None:
    parents = {"a": ((), (), ()), "b": ((Edge("a", 0),), (Edge("a", 1),), (Edge("a", 2),))}
    assert arrays(parents, frozenset({("a", 1)})) == [
        Array("a", "a", (0, 2), (0, 1), ()),
        Array("b.0", "b", (0, 2), (0, 1), (corr("a"),)),
        Array("b.1", "b", (1,), (0,), ()),
    ]


def test_parents_that_are_still_running_are_matched_by_the_numbers_of_their_tasks() -> None:
    parents = {"a": ((), (), ()), "b": ((Edge("a", 0),), (Edge("a", 1),), (Edge("a", 2),))}
    planned = arrays(parents, frozenset({("a", 0)}), {("a", 1): "12_7", ("a", 2): "12_5"})
    assert planned == [
        Array("b.0", "b", (0,), (0,), ()),
        Array("b.1", "b", (1, 2), (7, 5), (After("aftercorr", job="12"),)),
    ]


def test_long_arrays_are_split_and_the_edges_follow() -> None:
    parents = {"a": ((),) * 5, "b": tuple((Edge("a", i),) for i in range(5))}
    assert arrays(parents, max_array=2) == [
        Array("a.0", "a", (0, 1), (0, 1), ()),
        Array("a.1", "a", (2, 3), (0, 1), ()),
        Array("a.2", "a", (4,), (0,), ()),
        Array("b.0", "b", (0, 1), (0, 1), (corr("a.0"),)),
        Array("b.1", "b", (2, 3), (0, 1), (corr("a.1"),)),
        Array("b.2", "b", (4,), (0,), (corr("a.2"),)),
    ]


def test_250_elements_under_a_limit_of_101_are_three_arrays_a_stage() -> None:
    parents = {"a": ((),) * 250, "b": tuple((Edge("a", i),) for i in range(250))}
    planned = arrays(parents, max_array=101)
    assert [(a.name, len(a.elements), a.after) for a in planned] == [
        ("a.0", 101, ()), ("a.1", 101, ()), ("a.2", 48, ()),
        ("b.0", 101, (corr("a.0"),)), ("b.1", 101, (corr("a.1"),)), ("b.2", 48, (corr("a.2"),)),
    ]  # fmt: skip


def test_many_children_of_few_parents_wait_for_the_very_task() -> None:
    """One data set for 100 seeds is one array; four shards of each of 100 models are four arrays."""
    fan = {"data": ((), ()), "sft": tuple((Edge("data", i // 100),) for i in range(200))}
    assert [(a.elements[0], len(a.elements), a.after) for a in arrays(fan)[1:]] == [
        (0, 100, (only("data", 0),)), (100, 100, (only("data", 1),)),
    ]  # fmt: skip
    shards = {"model": ((),) * 100, "eval": tuple((Edge("model", i // 4),) for i in range(400))}
    planned = arrays(shards)[1:]
    assert [(a.elements[:3], a.tasks[:3], a.after) for a in planned] == [
        ((k, k + 4, k + 8), (0, 1, 2), (corr("model"),)) for k in range(4)
    ]


def test_a_child_of_many_waits_for_all_of_them() -> None:
    parents = {"eval": ((),) * 5, "report": (tuple(Edge("eval", i) for i in range(5)),)}
    assert [a.after for a in arrays(parents, max_array=3)[2:]] == [(whole("eval.0"), whole("eval.1"))]


@st.composite
def small_graphs(draw: st.DrawFn) -> dict[str, tuple[tuple[Edge, ...], ...]]:
    found: dict[str, tuple[tuple[Edge, ...], ...]] = {}
    for number in range(draw(st.integers(1, 5))):
        earlier = [Edge(stage, i) for stage, needs in found.items() for i in range(len(needs))]
        edges = st.lists(st.sampled_from(earlier), max_size=3, unique=True) if earlier else st.just([])
        found[f"s{number}"] = tuple(tuple(draw(edges)) for _ in range(draw(st.integers(1, 6))))
    return found


@given(small_graphs(), st.data(), st.integers(1, 4))
def test_every_plan_runs_each_element_once_after_exactly_its_parents(
    parents: dict[str, tuple[tuple[Edge, ...], ...]], data: st.DataObject, limit: int
) -> None:
    everything = [Edge(stage, i) for stage, needs in parents.items() for i in range(len(needs))]
    sealed = frozenset(data.draw(st.sets(st.sampled_from(everything))))
    # What is in hand from before: its parents are sealed or in hand too, as after any launch.
    chosen = data.draw(st.sets(st.sampled_from(everything)))
    active: dict[tuple[str, int], str] = {}
    for number, edge in enumerate(everything):
        if edge in chosen - sealed and all(p in sealed or p in active for p in parents[edge.stage][edge.element]):
            active[edge] = f"{data.draw(st.integers(90, 92))}_{number}"
    planned = arrays(parents, sealed, active, max_array=limit)
    members = [(a.stage, i) for a in planned for i in a.elements]
    assert sorted(members) == sorted(set(everything) - sealed - set(active))
    assert all(len(a.elements) <= limit and len(set(a.tasks)) == len(a.elements) for a in planned)
    assert len({a.name for a in planned}) == len(planned)
    element_at = {
        (a.name, task): Edge(a.stage, i) for a in planned for i, task in zip(a.elements, a.tasks, strict=True)
    }
    element_at |= {(job.partition("_")[0], int(job.partition("_")[2])): Edge(*key) for key, job in active.items()}
    names: list[str] = []
    for array in planned:
        for index, task in zip(array.elements, array.tasks, strict=True):
            waits = set()
            for after in array.after:
                source = after.array or after.job
                assert after.array is None or after.array in names  # submitted before
                assert source is not None
                if after.kind == "aftercorr":
                    waits.add(element_at[source, task])
                else:
                    every = [t for name, t in element_at if name == source]
                    waits |= {element_at[source, t] for t in after.tasks or every}
            assert waits == set(parents[array.stage][index]) - sealed  # no edge is missing and none is too many
        names.append(array.name)


def test_the_fingerprint_follows_everything_that_matters_and_nothing_else() -> None:
    def prints(*overrides: str, code: str = "c") -> dict[tuple[str, int], str]:
        return fingerprints(graph("sweep={}", *overrides), code, {}, {})

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
