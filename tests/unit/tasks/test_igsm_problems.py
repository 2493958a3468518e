"""Problems: exact operation counts, the independent solver, splits, shares of answers, determinism."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from igsm_cases import BRIDGE, DEMO, question
from pydantic import ValidationError
from solution_verifier import inputs, needed_quantities, verify

from bridge.behaviors import writer
from bridge.config.stages import BEHAVIORS, Behavior
from bridge.config.tasks import IgsmSettings, Style
from bridge.errors import UserError
from bridge.tasks import Example, Split, load_task
from bridge.tasks.igsm.formulas import draw_formulas
from bridge.tasks.igsm.graph import Graph
from bridge.tasks.igsm.names import ECOSYSTEMS
from bridge.tasks.igsm.solver import Reader, UnsolvableError, solve
from bridge.tasks.igsm.structure import TOTAL, Structure, prerequisites
from bridge.tasks.igsm.text import write_problem
from bridge.tasks.streams import stream

SPLITS: tuple[Split, ...] = get_args(Split)
SETTINGS = {
    "bridge": BRIDGE,
    "hard": IgsmSettings(name="igsm", ops=(25, 25)),
    "demo": DEMO,
    "one operation": IgsmSettings(name="igsm", ops=(1, 2), ops_draw="uniform", split_by="numbers"),
    "deep": IgsmSettings(name="igsm", ops=(8, 12), depth=(4, 4), width=(1, 2), distractors=0),
    "no negatives": IgsmSettings(name="igsm", ops=(6, 14), bound="all", negative=False, max_answer=200),
}


def rows(task: IgsmSettings, split: Split, size: int, seed: int = 0) -> list[Example]:
    return list(load_task(task).rows(split, size, seed))


def operations(reader: Reader) -> int:
    return sum(max(1, inputs(reader, name) - 1) for name in needed_quantities(reader))


def check(task: IgsmSettings, row: Example) -> None:
    """Everything that the settings promise, found out from the text."""
    reader = Reader(question(row))
    assert str(reader.solve(reader.question).value) == row.gold
    assert operations(reader) == row.extra["num_ops"]
    assert task.ops[0] <= operations(reader) <= task.ops[1]
    assert len(reader.premises) <= task.max_instances
    needed = needed_quantities(reader)
    spare = [name for name in reader.premises if name not in needed]
    assert task.distractors is None or len(spare) <= task.distractors
    checked = [*needed, *spare] if task.bound == "all" else [reader.question]
    for value in (reader.solve(name).value for name in checked):
        assert (1 - task.max_answer if task.negative else 0) <= value < task.max_answer
    for right in reader.premises.values():
        if number := re.match(r"(\d+)( more than| times)?", right):
            least = {" more than": 1, " times": 2}.get(number[2], 0)
            assert max(least, task.literals[0]) <= int(number[1]) <= task.literals[1]
        assert 1 <= len(re.findall("each ", right)) + bool(number) <= 4


@pytest.mark.parametrize("name", SETTINGS)
def test_every_problem_keeps_what_the_settings_promise(name: str) -> None:
    found = rows(SETTINGS[name], "sft", 500, seed=3)
    for row in found:
        check(SETTINGS[name], row)
    assert len({question(row) for row in found}) == 500
    assert {row.extra["num_ops"] for row in found} == set(range(SETTINGS[name].ops[0], SETTINGS[name].ops[1] + 1))


@pytest.mark.slow
def test_ten_thousand_problems_of_bridges_own_size() -> None:
    for row in load_task(BRIDGE).rows("rl", 10_000, 200):
        check(BRIDGE, row)


@st.composite
def some_settings(draw: st.DrawFn) -> IgsmSettings:
    def ordered(low: int, high: int) -> tuple[int, int]:
        return tuple(sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high)))))  # type: ignore[return-value]

    names = draw(st.integers(2, 6))
    literals = ordered(0, 12)
    return IgsmSettings(
        name="igsm",
        ops=ordered(1, 24),
        ops_draw=draw(st.sampled_from(["low", "uniform"])),
        literals=(literals[0], max(2, literals[1])),
        max_answer=draw(st.integers(30, 2000)),
        bound=draw(st.sampled_from(["answer", "all"])),
        negative=draw(st.booleans()),
        max_answer_share=1.0,
        depth=ordered(2, 4),
        width=ordered(1, names),
        max_instances=draw(st.integers(18, 30)),
        distractors=draw(st.none() | st.integers(0, 4)),
        ecosystems=draw(st.none() | st.lists(st.sampled_from(sorted(ECOSYSTEMS)), min_size=1, unique=True)),
        names=names,
        split_by=draw(st.sampled_from(["structure", "numbers"])),
        style=Style(
            wording=draw(st.sampled_from(["varied", "fixed"])),
            letters=draw(st.sampled_from(["random", "sequential"])),
            frame=draw(st.sampled_from(["think", "plain"])),
        ),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(task=some_settings(), seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
def test_any_settings_give_right_problems_or_a_clear_refusal(task: IgsmSettings, seed: int, split: Split) -> None:
    behavior = Behavior(reflection=0.5, subgoal=True, analysis=3)
    try:
        found = list(load_task(task).rows(split, 4, seed, writer(behavior, task.style)))
    except UserError as error:
        assert "task igsm: no " in str(error) and "widen" in str(error)
        return
    for row in found:
        check(task, row)
        verify(question(row), row.response or "", subgoal=True)


def test_the_settings_of_the_demo_are_never_refused() -> None:
    assert all(len(rows(DEMO, split, 300)) == 300 for split in SPLITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ops", (5, 3)),
        ("ops", (0, 3)),
        ("literals", (0, 1)),
        ("depth", (1, 2)),
        ("depth", (2, 5)),
        ("width", (2, 7)),
        ("max_instances", 1),
        ("max_answer_share", 0.0),
        ("ecosystems", ["zoo"]),
        ("unknown", 1),
    ],
)
def test_impossible_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        IgsmSettings.model_validate({"name": "igsm", field: value})


def test_settings_that_run_out_of_problems_are_refused() -> None:
    tiny = IgsmSettings(
        name="igsm",
        ops=(1, 1),
        literals=(1, 2),
        max_answer_share=1.0,
        depth=(2, 2),
        width=(1, 1),
        max_instances=1,
        names=2,
        ecosystems=["farm"],
        split_by="numbers",
    )
    with pytest.raises(UserError, match=r"no (new )?problem"):
        rows(tiny, "sft", 1000)
    with pytest.raises(UserError, match="no problem with 30 operations"):
        rows(tiny.model_copy(update={"ops": (30, 30)}), "sft", 1)


# ---- operations and totals, by hand


HARBOR = """\
The number of each Amber Harbor's Tall Ship equals 2.
The number of each Amber Harbor's Swift Ship equals 3.
The number of each Tall Ship's Guest Cabin equals 4.
The number of each Swift Ship's Guest Cabin equals 1.
The number of each Swift Ship's Upper Cabin equals 5.
The number of each Guest Cabin's Oak Chest equals 7.
The number of each Upper Cabin's Oak Chest equals the difference of each Swift Ship's Guest Cabin and each \
Amber Harbor's Swift Ship.
"""


@pytest.mark.parametrize(
    ("asked", "answer", "ops"),
    [
        ("each Swift Ship's Cabin", 1 + 5, 1 + 1 + 1),  # two constants, a sum of two
        ("each Tall Ship's Cabin", 4, 1 + 1),  # a sum of one costs one
        ("each Amber Harbor's Cabin", 2 * 4 + 3 * (1 + 5), 5 + 1 + 1 + 3),  # five constants, two totals, four parents
        ("each Upper Cabin's Chest", 1 - 3, 2 + 1 + 1),
        ("each Swift Ship's Chest", 1 * 7 + 5 * (1 - 3), 4 + 1 + 2 * 1 + 3),
        # 2 * (4 * 7) + 3 * (1 * 7 + 5 * (1 - 3)); ops: six constants, one difference, totals of the two cabins
        # (one each), of the Tall Ship (one), of the Swift Ship (three) and of the Harbor (three)
        ("each Amber Harbor's Chest", 2 * 28 + 3 * (7 - 10), 6 + 1 + 2 + 1 + 3 + 3),
    ],
)
def test_totals_by_hand(asked: str, answer: int, ops: int) -> None:
    text = HARBOR + f"What is the number of {asked}?"
    assert solve(text) == answer
    assert operations(Reader(text)) == ops


def test_a_total_two_levels_down_is_written_as_products() -> None:
    # Item 0 holds items 1 and 2; 1 holds 3; 2 holds 3 and 4. Asked: all innermost things in item 0.
    structure = Structure([0, 1, 1, 2, 2], 3, [[1, 2], [3], [3, 4], [], []])
    total_of_0, total_of_1, total_of_2 = (TOTAL + 64 * item + 2 for item in range(3))
    assert prerequisites(structure, total_of_2) == [64 * 2 + 3, 64 * 2 + 4]
    assert prerequisites(structure, total_of_0) == [1, total_of_1, 2, total_of_2]
    quantities = [1, 2, 64 + 3, 128 + 3, 128 + 4, total_of_1, total_of_2, total_of_0]
    parents: list[list[int]] = [[], [], [], [], [], [2], [3, 4], [0, 5, 1, 6]]
    graph = Graph(structure, quantities, parents, [True] * 5 + [False] * 3, needed=8)
    draw = stream("test")
    formulas = draw_formulas(BRIDGE, graph, range(23), draw)
    assert formulas is not None
    problem = write_problem(BRIDGE, graph, formulas, 10, draw)
    first, second, third, fourth, fifth = formulas.literals[:5]
    assert problem.answer == first * third + second * (fourth + fifth) == solve(problem.text)
    assert [node.formula for node in problem.nodes[5:]] == ["{}", "{} + {}", "{} * {} + {} * {}"]
    assert [node.inputs for node in problem.nodes] == [1, 1, 1, 1, 1, 1, 2, 4]
    assert operations(Reader(problem.text)) == 10


@pytest.mark.parametrize(
    ("right", "value"),
    [
        ("6", 6),
        ("each Tall Ship's Guest Cabin", 4),
        ("6 more than each Tall Ship's Guest Cabin", 10),
        ("6 times each Tall Ship's Guest Cabin", 24),
        ("the difference of each Tall Ship's Guest Cabin and each Swift Ship's Upper Cabin", -1),
        ("6 more than the difference of each Tall Ship's Guest Cabin and each Swift Ship's Upper Cabin", 5),
        ("6 times the difference of each Tall Ship's Guest Cabin and each Swift Ship's Upper Cabin", -6),
        ("the sum of each Tall Ship's Guest Cabin and each Swift Ship's Cabin", 10),
        (
            "3 times the sum of each Tall Ship's Guest Cabin, each Swift Ship's Cabin "
            "and each Swift Ship's Upper Cabin",
            45,
        ),
    ],
)
def test_the_solver_reads_every_kind_of_premise(right: str, value: int) -> None:
    name = "each Amber Harbor's Cargo Ship"
    assert solve(f"{HARBOR}The number of {name} equals {right}.\nWhat is the number of {name}?") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The number of each A B's C D equals 1\nWhat is the number of each A B's C D?", "not a premise"),
        ("Each A B's C D equals 1.\nWhat is the number of each A B's C D?", "not a premise"),
        ("The number of each A B's C D equals 1.", "not a question"),
        ("The number of each A B's C D equals 1.\nWhat is the number of each A B's E F?", "nothing says"),
        ("The number of each A B's C D equals each A B's C D.\nWhat is the number of each A B's C D?", "circle"),
        ("The number of each A B's C D equals 3 under each A B's E F.\nWhat is the number of each A B's C D?", "read"),
        (
            "The number of each A B's C D equals 1.\nThe number of each A B's C D equals 1.\n"
            "What is the number of each A B's C D?",
            "defined twice",
        ),
    ],
)
def test_the_solver_refuses_what_it_cannot_solve(text: str, reason: str) -> None:
    with pytest.raises(UnsolvableError, match=reason):
        solve(text)


def test_the_example_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "igsm.md").read_text(encoding="utf-8")
    assert solve(page.split("```")[1].strip()) == (2 + 8) + 8


def test_names_say_their_category() -> None:
    """The solver relies on it: the last word of an item is its category, and no name contains another's."""
    for family in ECOSYSTEMS.values():
        assert len(family) == 4 and len({category for category, _ in family}) == 4
        for category, words in family:
            assert len(set(words)) == 6
            assert all(re.fullmatch("[A-Z][a-z]+", word) for word in (category, *words))


# ---- splits


def structure_of(reader: Reader, name: str, numbers: bool) -> str:
    """What a quantity is computed from without names: made here from the text, unlike the generator's sketch."""
    parts = sorted(structure_of(reader, parent, numbers) for parent in reader.solve(name).parents)
    shape = re.sub(r"each [^,.]+?'s \w+( [A-Z]\w+)?", "#", reader.premises.get(name, f"total {len(parts)}"))
    if not numbers:
        shape = re.sub(r"\d+", "9", shape)
    return sha256(f"{shape} {parts}".encode()).hexdigest()


@pytest.mark.parametrize("split_by", ["structure", "numbers"])
def test_splits_share_no_structure(split_by: str) -> None:
    # So small that structures come back all the time: without the bins most would be in several splits.
    task = IgsmSettings.model_validate(
        {"name": "igsm", "ops": (4, 6), "depth": (2, 3), "literals": (1, 3), "split_by": split_by}
    )
    found = {
        split: Counter(
            structure_of(reader, reader.question, split_by == "numbers")
            for reader in (Reader(question(row)) for row in rows(task, split, 700))
        )
        for split in SPLITS
    }
    for one in SPLITS:
        assert max(found[one].values()) > 2
        for other in SPLITS:
            assert one == other or not found[one].keys() & found[other].keys()


# ---- answers and streams


@pytest.mark.parametrize(("task", "share"), [(BRIDGE, 0.1), (DEMO, 0.08), (BRIDGE, 0.02)])
def test_no_answer_dominates_any_beginning_of_a_split(task: IgsmSettings, share: float) -> None:
    task = task.model_copy(update={"max_answer_share": share})
    rejected: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for count, row in enumerate(load_task(task).rows("rl", 600, 0, None, rejected), 1):
        answers[row.gold] += 1
        assert answers.most_common(1)[0][1] <= share * count + 1
    assert rejected["answer_share"] > 0


def test_rows_do_not_depend_on_how_many_are_asked_for() -> None:
    many = rows(BRIDGE, "sft", 120, seed=4)
    assert list(islice(load_task(BRIDGE).rows("sft", 1000, 4), 120)) == many
    assert rows(BRIDGE, "sft", 30, seed=4) == many[:30]
    assert rows(BRIDGE, "sft", 30, seed=5) != many[:30]
    assert [row.id for row in many] == [str(number) for number in range(120)]


@pytest.mark.parametrize("task", [BRIDGE, DEMO], ids=["bridge", "demo"])
def test_behaviors_change_the_wording_and_never_the_problem(task: IgsmSettings) -> None:
    plain, injected = (
        list(load_task(task).rows("sft", 300, 7, writer(behavior, task.style)))
        for behavior in (BEHAVIORS["vanilla"], Behavior(reflection=0.3, subgoal=True, analysis=3))
    )
    for one, other in zip(plain, injected, strict=True):
        assert (one.prompt, one.gold, one.extra) == (other.prompt, other.gold, other.extra)
    assert sum(one.response != other.response for one, other in zip(plain, injected, strict=True)) > 200


def test_generated_text_is_pinned() -> None:
    """The same seed gives the same problem on every machine and Python; a change here changes every dataset."""
    digest = sha256("\n".join(question(row) for row in rows(BRIDGE, "test", 20, seed=1)).encode()).hexdigest()
    assert digest[:16] == "ae7a15f080b22819"
