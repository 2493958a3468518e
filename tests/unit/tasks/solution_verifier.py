"""Judge a worked iGSM solution from the texts alone: problem and response, nothing of the generator's graph."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field

from bridge.tasks.igsm.solver import Reader, Solved

NAME = re.compile(r"each [A-Z]\w+ [A-Z]\w+'s [A-Z]\w+(?: [A-Z]\w+)?")
LETTER = re.compile(r"(?:[Cc]all it|we call|called|letter is|the letter|write|written as|Let) ([A-Za-z])\b")
ALREADY = re.compile(r"already has the letter|, called [A-Za-z]\.")
MISSING = re.compile(r"(?:But (.+?) (?:is|are) not known yet|before (.+?), so we come|lack (.+?); let|yet: (.+?)\.$)")
CHAIN = re.compile(r"(?:Then|So) ([A-Za-z] = .+)\.$")
RESTATED = re.compile(r"(?:We know that it|It) equals (.+?)\. ")


class WrongStepError(AssertionError):
    """A step that is not true, or not allowed where it stands."""


@dataclass
class Verdict:
    """What a correct solution contains."""

    steps: int = 0
    failed: int = 0
    restated: int = 0
    useless: int = 0
    """Steps that compute something the answer does not need."""
    restated_by_inputs: Counter[int] = field(default_factory=Counter)
    seen_by_inputs: Counter[int] = field(default_factory=Counter)


def evaluate(expression: str, letters: dict[str, int]) -> int:
    """Plain arithmetic by Python's own parser."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Name):
            return letters[node.id]
        assert isinstance(node, ast.Constant) and isinstance(node.value, int), ast.dump(node)
        return node.value

    return value(ast.parse(expression, mode="eval").body)


def operations(expression: str) -> int:
    """How many operations are left, the sign of a negative number being none."""
    return len(re.findall(r" [-+*] ", expression))


def needed_quantities(reader: Reader) -> list[str]:
    """The question and all that it depends on."""
    found = [reader.question]
    for name in found:
        found += [parent for parent in reader.solve(name).parents if parent not in found]
    return found


def inputs(reader: Reader, name: str) -> int:
    """Parents, and one more for a number in the premise."""
    return len(reader.solve(name).parents) + bool(re.match(r"\d", reader.premises.get(name, "")))


def same_formula(text: str, name: str, letters_of: dict[str, str], expression: str) -> bool:
    """Whether the expression is the premise's (or total's) formula: equal for other values of the parents too."""
    for factor in (3, 7):
        other = Reader(text)
        values = {}
        for index, parent in enumerate(Reader(text).solve(name).parents):
            values[letters_of[parent]] = factor * index * index + 5 * factor + index
            other._solved[parent] = Solved(values[letters_of[parent]], [])
        value = evaluate(expression, values)
        if other.solve(name).value != (value % other.modulus if other.modulus else value):
            return False
    return True


def verify(text: str, response: str, subgoal: bool) -> Verdict:
    """Raises WrongStepError at the first step that is wrong; otherwise says what the solution contains."""
    reader = Reader(text)
    needed = needed_quantities(reader)
    verdict = Verdict()
    letters: dict[str, str] = {}  # name → letter
    values: dict[str, int] = {}  # letter → value
    solved: set[str] = set()
    last_failed = False
    steps = [line[2:] for line in response.split("\n") if line.startswith("- ")]
    for step in steps:
        found = NAME.search(step)
        assert found, step
        name = found.group()
        letter_found = LETTER.search(step)
        assert letter_found, step
        letter = letter_found.group(1)
        if (name in letters) != bool(ALREADY.search(step)):
            raise WrongStepError(f"named twice, or reminded of nothing: {step}")
        if name in solved or letters.setdefault(name, letter) != letter or list(letters.values()).count(letter) > 1:
            raise WrongStepError(f"solved already, or letter not unique: {step}")
        truth = reader.solve(name)
        if truth.parents and name in reader.premises:
            verdict.seen_by_inputs[inputs(reader, name)] += 1
        restated = RESTATED.search(step)
        if restated:
            if restated.group(1) != reader.premises.get(name):
                raise WrongStepError(f"not the premise: {step}")
            verdict.restated += 1
            verdict.restated_by_inputs[inputs(reader, name)] += 1
        verdict.steps += 1
        missing = [parent for parent in truth.parents if parent not in solved]
        chain = CHAIN.search(step)
        if chain is None:
            listed = MISSING.search(step)
            assert listed, step
            names = NAME.findall(next(filter(None, listed.groups())))
            left = [other for other in needed if other not in solved]
            if sorted(names) != sorted(missing) or not missing:
                raise WrongStepError(f"not the unknown parents: {step}")
            if last_failed or not solved or len(left) < 2:
                raise WrongStepError(f"a failed attempt is not allowed here: {step}")
            if NAME.sub("", listed.group()).strip().startswith("But") and (" are " in step) != (len(names) > 1):
                raise WrongStepError(f"wrong verb: {step}")
            verdict.failed += 1
            last_failed = True
            continue
        if missing:
            raise WrongStepError(f"computed from unknown quantities: {step}")
        verify_chain(chain.group(1), letter, truth, values, subgoal, reader.modulus)
        expression = chain.group(1).split(" = ")[1]
        used = sorted(re.findall(r"[A-Za-z]", expression))
        if used != sorted(letters[parent] for parent in truth.parents):
            raise WrongStepError(f"not the letters of its parents: {step}")
        if not same_formula(text, name, letters, expression):
            raise WrongStepError(f"not the formula of the text: {step}")
        values[letter] = truth.value
        solved.add(name)
        last_failed = False
        verdict.useless += name not in needed
    if not set(needed) <= solved or NAME.search(steps[-1]).group() != reader.question:  # type: ignore[union-attr]
        raise WrongStepError("the question is not the last step, or something needed is missing")
    return verdict


def verify_chain(
    chain: str, letter: str, truth: Solved, values: dict[str, int], subgoal: bool, modulus: int = 0
) -> None:
    """Every part equals the value, the last part is the plain value, and each rewrite is one operation."""
    first, *parts = chain.split(" = ")
    if first != letter or parts[-1] != str(truth.value):
        raise WrongStepError(f"does not give the value {truth.value}: {chain}")
    found = [evaluate(part, values) for part in parts]
    if any((value % modulus if modulus else value) != truth.value for value in found):
        raise WrongStepError(f"wrong arithmetic: {chain}")
    numbers = parts[1:] if truth.parents else parts
    left = [operations(part) for part in numbers]
    if len(set(numbers)) != len(numbers):
        raise WrongStepError(f"says the same twice: {chain}")
    if subgoal and left != list(range(operations(parts[0]), -1, -1)):
        raise WrongStepError(f"not one operation at a time: {chain}")
    if not subgoal and left != sorted({operations(parts[0]), 0}, reverse=True):
        raise WrongStepError(f"more than formula and value: {chain}")
