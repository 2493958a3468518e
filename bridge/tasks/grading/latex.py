"""LaTeX answers, compared by Math-Verify in a process of its own.

What is a plain number on both sides, or the same text, is decided here. The rest goes to a worker (`latex_worker.py`)
that lives as long as this process and is ended when one comparison takes too long or too much memory: a tower of
powers computes inside one C call, which no exception and no signal handler interrupts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from bridge.errors import UserError, WorkFailedError
from bridge.tasks.grading import numbers
from bridge.tasks.grading.response import after_cues, after_hashes, in_box, in_tag

CPU_SECONDS = 2.0  # of one comparison; processor time, so that verdicts do not depend on how busy the machine is
WALL_SECONDS = 20.0  # of one comparison on a machine that does not get to it
START_SECONDS = 120.0  # sympy from a cold network file system
MEMORY = 1 << 30  # bytes that the worker may add to what it needs to start
LONGEST = 2000  # characters; a longer answer is none

_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad\b|\s+")
_DISPLAY = re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?)(?![A-Za-z])\s*")
_ROMAN = re.compile(r"\\(?:mathrm|operatorname)\s*\{([A-Za-z])\}")
_MATH = re.compile(r"(?s)\s*(?:\$\$?(.*?)\$\$?|\\\((.*?)\\\)|\\\[(.*?)\\\])")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?\s*[23]\}?)?|\\circ")
_COMMAND = re.compile(r"\\(?:[dtc]?frac|times|cdot)(?![A-Za-z])")
_NAME = re.compile(r"\s*[A-Za-z]\s*=")
_CLOCK = re.compile(r"[0-9]{1,2}(?::[0-9]{2})+")


class UndecidedError(Exception):
    """Whether two answers are equal could not be found out within the limits."""


def extract(text: str) -> tuple[str | None, str]:
    """The formula that a response's final part gives, or None, and the rule that found its place.

    Order: last `####` line, last box, last answer tag, last answer phrase. There is no guess from prose.
    """
    for rule, find in (("hash", after_hashes), ("box", in_box), ("tag", in_tag)):
        region = find(text)
        if region is not None:
            return _formula(region), rule
    for tail in after_cues(text):
        return _formula(tail), "phrase"
    return None, "none"


def canonical(formula: str) -> str:
    """A formula as it is compared: a number in the form of kind `number`, else the text without spacing commands."""
    number = _plain_number(formula)
    return number if number is not None else _normal(formula)


def compared(answer: str, gold: str, deadline: float) -> str:
    """The canonical form of an answer: that of `gold` if and only if the two are equal.

    Raises:
        UndecidedError: it takes too long or too much memory, or the worker broke. Costs at most WALL_SECONDS, and
            nothing after `deadline` (of `time.monotonic`).
        WorkFailedError: the worker does not start at all.
    """
    mine, wanted = canonical(answer), canonical(gold)
    if mine == wanted:
        return mine
    if _plain_number(answer) is not None and _plain_number(gold) is not None:
        return mine
    if _CLOCK.fullmatch(mine) or _CLOCK.fullmatch(wanted):  # 2:04 is no ratio
        return mine
    equal = _Comparer.of_this_process().equal(_normal(gold), _normal(answer), deadline)
    return wanted if equal else mine


@lru_cache(maxsize=1)
def require() -> None:
    """Raise UserError if Math-Verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("kind 'latex' needs the package math-verify; install bridge-rl with its extra `math`")


def _formula(region: str) -> str | None:
    """The formula of a marked region: its box, else its first formula between dollars, else its first sentence."""
    box = in_box(region)
    if box is None:
        math = _MATH.match(region)
        box = (
            next(filter(None, math.groups()), "")
            if math
            else re.split(r"(?<=[^0-9])\.(?:\s|\Z)", region, maxsplit=1)[0]
        )
    box = box.strip().rstrip(".").strip()
    return box if box and len(box) <= LONGEST else None


def _normal(formula: str) -> str:
    text = _ROMAN.sub(r"\1", _DISPLAY.sub("", numbers.same(formula)))
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).replace("\\degree", "^\\circ")
    text = text.replace("\\varnothing", "\\emptyset")
    text = text.strip().strip("$").rstrip(".")
    return " ".join(_SPACE.sub(" ", text).split())


def _plain_number(formula: str) -> str | None:
    """The canonical number of a formula that is one, perhaps with a unit in text or a name before it; else None.

    A bare letter is a variable here and never a unit: 5a is not 5.
    """
    bare = _NAME.sub("", _COMMAND.sub("", _UNIT.sub("", formula)), count=1)
    if any(c.isalpha() for c in bare):
        return None
    number = numbers.exact(formula)
    return None if number is None else str(number.value)


class _Comparer:
    """The worker of this process, started when it is needed and again after it was ended."""

    _current: _Comparer | None = None

    @classmethod
    def of_this_process(cls) -> _Comparer:
        if cls._current is None or cls._current.owner != os.getpid():  # a fork shares pipes, not replies
            cls._current = cls()
        return cls._current

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.known = lru_cache(maxsize=65536)(self._ask)
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False

    def equal(self, gold: str, answer: str, deadline: float) -> bool:
        self.deadline = deadline
        verdict = self.known(gold, answer)
        if verdict is None:
            raise UndecidedError
        return verdict

    def _ask(self, gold: str, answer: str) -> bool | None:
        """The worker's verdict; None if its own limits ended it. Raises UndecidedError where time ran out here: that
        is the machine's fault and not the answer's, so it is not remembered."""
        if time.monotonic() >= self.deadline:
            raise UndecidedError
        process = self._started()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            process.stdin.flush()
            reply = self._line(process, WALL_SECONDS)
        except OSError:
            reply = b""
        if not reply:
            self._end()
            self.process = self._launched()  # starts while the caller goes on
            return None
        verdict: bool | None = json.loads(reply)
        return verdict

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            self.process = self._launched()
        if not self.ready:
            if not self._line(self.process, START_SECONDS):
                self._end()
                raise WorkFailedError(
                    "the LaTeX grader did not start; `python -m bridge.tasks.grading.latex_worker 2 1000000` shows why"
                )
            self.ready = True
        return self.process

    def _launched(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.ready = False
        return subprocess.Popen(
            [sys.executable, "-m", "bridge.tasks.grading.latex_worker", str(CPU_SECONDS), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """The next line that the worker writes; empty if it has ended."""
        assert process.stdout
        left = max(0.0, min(seconds, self.deadline - time.monotonic()))
        if not select.select([process.stdout], [], [], left)[0]:
            if self.ready or left == seconds:
                self._end()  # a worker that is only starting is left to it: the next step may need it
            raise UndecidedError
        return process.stdout.readline()

    def _end(self) -> None:
        assert self.process and self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with suppress(OSError):
            self.process.stdin.close()
        self.process = None
