"""Check a worked solution of an iGSM problem step by step, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bridge.behaviors.wording import FIXED, VARIED, Wording
from bridge.tasks import frames
from bridge.tasks.igsm.solver import Reader, Solved, UnsolvableError

Fault = Literal[
    "unreadable", "unknown", "letter", "again", "premise", "order", "formula", "arithmetic", "detour", "end"
]
"""What is wrong with a step:

- unreadable: no sentence of either wording (or cut off)
- unknown: a quantity that the problem does not have
- letter: taken already, not the quantity's own, or of nothing
- again: the quantity has been computed before
- premise: restated otherwise than the problem says it
- order: computed from quantities that are not known yet
- formula: not what the problem says, or not of the letters of its parents, or other numbers than theirs
- arithmetic: an expression of the chain has another value
- detour: given up, but not for want of exactly those quantities that are missing
- end: the answer is missing, or not the value that the solution found for the question
"""


class Checked(NamedTuple):
    """The result of `check_solution`."""

    steps: int
    """How many steps are right before the first wrong one."""
    fault: Fault | None
    """None: the whole solution is right."""
    line: str
    """The first wrong line; empty where there is none."""
    why: str
    """The fault in words."""


class _WrongError(Exception):
    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault: Fault = fault


def check_solution(text: str, response: str) -> Checked:
    """Verify a response in one of our wordings against its problem; stop at the first step that is wrong.

    Every step must name a quantity of the problem and its letter, restate a premise only as it stands there, and then
    either compute the value from what the solution has established, with the problem's own formula (however it is
    arranged) and right arithmetic all along the chain, or give up for want of exactly the parents that are missing.
    Steps that the answer does not need are no fault. Raises UnsolvableError if the problem itself cannot be solved.
    """
    reader = Reader(text)
    reader.solve(reader.question)
    state = _State(reader)
    right = 0
    lines, answers = frames.taken_apart(response)
    for line in lines:
        try:
            state.step(line)
        except _WrongError as error:
            return Checked(right, error.fault, line, str(error))
        right += 1
    found = state.values.get(reader.question)
    if found is None:
        return Checked(right, "end", "", f"{reader.question} is not computed")
    for answer in answers or ["nothing"]:
        if answer != str(found):
            return Checked(right, "end", "", f"the answer given is {answer}, but the steps found {found}")
    return Checked(right, None, "", "")


class _State:
    """What the steps so far have established."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.letters: dict[str, str] = {}
        self.owner: dict[str, str] = {}
        """Letter → quantity."""
        self.values: dict[str, int] = {}

    def step(self, line: str) -> None:
        """Take one step. Raises _WrongError."""
        read = next(filter(None, (_read(line, grammar) for grammar in _GRAMMARS)), None)
        if read is None:
            raise _WrongError("unreadable", "no sentence that is known")
        try:
            truth = self.reader.solve(read.name)
        except UnsolvableError as error:
            raise _WrongError("unknown", str(error)) from None
        if read.name in self.values:
            raise _WrongError("again", f"{read.name} is known already")
        self._letter(read)
        if read.premise is not None and read.premise != self.reader.premises.get(read.name):
            raise _WrongError("premise", f"the problem does not say that {read.name} equals {read.premise}")
        missing = [parent for parent in truth.parents if parent not in self.values]
        if read.missing is not None:
            if sorted(read.missing) != sorted(set(missing)):
                raise _WrongError("detour", f"missing are: {', '.join(missing) or 'none'}")
            return
        if missing:
            raise _WrongError("order", f"not known yet: {', '.join(missing)}")
        self._computed(read, truth)
        self.values[read.name] = truth.value

    def _letter(self, read: _Step) -> None:
        letter, known = read.letter, self.letters.get(read.name)
        if read.reminds:
            if known != letter:
                raise _WrongError("letter", f"{read.name} has {f'the letter {known}' if known else 'no letter yet'}")
        elif known:
            raise _WrongError("letter", f"{read.name} has the letter {known} already")
        elif letter in self.owner:
            raise _WrongError("letter", f"{letter} is {self.owner[letter]}")
        self.letters[read.name], self.owner[letter] = letter, read.name

    def _computed(self, read: _Step, truth: Solved) -> None:
        left, *chain = read.chain.split(" = ")
        if left != read.letter or not chain:
            raise _WrongError("letter", f"{left} is not the letter {read.letter}")
        if read.stated is not None and read.stated != str(truth.value):
            raise _WrongError("arithmetic", f"the problem says {truth.value}")
        modulus = self.reader.modulus
        numbers = chain
        if truth.parents:
            formula, *numbers = chain
            self._formula(formula, read.name, truth)
            values = {self.letters[parent]: self.values[parent] for parent in truth.parents}
            inserted = [
                values[token] if token in values else int(token) for token in _tokens(formula) if token.isalnum()
            ]
            if not numbers:
                raise _WrongError("arithmetic", "the chain does not end with the value")
            if len(numbers) > 1 and _magnitudes(_tokens(numbers[0])) != sorted(map(abs, inserted)):
                raise _WrongError("formula", f"{numbers[0]} has other numbers than {formula}")
        for part in numbers:
            if _reduced(_value(part, {}), modulus) != truth.value:
                raise _WrongError("arithmetic", f"{part} is not {truth.value}")
        if numbers[-1] != str(truth.value):
            raise _WrongError("arithmetic", "the chain does not end with the value")

    def _formula(self, formula: str, name: str, truth: Solved) -> None:
        """Whether a formula in letters is the problem's: it has the same value for other values of the parents too.

        Both are polynomials of degree two at most whose coefficients are small, so two points this far apart tell them
        from each other.
        """
        parents = {parent: self.letters[parent] for parent in truth.parents}
        if {token for token in _tokens(formula) if token.isalpha()} != set(parents.values()):
            raise _WrongError("formula", f"is to be computed from {', '.join(parents.values())}")
        for base in (1_000_003, 1_299_709):
            values = {parent: base**power + power for power, parent in enumerate(parents, 1)}
            letters = {letter: values[parent] for parent, letter in parents.items()}
            if _value(formula, letters) != self.reader.given(name, values):
                raise _WrongError("formula", f"{formula} is not what the problem says")


def _reduced(value: int, modulus: int) -> int:
    return value % modulus if modulus else value


# ---- arithmetic

_TOKEN = re.compile(r"\d+|[A-Za-z]|[-+*()]")
# A model may write anything.
_LONGEST = 1_000  # characters
_DEEPEST = 50  # parentheses and signs


def _tokens(text: str) -> tuple[str, ...]:
    if len(text) > _LONGEST or re.search(r"\d{40}", text) or _TOKEN.sub("", text).strip():
        raise _WrongError("unreadable", f"{text[:60]!r} is no expression")
    return tuple(_TOKEN.findall(text))


def _magnitudes(tokens: Sequence[str]) -> list[int]:
    """The numbers in an expression without their signs, sorted."""
    return sorted(int(token) for token in tokens if token.isdecimal())


def _value(text: str, letters: dict[str, int]) -> int:
    """The value of an expression of integers, letters, + - * and parentheses."""
    tokens = [*_tokens(text), ""]
    at = depth = 0

    def fail() -> _WrongError:
        return _WrongError("unreadable", f"{text[:60]!r} is no expression")

    def total() -> int:
        nonlocal at
        value = product()
        while tokens[at] in ("+", "-"):
            sign = 1 if tokens[at] == "+" else -1
            at += 1
            value += sign * product()
        return value

    def product() -> int:
        nonlocal at
        value = atom()
        while tokens[at] == "*":
            at += 1
            value *= atom()
        return value

    def atom() -> int:
        nonlocal at, depth
        token = tokens[at]
        at += 1
        if token.isdecimal():
            return int(token)
        if token in letters:
            return letters[token]
        depth += 1
        if token not in ("(", "-") or depth > _DEEPEST:
            raise fail()
        if token == "-":
            value = -atom()
        else:
            value = total()
            if tokens[at] != ")":
                raise fail()
            at += 1
        depth -= 1
        return value

    value = total()
    if at != len(tokens) - 1:
        raise fail()
    return value


# ---- reading a line


class _Step(NamedTuple):
    """What one line says."""

    name: str
    letter: str
    reminds: bool
    stated: str | None
    """The number that the text is said to give."""
    premise: str | None
    """The restated premise."""
    missing: list[str] | None
    """Given up for want of these."""
    chain: str


_Patterns = list[re.Pattern[str]]
_NAME, _LETTER, _NUMBER = "each [^.,]+?", "[A-Za-z]", r"-?\d+"


def _patterns(templates: Sequence[str], **groups: str) -> _Patterns:
    """Templates as patterns: `{0}`, `{1}` … become named groups, in the order of `groups`."""
    compiled = []
    for template in templates:
        pattern = re.escape(template)
        for number, (name, inside) in enumerate(groups.items()):
            pattern = pattern.replace(rf"\{{{number}\}}", f"(?P<{name}>{inside})")
        compiled.append(re.compile(pattern))
    return compiled


class _Grammar(NamedTuple):
    """The sentences of one wording: each list holds the ways to say one thing."""

    constant: _Patterns
    fresh: _Patterns
    again: _Patterns
    analysis: _Patterns
    constant_end: _Patterns
    computed: _Patterns
    failed: _Patterns


def _grammar(words: Wording) -> _Grammar:
    names = rf"{_NAME}(?:, {_NAME})*(?: and {_NAME})?"
    naming = [a + b for a in words.opener for b in [name.replace("{0}", "{1}") for name in words.naming]]
    again = [a + b for a in words.opener for b in [name.replace("{0}", "{1}") for name in words.reminder]]
    constant = [a + b.replace("{0}", "{2}") for a in words.constant for b in words.naming]
    failed = dict.fromkeys([*words.failed, *words.failed_many, *[t.replace(" is ", " are ") for t in words.failed]])
    return _Grammar(
        _patterns(constant, name=_NAME, stated=_NUMBER, letter=_LETTER),
        _patterns([*words.named_opener, *naming], name=_NAME, letter=_LETTER),
        _patterns(again, name=_NAME, letter=_LETTER),
        _patterns([f" {template}" for template in words.analysis], premise=r"[^.]+"),
        _patterns([f" {template}" for template in words.constant_end], left=_LETTER, value=r"[^.]+"),
        _patterns([f" {template}" for template in words.computed], left=_LETTER, value=r"[^.]+"),
        _patterns([f" {template}" for template in failed], missing=names),
    )


_GRAMMARS = [_grammar(VARIED), _grammar(FIXED)]


def _read(line: str, grammar: _Grammar) -> _Step | None:
    """What a line says; None if it is not of this wording."""
    for heads, reminds in ((grammar.constant, False), (grammar.fresh, False), (grammar.again, True)):
        for head in heads:
            if (found := head.match(line)) and (step := _rest(line, found, reminds, grammar)):
                return step
    return None


def _rest(line: str, head: re.Match[str], reminds: bool, grammar: _Grammar) -> _Step | None:
    at, premise = head.end(), None
    parts = head.groupdict()
    stated = parts.get("stated")
    if not stated:
        for pattern in grammar.analysis:
            if restated := pattern.match(line, at):
                at, premise = restated.end(), restated["premise"]
    for pattern in grammar.constant_end if stated else grammar.computed:
        if computed := pattern.fullmatch(line, at):
            chain = f"{computed['left']} = {computed['value']}"
            return _Step(parts["name"], parts["letter"], reminds, stated, premise, None, chain)
    for pattern in [] if stated else grammar.failed:
        if failed := pattern.fullmatch(line, at):
            missing = re.split(", | and ", failed["missing"])
            return _Step(parts["name"], parts["letter"], reminds, None, premise, missing, "")
    return None
