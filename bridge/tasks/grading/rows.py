"""`bridge-rl grade`: a JSON-lines file of responses in, the same rows with verdicts out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridge.artifacts import flush
from bridge.config.grading import Grading
from bridge.errors import UserError
from bridge.tasks.grading.grade import POLICY, Reason, grade
from bridge.tasks.igsm.solver import UnsolvableError
from bridge.tasks.igsm.steps import check_solution


class Summary(NamedTuple):
    rows: int
    correct: int
    reasons: dict[Reason, int]


def grade_rows(
    in_path: Path, out_path: Path, progress: Callable[[int], None] | None = None, policy: Grading = POLICY
) -> Summary:
    r"""Grade every row of a file and publish the result under `out_path` by one rename.

    A row is an object with `response` (text), `gold` (text or number), `kind` (text) and optionally `truncated`
    (true or false) and `options` (a list of texts, in the order of their letters). It keeps all its fields and gets
    `answer`, `correct` and `reason`. One of kind `number:igsm` with the text of its `problem` also gets `steps` (right
    ones before the first wrong one), `fault` and `why`. Rows end at "\n" only, and blank ones are skipped. Memory does
    not grow with the file. `out_path` may be `in_path`.

    Args:
        progress: called with the number of bytes read since the last call.
        policy: what counts as the same answer, where people disagree.

    Raises:
        UserError: a file that cannot be read or written, or a broken row, by line and field. Nothing is left behind.
    """
    temporary = out_path.with_name(f".{out_path.name}.{os.urandom(4).hex()}.tmp")
    try:
        source = in_path.open("rb")
    except OSError as error:
        raise UserError(f"{in_path} cannot be read: {error.strerror}; name a file of JSON lines") from error
    if out_path.is_dir():
        source.close()
        raise UserError(f"{out_path} is a folder; name a file for the graded rows")
    reasons: Counter[Reason] = Counter()
    try:
        with source, temporary.open("xb") as target:
            for number, line in enumerate(source, start=1):
                if line.strip():
                    row = _graded(line, f"{in_path}, line {number}", policy)
                    reasons[row["reason"]] += 1
                    target.write(json.dumps(row).encode() + b"\n")
                if progress:
                    progress(len(line))
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(out_path)
        flush(out_path.parent)
    except OSError as error:
        raise UserError(f"{out_path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return Summary(sum(reasons.values()), reasons["correct"], dict(reasons))


def _graded(line: bytes, place: str, policy: Grading) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is not an object with fields response, gold and kind")
    for field, types, wanted in (
        ("response", (str,), "text"),
        ("gold", (str, int, float), "text or a number"),
        ("kind", (str,), "text"),
    ):
        if field not in row:
            raise UserError(f"{place}: field {field!r} is missing")
        if not isinstance(row[field], types) or isinstance(row[field], bool):
            raise UserError(f"{place}: field {field!r} must be {wanted}, not {json.dumps(row[field])[:60]}")
    truncated = row.get("truncated", False)
    if not isinstance(truncated, bool):
        raise UserError(f"{place}: field 'truncated' must be true or false, not {json.dumps(truncated)[:60]}")
    options = row.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise UserError(f"{place}: field 'options' must be a list of texts, not {json.dumps(options)[:60]}")
    try:
        verdict = grade(
            row["response"], str(row["gold"]), row["kind"], truncated=truncated, options=options, policy=policy
        )
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    steps = _steps(row, place) if row["kind"] == "number:igsm" and "problem" in row else {}
    return {**row, "answer": verdict.answer, "correct": verdict.correct, "reason": verdict.reason, **steps}


def _steps(row: dict[str, Any], place: str) -> dict[str, Any]:
    """How far the steps of an iGSM solution are right."""
    if not isinstance(row["problem"], str):
        raise UserError(f"{place}: field 'problem' must be text, not {json.dumps(row['problem'])[:60]}")
    try:
        checked = check_solution(row["problem"], row["response"])
    except UnsolvableError as error:
        raise UserError(f"{place}: field 'problem' is no iGSM problem that can be solved: {error}") from error
    return {"steps": checked.steps, "fault": checked.fault, "why": checked.why}
