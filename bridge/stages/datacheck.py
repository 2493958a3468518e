"""What is right and wrong with a data file, before anybody trains on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bridge.errors import UserError
from bridge.progress import progress
from bridge.runs import Json, user_path
from bridge.tasks import Example
from bridge.tasks.grading import canonical, grade
from bridge.tasks.igsm.solver import UnsolvableError, solve
from bridge.tasks.igsm.steps import check_solution
from bridge.tasks.tables import read_facts, rows_of

NAMED = 20  # problems that are told with their row


def check(path: Path, others: Sequence[Path], kind: str | None = None) -> Json:
    """Look at every row of a data file; what `bridge-rl data --check` prints.

    Each row must have the fields, its right answer must be one of its kind, its worked solution must end with that
    answer, the solver must find the same answer to an iGSM problem, and no question may stand in the file twice or in
    one of `others`.

    Args:
        path: a dataset artifact or a file in any form that a stage reads.
        others: files of other splits.
        kind: how answers compare, where the file does not say so itself; without both, what all answers look like.

    Raises UserError for a file that cannot be read at all.
    """
    path, others = user_path(str(path)), [user_path(str(other)) for other in others]
    facts = read_facts(path)
    kind = facts.get("answer_kind") or kind or _kind(path)
    repeats = "repeats" in facts
    elsewhere = {other: {_key(row) for _, row in _good(other)} for other in others}
    problems: Counter[str] = Counter()
    named: list[str] = []
    overlap = dict.fromkeys(map(str, others), 0)
    seen: dict[bytes, str] = {}
    answers: Counter[str] = Counter()
    rows = worked = solved = 0

    def note(what: str, where: str, said: str) -> None:
        problems[what] += 1
        if len(named) < NAMED:
            named.append(f"{where}: {said}")

    with progress(f"check {path.name}", None, "rows") as meter:
        for where, row in rows_of(path):
            rows += 1
            meter.advance(1)
            if isinstance(row, UserError):
                note("schema", where, str(row).removeprefix(f"{where}: "))
                continue
            answers[row.gold] += 1
            worked += row.response is not None
            for what, said in _faults(row, kind):
                note(what, where, said)
            if "num_ops" in row.extra:
                solved += 1
                found = _solver(row)
                if found != row.gold:
                    note("solver", where, f"the solver finds {found}, not {row.gold}")
                elif wrong := _wrong_step(row):
                    note("step", where, wrong)
            key = _key(row, repeats)
            if key in seen:
                note("duplicate", where, f"asks the same as {seen[key]}")
            seen.setdefault(key, where)
            asked = _key(row)
            for other, keys in elsewhere.items():
                if asked in keys:
                    overlap[str(other)] += 1
                    note("overlap", where, f"is in {other} too")
    if not rows:
        note("empty", str(path), "has no rows")
    return {
        "file": str(path),
        "rows": rows,
        "answer_kind": kind,
        "worked": worked,
        "solved": solved,
        "answers": dict(answers.most_common(NAMED)),
        "problems": dict(sorted(problems.items())),
        "overlap": overlap,
        "named": named,
        "ok": not problems,
    }


def _faults(row: Example, kind: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a row's answers."""
    if not row.gold:
        yield "gold", "has no right answer"
        return
    try:
        canonical(row.gold, kind)
    except UserError as error:
        yield "gold", str(error)
        return
    if row.response is not None:
        verdict = grade(row.response, row.gold, kind)
        if not verdict.correct:
            yield "solution", f"the worked solution answers {verdict.answer or 'nothing'}, not {row.gold}"


def _solver(row: Example) -> str:
    try:
        return str(solve(row.prompt[-1]["content"]))
    except UnsolvableError as error:
        return f"no answer ({error})"


def _wrong_step(row: Example) -> str:
    """The first wrong step of a worked solution, if it is in our words."""
    if row.response is None:
        return ""
    checked = check_solution(row.prompt[-1]["content"], row.response)
    if checked.fault is None or (checked.fault == "unreadable" and checked.steps == 0):
        return ""
    return f"step {checked.steps + 1}, {checked.fault}: {checked.why}"


def _kind(path: Path) -> str:
    """Numbers, option letters or labels: what every right answer of a file is."""
    golds = {row.gold for _, row in _good(path) if row.gold}
    for kind in ("number", "choice"):
        if all(_is(gold, kind) for gold in golds):
            return kind
    return "label"


def _is(gold: str, kind: str) -> bool:
    try:
        canonical(gold, kind)
    except UserError:
        return False
    return True


def _good(path: Path) -> Iterator[tuple[str, Example]]:
    return ((where, row) for where, row in rows_of(path) if isinstance(row, Example))


def _key(row: Example, repeats: bool = False) -> bytes:
    """Equal for rows with the same last user turn and the same beginning of the response; the same response too, where
    the file repeats questions on purpose."""
    asked = " ".join(row.prompt[-1]["content"].split())
    said = row.response if repeats else ""
    return blake2b(f"{asked}\n{row.start}\n{said}".encode(), digest_size=16).digest()


class Lengths:
    """Lengths in tokens of prompts and responses, by a model's own tokenizer and chat template."""

    def __init__(self, source: str) -> None:
        from bridge.train.chat import Chat
        from bridge.train.model import load_tokenizer, model_folder

        path = user_path(source)
        self._chat = Chat(load_tokenizer(path if path.exists() else model_folder(Path(source))))
        self._found: dict[str, list[int]] = {"prompt": [], "response": []}

    def add(self, row: Example) -> None:
        """Count the tokens of a row; the response with the end of the turn."""
        if row.response is None:
            parts = {"prompt": self._chat.prompts([row.prompt])[0]}
        else:
            ((prompt, rest),) = self._chat.pairs([row.prompt], [row.response])
            parts = {"prompt": prompt, "response": rest}
        for name, ids in parts.items():
            self._found[name].append(len(ids))

    def summary(self) -> dict[str, Any]:
        """Mean, median, 95th percentile and maximum of each part that occurs."""
        import numpy as np

        return {
            name: {
                "mean": round(float(np.mean(lengths)), 1),
                "median": int(np.median(lengths)),
                "p95": int(np.percentile(lengths, 95, method="higher")),
                "max": max(lengths),
            }
            for name, lengths in self._found.items()
            if lengths
        }


def describe(found: Json) -> str:
    """The result for people."""
    lines = [
        f"{found['file']}: {found['rows']} rows, answers of kind {found['answer_kind']}, {found['worked']} worked "
        f"solutions graded, {found['solved']} problems solved again"
    ]
    lines += [f"  {line}" for line in found["named"]]
    counts = ", ".join(f"{count} {what}" for what, count in found["problems"].items())
    total = sum(found["problems"].values())
    if total > len(found["named"]):
        lines.append(f"  … {total - len(found['named'])} more")
    return "\n".join([*lines, f"problems: {counts}" if counts else "no problem found"])
