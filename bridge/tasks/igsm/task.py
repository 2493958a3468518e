"""Streams of iGSM problems: which candidates become rows of a split."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from bridge.config.tasks import IgsmSettings
from bridge.errors import UserError
from bridge.tasks import frames
from bridge.tasks.base import Example, Split, Task, Writer
from bridge.tasks.dag import Problem, reordered
from bridge.tasks.igsm.formulas import draw_formulas
from bridge.tasks.igsm.graph import draw_graph
from bridge.tasks.igsm.names import families, quantity
from bridge.tasks.igsm.solver import solve
from bridge.tasks.igsm.text import permuted, write_problem
from bridge.tasks.parallel import sequence
from bridge.tasks.streams import Draw, between, stream

# Of the 23 bins of the sketch. The two sets that are drawn in large numbers have the most.
SPLIT_BINS: dict[Split, range] = {"sft": range(9), "rl": range(9, 18), "val": range(18, 20), "test": range(20, 23)}
ORIGINAL_BINS: dict[Split, range] = {"sft": range(8), "rl": range(8, 16), "val": range(16, 18), "test": range(18, 23)}
"""In the original's modes: as there, bins 0-15 are for training and 16-22 are not."""
CHUNK = 50  # candidates that a process works out at a time
GRAPHS = 3_000  # graphs drawn for one problem before the settings are called impossible
STALL = 20_000  # candidates refused in a row before the settings are called exhausted
WHOLE_NAMES = 160  # up to so many quantities, each gets a token of its own


class Orders(NamedTuple):
    """How often a problem is repeated: with so many orders of the solution's steps, times so many of its premises."""

    solution: int = 1
    premises: int = 1


ONCE = Orders()


class Candidate(NamedTuple):
    """A problem that may become rows."""

    digest: bytes
    answer: int
    ops: int
    texts: list[tuple[str, str | None]]
    """Question and response of each row."""


class Igsm(Task):
    """The iGSM task (see `bridge.tasks.Task`)."""

    answer_kind = "number"
    worded = True

    def __init__(self, settings: IgsmSettings) -> None:
        self.settings = settings
        self.response_prefix = frames.response_prefix(settings.style)

    def rows(
        self,
        split: Split,
        size: int | None,
        seed: int,
        writer: Writer | None = None,
        rejected: Counter[str] | None = None,
        *,
        orders: Orders = ONCE,
        workers: int = 1,
    ) -> Iterator[Example]:
        """The first `size` rows of a split, the same for every size, writer, machine and number of processes.

        Candidates are numbered; each has streams of its own for the problem and for the wording. One is refused
        if its problem is there already, or if its answer would exceed its share of the problems so far.
        """
        if size is None:
            raise UserError("task igsm: size: is required, because the problems have no end")
        rejected = Counter() if rejected is None else rejected
        seen: set[bytes] = set()
        answers: Counter[int] = Counter()
        row = refused = 0
        work = partial(_candidates, self.settings, split, seed, writer, orders)
        for candidate in chain.from_iterable(sequence(work, workers)):
            if isinstance(candidate, UserError):
                raise candidate
            if candidate.digest in seen:
                rejected["duplicate"] += 1
                refused += 1
            elif answers[candidate.answer] > self.settings.max_answer_share * (len(seen) + 1):
                rejected["answer_share"] += 1
                refused += 1
            else:
                refused = 0
                seen.add(candidate.digest)
                answers[candidate.answer] += 1
                for question, response in candidate.texts:
                    yield Example(
                        id=str(row),
                        prompt=frames.prompt(self.settings.style, question),
                        response=response,
                        gold=str(candidate.answer),
                        extra={"num_ops": candidate.ops, "final_answer": candidate.answer},
                    )
                    row += 1
                    if row == size:
                        return
            if refused == STALL:
                raise UserError(
                    f"task igsm: no new problem in {STALL} draws after {row} rows of {split}; "
                    "ask for fewer rows or widen ops, width, names or literals, or raise max_answer_share"
                )

    def vocabulary(self) -> list[str]:
        """Pieces of the problems' text that a tokenizer made for the task should not cut."""
        pieces = {"The number of ", ".\nThe number of ", ".\nWhat is the number of ", " equals "}
        pieces |= {"the sum of ", "the difference of ", " and ", " more than ", " times ", ", "}
        if self.settings.modulus:
            pieces.add(f", modulo {self.settings.modulus}?")
        whole: set[str] = set()
        parts: set[str] = set()
        for family in families(self.settings):
            for layer, (_, containers) in enumerate(family):
                deeper = family[layer + 1 : layer + self.settings.depth[1]]
                things = [category for category, _ in deeper] + (deeper[0][1] if deeper else [])
                whole |= {quantity(container, thing) for container in containers for thing in things}
                parts |= {quantity(container, "") for container in containers if things} | set(things)
        return sorted(pieces | (whole if len(whole) <= WHOLE_NAMES else parts))


def draw_problem(settings: IgsmSettings, split: Split, draw: Draw) -> Problem:
    """One problem of a split, checked by the solver.

    Raises UserError if the settings allow no such problem, AssertionError if generator and solver disagree.
    """
    low, high = settings.ops
    ops = between(draw, low, high)
    if settings.ops_draw == "low":
        ops = min(ops, between(draw, low, high))
    bins = (SPLIT_BINS if settings.mode == "bridge" else ORIGINAL_BINS)[split]
    for _ in range(GRAPHS):
        graph = draw_graph(settings, ops, draw)
        if graph is None:
            continue
        formulas = draw_formulas(settings, graph, bins, draw)
        if formulas is None:
            continue
        problem = write_problem(settings, graph, formulas, ops, draw)
        found = solve(problem.text)
        if found != problem.answer:
            raise AssertionError(f"the solver finds {found}, not {problem.answer}:\n{problem.text}")
        return problem
    raise UserError(
        f"task igsm: no problem with {ops} operations for split {split} in {GRAPHS} graphs; "
        "widen ops, depth, width, max_instances or max_answer, or set split_by to numbers"
    )


def _candidates(
    settings: IgsmSettings, split: Split, seed: int, writer: Writer | None, orders: Orders, chunk: int
) -> list[Candidate | UserError]:
    """Some consecutive candidates, up to the first that the settings do not allow."""
    found: list[Candidate | UserError] = []
    collecting = gc.isenabled()
    gc.disable()  # nothing here refers to itself, and looking for what does takes a tenth of the time
    try:
        for number in range(CHUNK * chunk, CHUNK * (chunk + 1)):
            key = (seed, split, number)
            problem = draw_problem(settings, split, stream(*key, "problem"))
            texts = _texts(problem, writer, orders, key)
            found.append(Candidate(_identity(problem), problem.answer, problem.ops, texts))
    except UserError as error:
        found.append(error)
    finally:
        if collecting:
            gc.enable()
    return found


def _texts(
    problem: Problem, writer: Writer | None, orders: Orders, key: tuple[object, ...]
) -> list[tuple[str, str | None]]:
    """The rows of a problem. The first is the one that stands alone where nothing is repeated."""
    questions = [problem.text]
    questions += [permuted(problem.text, stream(*key, "premises", copy)) for copy in range(1, orders.premises)]
    if writer is None:
        return [(question, None) for question in questions * orders.solution]
    responses = [writer(problem, stream(*key, "wording"))]
    for copy in range(1, orders.solution):
        draw = stream(*key, "solution", copy)
        responses.append(writer(reordered(problem, draw), draw))
    return [(question, response) for response in responses for question in questions]


def _identity(problem: Problem) -> bytes:
    """Equal for problems with the same premises, whatever their order, and the same question."""
    *premises, question = problem.text.split("\n")
    return blake2b("\n".join([*sorted(premises), question]).encode(), digest_size=8).digest()
