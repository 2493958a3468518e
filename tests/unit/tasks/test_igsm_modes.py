"""iGSM as the original counts it, problems that are repeated in other orders, and several processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from igsm_cases import BRIDGE, DEMO, question
from pydantic import ValidationError
from solution_verifier import needed_quantities, verify

from bridge.behaviors import writer
from bridge.config.stages import BEHAVIORS, Behavior, DataSettings
from bridge.config.tasks import IgsmSettings
from bridge.errors import UserError
from bridge.stages.data import write_split
from bridge.stages.datacheck import check
from bridge.tasks import Example, Split
from bridge.tasks.dag import Node, Problem, reordered
from bridge.tasks.igsm.solver import Reader, solve
from bridge.tasks.igsm.task import Igsm, Orders
from bridge.tasks.parallel import sequence
from bridge.tasks.streams import stream
from bridge.tasks.tables import read_examples

MED = IgsmSettings(name="igsm", mode="med")
HARD = IgsmSettings(name="igsm", mode="hard")
VANILLA = BEHAVIORS["vanilla"]


def independent(text: str) -> int:
    """The answer, found without the project's code: premises become equations, and what can be computed is, until the
    question is there. Items belong to the category that is their last word."""
    *premises, asked = text.split("\n")
    modulus = int(found[1]) if (found := re.search(r", modulo (\d+)\?$", asked)) else None
    goal = re.fullmatch(r"What is the number of (.+?)(, modulo \d+)?\?", asked)[1]  # type: ignore[index]
    rules = dict(re.fullmatch(r"The number of (.+?) equals (.+)\.", line).groups() for line in premises)  # type: ignore[union-attr, misc]
    known: dict[str, int] = {}
    holds: dict[str, set[str]] = {}
    for name in rules:
        container, item = name[5:].split("'s ")
        holds.setdefault(container, set()).add(item)

    def below(item: str) -> set[str]:
        return {category for other in holds.get(item, ()) for category in {other.split()[-1]} | below(other)}

    totals = {(container, category) for container in holds for category in below(container)}
    while goal not in known:
        before = len(known)
        for name, right in rules.items():
            names = re.findall(r"each [A-Z]\w+ [A-Z]\w+'s [A-Z]\w+(?: [A-Z]\w+)?", right)
            if name not in known and all(other in known for other in names):
                values = [known[other] for other in names]
                number = int(right.split()[0]) if right[0].isdigit() else None
                value = values[0] - values[1] if "difference" in right else sum(values)
                if number is not None:
                    value = value * number if " times " in right else value + number
                known[name] = value % modulus if modulus else value
        for container, category in totals:
            parts = []
            for item in holds[container]:
                if item.split()[-1] == category:
                    parts.append([f"each {container}'s {item}"])
                elif category in below(item):
                    parts.append([f"each {container}'s {item}", f"each {item}'s {category}"])
            if all(name in known for part in parts for name in part):
                value = sum(known[part[0]] * (known[part[1]] if len(part) > 1 else 1) for part in parts)
                known[f"each {container}'s {category}"] = value % modulus if modulus else value
        assert len(known) > before, f"cannot be solved:\n{text}"
    return known[goal]


# ---- modes


@pytest.mark.parametrize(
    "task",
    [BRIDGE, DEMO, MED, HARD, MED.model_copy(update={"ops": (20, 23)}), HARD.model_copy(update={"ops": (28, 32)})],
    ids=["bridge", "demo", "med", "hard", "med 20-23", "hard 28-32"],
)
def test_an_independent_solver_finds_every_answer(task: IgsmSettings) -> None:
    for row in Igsm(task).rows("test", 150, 5):
        assert str(independent(question(row))) == row.gold


@pytest.mark.parametrize("mode", [MED, HARD.model_copy(update={"ops": (28, 32)})], ids=["med", "hard"])
@pytest.mark.parametrize("subgoal", [False, True])
def test_modulo_every_value_and_every_rewrite_is_reduced(mode: IgsmSettings, subgoal: bool) -> None:
    behavior = Behavior(reflection=0.3, subgoal=subgoal, analysis=2)
    answers = set()
    for row in Igsm(mode).rows("sft", 150, 2, writer(behavior, mode.style)):
        reader = Reader(question(row))
        assert reader.modulus == 23
        assert all(0 <= reader.solve(name).value < 23 for name in needed_quantities(reader))
        verify(question(row), row.response or "", subgoal)
        assert "-" not in (row.response or "").replace("- ", "").replace(" - ", "")
        answers.add(row.gold)
    assert len(answers) > 15


def test_modes_set_defaults_that_settings_may_replace() -> None:
    assert (MED.modulus, MED.ops, MED.max_instances, MED.literals) == (23, (3, 15), 20, (0, 22))
    assert (HARD.modulus, HARD.ops, HARD.max_instances) == (23, (3, 21), 28)
    assert BRIDGE.modulus is None and BRIDGE.ops == (15, 20)
    other = IgsmSettings.model_validate(
        {"name": "igsm", "mode": "med", "ops": (20, 23), "modulus": 7, "literals": (0, 6)}
    )
    assert (other.ops, other.modulus) == ((20, 23), 7)
    assert IgsmSettings.model_validate(other.model_dump()) == other
    with pytest.raises(ValidationError, match="smaller than modulus"):
        IgsmSettings.model_validate({"name": "igsm", "mode": "med", "modulus": 7})
    with pytest.raises(ValidationError, match="mode"):
        IgsmSettings.model_validate({"name": "igsm", "mode": ["med"]})


# ---- other orders


def rows(split: Split, size: int, orders: Orders, behavior: Behavior = VANILLA) -> list[Example]:
    return list(Igsm(BRIDGE).rows(split, size, 9, writer(behavior, BRIDGE.style), orders=orders))


def test_rc_aug_repeats_problems_with_reordered_solutions() -> None:
    plain, found = rows("sft", 50, Orders()), rows("sft", 200, Orders(solution=4))
    different = 0
    for number, alone in enumerate(plain):
        group = found[4 * number : 4 * number + 4]
        assert (group[0].prompt, group[0].response) == (alone.prompt, alone.response)
        assert {(question(row), row.gold) for row in group} == {(question(alone), alone.gold)}
        for row in group:
            verify(question(row), row.response or "", subgoal=False)
        orders = {tuple(re.findall(r"each [^,.]*?'s [A-Z]\w+(?: [A-Z]\w+)?", row.response or "")) for row in group}
        different += len(orders)
    assert different > 3.5 * len(plain)
    assert [row.id for row in found] == [str(number) for number in range(200)]


def test_pp_aug_repeats_problems_with_permuted_premises() -> None:
    plain, found = rows("sft", 50, Orders()), rows("sft", 200, Orders(premises=4))
    for number, alone in enumerate(plain):
        group = found[4 * number : 4 * number + 4]
        assert (group[0].prompt, group[0].response) == (alone.prompt, alone.response)
        assert len({question(row) for row in group}) == 4
        assert len({tuple(sorted(question(row).split("\n"))) for row in group}) == 1
        assert {question(row).split("\n")[-1] for row in group} == {question(alone).split("\n")[-1]}
        assert {(row.response, row.gold) for row in group} == {(alone.response, alone.gold)}


def test_repeats_may_end_in_the_middle_and_are_for_training_only(tmp_path: Path) -> None:
    assert rows("sft", 6, Orders(2, 2)) == rows("sft", 8, Orders(2, 2))[:6]
    data = DataSettings(kind="data", split="sft", size=24, solution_orders=4)
    summary = write_split(BRIDGE, data, tmp_path / "rc.parquet")
    assert summary["rows"] == 24 and summary["solution_orders"] == 4
    assert len({question(row) for row in read_examples(tmp_path / "rc.parquet")}) == 6
    assert check(tmp_path / "rc.parquet", [])["ok"]
    with pytest.raises(ValidationError, match="only split sft"):
        DataSettings(kind="data", split="rl", size=5, premise_orders=2)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    size = draw(st.integers(1, 12))
    nodes = []
    for index in range(size):
        parents = tuple(draw(st.lists(st.integers(0, index - 1), max_size=3))) if index else ()
        nodes.append(Node(str(index), parents, "", 0, "", 1))
    needed = {size - 1}
    for index in reversed(range(size)):
        if index in needed:
            needed |= set(nodes[index].parents)
    rest = [index for index in range(size) if index not in needed]
    return Problem("", nodes, sorted(needed), rest, 0)


@given(problems(), st.integers(0, 10**6))
def test_a_reordered_solution_computes_the_same_after_its_parents(problem: Problem, seed: int) -> None:
    steps = reordered(problem, stream(seed)).steps
    assert sorted(steps) == problem.steps and steps[-1] == problem.steps[-1]
    for position, node in enumerate(steps):
        assert set(problem.nodes[node].parents) <= set(steps[:position])


def test_every_order_comes_up() -> None:
    """Two chains of two: the six ways to interleave them, by hand."""
    nodes = [
        Node(name, parents, "", 0, "", 1) for name, parents in zip("abcdq", [(), (0,), (), (2,), (1, 3)], strict=True)
    ]
    problem = Problem("", nodes, [0, 1, 2, 3, 4], [], 0)
    found = Counter("".join(nodes[n].name for n in reordered(problem, stream(seed)).steps) for seed in range(600))
    assert set(found) == {"abcdq", "acbdq", "acdbq", "cdabq", "cadbq", "cabdq"}
    assert min(found.values()) > 40


# ---- several processes


def square(number: int) -> int:
    return number * number


def fails_at_five(number: int) -> int:
    if number == 5:
        raise UserError("five")
    return number


def dies_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def its_process(number: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_errors_too(workers: int) -> None:
    results = sequence(square, workers)
    assert [next(results) for _ in range(7)] == [0, 1, 4, 9, 16, 25, 36]
    results.close()  # type: ignore[attr-defined]
    found = []
    with pytest.raises(UserError, match="five"):
        for number in sequence(fails_at_five, workers):
            found.append(number)
    assert found == [0, 1, 2, 3, 4]


def test_a_process_that_dies_is_told_and_none_is_left() -> None:
    with pytest.raises(RuntimeError, match="has died"):
        list(sequence(dies_at_three, 2))
    results = sequence(its_process, 2)
    processes = {next(results), next(results)}
    assert len(processes) == 2 and os.getpid() not in processes
    results.close()  # type: ignore[attr-defined]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_processes_end_when_the_one_that_reads_is_killed() -> None:
    reader, writer_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        results = sequence(its_process, 2)
        os.write(writer_end, f"{next(results)} {next(results)}".encode())
        time.sleep(60)
        os._exit(0)
    os.close(writer_end)
    processes = [int(word) for word in os.read(reader, 100).split()]
    os.close(reader)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.02)


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.stages.data.ROWS_PER_PROCESS", 100)
    data = DataSettings(kind="data", split="sft", size=700, behavior=BEHAVIORS["bridge"], solution_orders=2)
    summaries = [write_split(DEMO, data, tmp_path / f"{n}.parquet", workers=n) for n in (1, 2, 3)]
    files = [(tmp_path / f"{n}.parquet").read_bytes() for n in (1, 2, 3)]
    assert files[0] == files[1] == files[2]
    assert summaries[0] == summaries[1] == summaries[2]
    tiny = DEMO.model_copy(update={"ops": (40, 40)})
    with pytest.raises(UserError, match="no problem with 40 operations"):
        write_split(tiny, data, tmp_path / "none.parquet", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.parquet", "2.parquet", "3.parquet"]


# ---- texts of the other generators


BY_LINE = """\
The number of each Hilltop College's Sculpture Room equals 2 more than each Physics Laboratory's Blue Satchel.
The number of each Hilltop College's Physics Laboratory equals the difference of each Seaside Academy's Classroom and \
each Sculpture Room's Backpack.
The number of each Seaside Academy's Sculpture Room equals 3.
The number of each Sculpture Room's Blue Satchel equals 4.
The number of each Sculpture Room's Rucksack equals 2 times each Sculpture Room's Blue Satchel.
The number of each Physics Laboratory's Blue Satchel equals the sum of each Sculpture Room's Blue Satchel, \
each Sculpture Room's Rucksack and each Seaside Academy's Sculpture Room.
How many {item} does each {container} have?"""
# In a Sculpture Room 4 satchels and 8 rucksacks, in a Physics Laboratory 4 + 8 + 3 satchels; rooms: Seaside 3, Hilltop
# 17 and 3 - 12.


@pytest.mark.parametrize(
    ("container", "item", "value"),
    [
        ("Sculpture Room", "Backpack", 12),
        ("Hilltop College", "Sculpture Room", 17),
        ("Hilltop College", "Physics Laboratory", 3 - 12),
        ("Hilltop College", "Classroom", 17 - 9),
        ("Hilltop College", "Backpack", 17 * 12 - 9 * 15),
        ("Seaside Academy", "Backpack", 3 * 12),
    ],
)
def test_texts_in_the_words_of_bridges_generator(container: str, item: str, value: int) -> None:
    """What is a classroom and what a backpack follows from what holds what, not from names."""
    text = BY_LINE.format(container=container, item=item)
    assert solve(text) == value
    assert solve(text, 23) == value % 23


def test_texts_in_the_words_of_the_original() -> None:
    sentences = [
        "The number of each Old District's Anna's Corner equals 20 more than each Anna's Corner's Pens and Pencils",
        "The number of each Anna's Corner's Pens and Pencils equals 5 times as much as the difference of each Anna's "
        "Corner's Bread and each New Town's Anna's Corner",
        "The number of each Anna's Corner's Bread equals 7",
        "New Town has Anna's Corner",
        "The number of Harbour's Anna's Corner equals the sum of each Dead End's Product and each Old District's "
        "Anna's Corner",
    ]
    # 5 * (7 - 1) = 30 = 7; 20 + 7 = 27 = 4; a container that holds nothing has nothing of anything: 0 + 4.
    for asked, value in [
        ("How many Pens and Pencils does Anna's Corner have?", 7),
        ("How many Anna's Corner does Old District have?", 4),
        ("How many Product does Anna's Corner have?", 14),
        ("How many Product does Old District have?", 4 * 14 % 23),
        ("How many Anna's Corner does Harbour have?", 4),
    ]:
        facts = ". ".join(sentences) + "."
        assert solve(f" {facts} {asked}", 23) == solve(f"{asked} {facts}", 23) == value
        assert solve(f"{facts} {asked}".replace("'", "’"), 23) == value


def test_a_text_with_two_readings_is_refused() -> None:
    """Three categories in a row and only one total, of the third of four: its container may be of either neighbour."""
    text = (
        "The number of each Ash's Birch equals 2.\nThe number of each Birch's Cedar equals 3.\n"
        "How many Animal does each Ash have?"
    )
    with pytest.raises(ValueError, match="two ways, with the answers"):
        solve(text)
    assert solve(text.replace("Birch", "Birch Enclosure")) == 6
    assert solve(text.replace("Cedar", "Cedar Bone")) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How many apples does Tom have?", "neither given nor a total"),
        ("Tom is tall. How many Animal does Tom have?", "not a premise"),
        ("The number of each A's B equals 1. The number of each A's B equals 1. How many B does A have?", "twice"),
        ("The number of each A's B equals 3 under C. How many B does A have?", "nothing says"),
        (
            "The number of each A's B equals each B's A. The number of each B's A equals 1. How many Bone does A have?",
            "itself",
        ),
    ],
)
def test_other_texts_that_cannot_be_solved(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        solve(text)
