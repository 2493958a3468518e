"""SVAMP (Patel et al., 2021): `{ID, Body, Question, Equation, Answer}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.config.tasks import SvampSettings
from bridge.tasks import r3
from bridge.tasks.chain import decimal, fold, tokens_of
from bridge.tasks.public import Item, PublicTask, Reject, number, text, worked_item


class Svamp(PublicTask[SvampSettings]):
    """The SVAMP task (see `bridge.tasks.Task`)."""

    answer_kind = "number"

    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        if r3.is_r3(record):
            item = worked_item(where, record)
            yield item._replace(gold=number(where, item.gold))
            return
        body, question = text(where, record, "Body").strip(), text(where, record, "Question").strip()
        gold = number(where, record.get("Answer"))
        whole = f"{body}{'' if body.endswith(('.', '?', '!', ',')) else ','} {question}"
        work = _worked(text(where, record, "Equation"), gold)
        yield Item(whole, gold, work, str(record.get("ID") or ""))


def _worked(equation: str, gold: str) -> str | None:
    """The equation carried out, `8 - 3 = 5`; None where it cannot be read or does not give the answer."""
    tokens = tokens_of(equation)
    while tokens and len(tokens) > 1 and tokens[0] == "(" and tokens[-1] == ")" and tokens.count("(") == 1:
        tokens = tokens[1:-1]
    sides: list[str] = []
    while tokens:
        shown = [token if isinstance(token, str) else decimal(token) for token in tokens]
        if None in shown:
            return None
        sides.append(" ".join(map(str, shown)).replace("( ", "(").replace(" )", ")"))
        if len(tokens) == 1:
            return " = ".join(sides) if str(tokens[0]) == gold else None
        tokens = fold(tokens)
    return None
