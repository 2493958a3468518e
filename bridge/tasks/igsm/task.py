"""Streams of iGSM problems: which candidates become rows of a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from bridge.config.tasks import IgsmSettings
from bridge.errors import UserError
from bridge.tasks import frames
from bridge.tasks.base import Example, Split, Task, Writer
from bridge.tasks.dag import Problem
from bridge.tasks.igsm.formulas import draw_formulas
from bridge.tasks.igsm.graph import draw_graph
from bridge.tasks.igsm.names import families, quantity
from bridge.tasks.igsm.solver import solve
from bridge.tasks.igsm.text import write_problem
from bridge.tasks.streams import Draw, between, stream

# Of the 23 bins of the sketch. The two sets that are drawn in large numbers have the most.
SPLIT_BINS: dict[Split, range] = {"sft": range(9), "rl": range(9, 18), "val": range(18, 20), "test": range(20, 23)}
GRAPHS = 3_000  # graphs drawn for one problem before the settings are called impossible
STALL = 20_000  # candidates refused in a row before the settings are called exhausted
WHOLE_NAMES = 160  # up to so many quantities, each gets a token of its own


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
    ) -> Iterator[Example]:
        """The first `size` rows of a split, the same for every size, writer and machine.

        Candidates are numbered; each has streams of its own for the problem and for the wording. One is refused
        if its problem is there already, or if its answer would exceed its share of the rows so far.
        """
        if size is None:
            raise UserError("task igsm: size: is required, because the problems have no end")
        rejected = Counter() if rejected is None else rejected
        seen: set[bytes] = set()
        answers: Counter[int] = Counter()
        row = candidate = refused = 0
        while row < size:
            if refused == STALL:
                raise UserError(
                    f"task igsm: no new problem in {STALL} draws after {row} rows of {split}; "
                    "ask for fewer rows or widen ops, width, names or literals, or raise max_answer_share"
                )
            key = (seed, split, candidate)
            candidate += 1
            problem = draw_problem(self.settings, split, stream(*key, "problem"))
            digest = _identity(problem)
            if digest in seen:
                rejected["duplicate"] += 1
                refused += 1
                continue
            if answers[problem.answer] > self.settings.max_answer_share * (row + 1):
                rejected["answer_share"] += 1
                refused += 1
                continue
            refused = 0
            seen.add(digest)
            answers[problem.answer] += 1
            yield Example(
                id=str(row),
                prompt=frames.prompt(self.settings.style, problem.text),
                response=writer(problem, stream(*key, "wording")) if writer else None,
                gold=str(problem.answer),
                extra={"num_ops": problem.ops, "final_answer": problem.answer},
            )
            row += 1

    def vocabulary(self) -> list[str]:
        """Pieces of the problems' text that a tokenizer made for the task should not cut."""
        pieces = {"The number of ", ".\nThe number of ", ".\nWhat is the number of ", " equals "}
        pieces |= {"the sum of ", "the difference of ", " and ", " more than ", " times ", ", "}
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
    for _ in range(GRAPHS):
        graph = draw_graph(settings, ops, draw)
        if graph is None:
            continue
        formulas = draw_formulas(settings, graph, SPLIT_BINS[split], draw)
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


def _identity(problem: Problem) -> bytes:
    """Equal for problems with the same premises, whatever their order, and the same question."""
    *premises, question = problem.text.split("\n")
    return blake2b("\n".join([*sorted(premises), question]).encode(), digest_size=8).digest()
