"""GSM8K (Cobbe et al., 2021): `{question, answer}`, where the answer is lines of work and then `#### 72`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.config.tasks import Gsm8kSettings
from bridge.errors import UserError
from bridge.tasks import r3
from bridge.tasks.base import Writer
from bridge.tasks.chain import Chain, plain
from bridge.tasks.public import Item, PublicTask, Reject, number, text, worked_item
from bridge.tasks.streams import stream


class Gsm8k(PublicTask[Gsm8kSettings]):
    """The GSM8K task (see `bridge.tasks.Task`)."""

    answer_kind = "number"
    worded = True
    variants = ("main", "socratic")
    variant = "main"

    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        if r3.is_r3(record):
            item = worked_item(where, record)
            number(where, item.gold)
            yield item
            return
        question, answer = text(where, record, "question"), text(where, record, "answer")
        work, marker, gold = answer.rpartition("####")
        if not marker or not gold.strip() or "####" in work:
            raise UserError(f"{where}: `answer` must end with one line `#### NUMBER`")
        number(where, gold.strip())
        yield Item(question, gold.strip(), work.strip())

    def work(self, item: Item, writer: Writer | None, seed: int) -> str | None:
        if item.work is None:
            return None
        chain = Chain(item.question, tuple(item.work.split("\n")), self.settings.calculator)
        if writer is not None:
            return writer(chain, stream(seed, item.question, "wording"))
        return item.work if chain.marks else plain(item.work)
