"""Tasks whose problems are those of a public data set: which rows become which split, and how they are put."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from reprlib import repr as brief
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from bridge.config.tasks import FileTask
from bridge.errors import UserError
from bridge.tasks import files, frames, r3
from bridge.tasks.base import Example, Split, Task, Writer
from bridge.tasks.files import Pool
from bridge.tasks.grading import canonical
from bridge.tasks.streams import stream

S = TypeVar("S", bound=FileTask)


class Item(NamedTuple):
    """A question as the data give it."""

    question: str
    gold: str
    work: str | None = None
    """The worked solution without the answer; None where the data have none."""
    id: str = ""
    """The data's own name for it."""


Reject = Literal["no_label"]


class PublicTask(Task, Generic[S]):
    """What the public tasks have in common (docs/tasks.md). A subclass says what a record holds.

    The test set is the data's own and so is `val`, where the data have a development set; everything else is shared out
    by a digest of the question, so that equal questions are in one split, whatever the seed. A training question that
    is in the test or development set is refused.
    """

    variants: ClassVar[tuple[str, ...]] = ()
    """Words of file names that tell the variants of the data apart."""
    test_pools: ClassVar[tuple[Pool, ...]] = ("test",)
    """Which set is the test set: the first of these that is there."""

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self.response_prefix = frames.prefix(settings.frame)

    @property
    def variant(self) -> str:
        """The one of `variants` that the settings choose."""
        return ""

    @abstractmethod
    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        """The questions of a record, or why it cannot be used. Raises UserError, beginning with `where`, if broken."""

    def work(self, item: Item, writer: Writer | None, seed: int) -> str | None:
        """The worked solution of an item, as it is to be learnt."""
        return item.work

    # ---- rows

    def rows(
        self,
        split: Split,
        size: int | None,
        seed: int,
        writer: Writer | None = None,
        rejected: Counter[str] | None = None,
    ) -> Iterator[Example]:
        """The rows of a split in the order of the data: all, or `size` of them that the seed draws.

        A smaller size draws a part of what a larger one draws. Raises UserError where there are not enough.
        """
        found = self.files()
        rejected = Counter() if rejected is None else rejected
        drawn = None
        if size is not None:
            ranks = [_fraction(item.question, seed) for _, item in self._accepted(found, split, Counter())]
            if len(ranks) < size:
                raise UserError(
                    f"task {self.settings.name}: size {size}: {self.settings.path} has {len(ranks)} rows for split "
                    f"{split}; ask for fewer, or leave size out for all of them"
                )
            drawn = set(sorted(range(len(ranks)), key=ranks.__getitem__)[:size])
        empty = True
        for number, (name, item) in enumerate(self._accepted(found, split, rejected)):
            empty = False
            if drawn is None or number in drawn:
                yield self._example(name, item, writer, seed)
        if empty:
            there = ", ".join(_number_of_files(pool, len(paths)) for pool, paths in found.items())
            raise UserError(f"task {self.settings.name}: {self.settings.path}: no rows for split {split!r} in {there}")

    def files(self) -> dict[Pool, list[Path]]:
        """The files of each set. Raises UserError if there are none, or if they are not those of the launch."""
        root = Path(self.settings.path)
        found = files.pools(root, self.variants, self.variant)
        if self.settings.sha256 and files.files_digest(root, found) != self.settings.sha256:
            raise UserError(
                f"{root}: the data are not those of the launch, or not those that sha256 names; launch again, or "
                "correct sha256"
            )
        return found

    def _accepted(
        self, found: Mapping[Pool, Sequence[Path]], split: Split, rejected: Counter[str]
    ) -> Iterator[tuple[str, Item]]:
        """(id, item) of everything that belongs to a split, once."""
        test = next((pool for pool in self.test_pools if pool in found), None)
        dev: Pool | None = "dev" if "dev" in found and test != "dev" else None
        own = test if split == "test" else dev if split == "val" else None
        apart = {"in_val": dev if split in ("sft", "rl") else None, "in_test": test if split != "test" else None}
        seen = {key: why for why, pool in apart.items() if pool for key in map(_key, self._questions(found[pool]))}
        for pool in [own] if own else [pool for pool in found if pool not in (test, dev, "test")]:
            for number, item in enumerate(self._read(found[pool])):
                if isinstance(item, str):
                    rejected[item] += 1
                    continue
                if not own and split not in self._splits(item.question, test is None, dev is None):
                    continue
                key = _key(item.question)
                if key in seen:
                    rejected[seen[key]] += 1
                    continue
                seen[key] = "duplicate"
                yield item.id or f"{pool}-{number}", item

    def _splits(self, question: str, without_test: bool, without_dev: bool) -> tuple[Split, ...]:
        """The splits that a question belongs to which the data's authors did not set apart."""
        settings = self.settings
        if without_test and _fraction(question, "test") < settings.test_share:
            return ("test",)
        if without_dev and _fraction(question, "val") < settings.val_share:
            return ("val",)
        if settings.rl_share == "all":
            return ("sft", "rl")
        return ("rl",) if _fraction(question, "rl") < settings.rl_share else ("sft",)

    def _questions(self, paths: Sequence[Path]) -> Iterator[str]:
        return (item.question for item in self._read(paths) if isinstance(item, Item))

    def _read(self, paths: Sequence[Path]) -> Iterator[Item | Reject]:
        for path in paths:
            for where, record in files.records(path):
                if not isinstance(record, Mapping):
                    raise UserError(f"{where}: a row must be an object")
                yield from self.items(where, record)

    def _example(self, name: str, item: Item, writer: Writer | None, seed: int) -> Example:
        frame = self.settings.frame
        question = item.question
        if frame == "plain" and self.settings.instruction:
            question = f"{question}\n\n{self.settings.instruction}"
        work = self.work(item, writer, seed) or ""
        return Example(
            id=name,
            prompt=frames.turns(frame, question),
            response=frames.worked(frame, work, item.gold),
            gold=item.gold,
            extra={"question": item.question, "work": work},
        )


def text(where: str, record: Mapping[str, Any], field: str) -> str:
    """A field that must be text, and not empty. Raises UserError."""
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: `{field}` must be text, and not empty")
    return value


def number(where: str, value: object) -> str:
    """A right answer that must be a number, in its exact form: 145.0 is 145. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: the answer must be a number")
    try:
        return canonical(str(value), "number")
    except UserError:
        raise UserError(f"{where}: the answer {brief(value)} is not a number") from None


def worked_item(where: str, record: Mapping[str, Any]) -> Item:
    """A question in one of R³'s forms, with its rationale."""
    row = r3.parse(where, record)
    if row.start is not None:
        raise UserError(
            f"{where}: is of R³'s mixed form; name the file as `data` of an rl stage instead (docs/tasks.md)"
        )
    return Item(row.question, row.gold, row.rest, row.id)


def options(where: str, texts: Sequence[object]) -> str:
    """The options of a choice question, a line for each, with letters from A."""
    if not 2 <= len(texts) <= 10 or not all(isinstance(option, str) and option.strip() for option in texts):
        raise UserError(f"{where}: the options must be two to ten texts, none of them empty")
    return "\n".join(f"{letter}. {str(option).strip()}" for letter, option in zip("ABCDEFGHIJ", texts, strict=False))


def _number_of_files(pool: Pool, count: int) -> str:
    return f"{count} {'' if pool == 'all' else f'{pool} '}file{'' if count == 1 else 's'}"


def _key(question: str) -> bytes:
    """Equal for questions that differ in white space only."""
    return blake2b(" ".join(question.split()).encode(), digest_size=8).digest()


def _fraction(question: str, purpose: object) -> float:
    """A number in [0, 1) that the question and the purpose decide."""
    return stream(purpose, " ".join(question.split()))()
