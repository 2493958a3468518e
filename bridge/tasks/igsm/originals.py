"""Read problems in the words of BRIDGE's generator and of the original iGSM, whose items do not say their category."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from bridge.tasks.igsm.solver import Reader, Solved, UnsolvableError

CHAINS = (
    ("District", "Supermarket", "Product", "Ingredient"),
    ("Zoo", "Enclosure", "Animal", "Bone"),
    ("School", "Classroom", "Backpack", "Stationery"),
    ("Ecosystems", "Creatures", "Organs", "Cells"),
)
"""The categories of each family of names, from the outermost inwards. A problem uses consecutive ones."""
_PLACE = {category: (chain, place) for chain in CHAINS for place, category in enumerate(chain)}

_QUESTION = re.compile(r"How many (?P<item>.+?) does (?P<container>.+?) have\?")
_EQUALS = re.compile(r"The number of (?P<name>.+?) equals (?P<right>.+)")
_HAS = re.compile(r"(?P<container>.+?) has (?P<item>.+)")


def answer(text: str, modulus: int = 0) -> int:
    """The answer to a problem of one of the two generators.

    Which category an item is of follows from what holds what, mostly: of three categories in a row the outermost may be
    one or the other. The answer is that of the reading with no empty total, then of that in which the most items have
    their category in their name. Raises UnsolvableError if there is no answer, or not only one.
    """
    answers: dict[int, tuple[bool, int]] = {}  # answer → how good the best reading is that gives it
    failed = UnsolvableError("no reading fits what holds what")
    statement = _Statement(text)
    for categories in statement.readings():
        reader = _Original(statement, modulus, categories)
        said = sum([category in item.split() for item, category in categories.items()])
        try:
            value = reader.solve(reader.question).value
        except UnsolvableError as error:
            failed = error
            continue
        answers[value] = max((not reader.met_empty, said), answers.get(value, (False, 0)))
    best = [value for value, rank in answers.items() if rank == max(answers.values())]
    if not best:
        raise failed
    if len(best) > 1:
        raise UnsolvableError(f"can be read in two ways, with the answers {' and '.join(map(str, best))}")
    return best[0]


class _Statement:
    """What a text says, its quantities called "each X's Y" throughout."""

    def __init__(self, text: str) -> None:
        text = text.replace("’", "'")
        question = _QUESTION.search(text)
        if question is None:
            raise UnsolvableError("there is no question")
        rest = text[: question.start()] + " " + text[question.end() :]
        self.premises: dict[str, str] = {}
        for sentence in re.split(r"\.(?:\s+|$)", rest.strip()):
            if not sentence.strip():
                continue
            if found := _EQUALS.fullmatch(sentence.strip()):
                name, right = _each(found["name"]), found["right"].replace(" times as much as ", " times ")
            elif found := _HAS.fullmatch(sentence.strip()):
                name, right = _each(f"{found['container']}'s {found['item']}"), "1"
            else:
                raise UnsolvableError(f"not a premise: {sentence!r}")
            if name in self.premises:
                raise UnsolvableError(f"defined twice: {name}")
            self.premises[name] = right
        self.question = _each(f"{question['container']}'s {question['item']}")
        self._by_line = ".\n" in text
        self.held = self._held()
        mentioned = [self.question, *(n for right in self.premises.values() for n in self.names(right))]
        self.totals = sorted({name for name in mentioned if name not in self.premises})

    def names(self, right: str) -> list[str]:
        """The quantities in what a premise says, or in a list of them. Names may hold "and" and commas."""
        found: list[str] = []
        pending = ""
        right = re.sub(r"^\d+( more than | times )?|the sum of |the difference of ", "", right)
        for part in re.split(r"(, | and )", right):
            pending += part
            if self.is_quantity(_each(pending)):
                found.append(_each(pending))
                pending = ""
            elif pending in (", ", " and "):
                pending = ""
        if pending:
            raise UnsolvableError(f"nothing says what {pending} is")
        return found

    def is_quantity(self, name: str) -> bool:
        return name in self.premises or name.rpartition("'s ")[2] in _PLACE

    def _held(self) -> dict[str, list[str]]:
        """Container → its items. Names may hold "'s" themselves: of the ways to cut a quantity in two, the one whose
        halves occur most often in all of them."""
        splits = {
            name: [(name[5 : m.start()], name[m.end() :]) for m in re.finditer("'s ", name)] for name in self.premises
        }
        often = Counter(half for found in splits.values() for pair in found for half in pair)
        held: dict[str, list[str]] = {}
        for found in splits.values():
            if not found:
                raise UnsolvableError("a quantity is not of the form X's Y")
            container, item = max(found, key=lambda pair: often[pair[0]] + often[pair[1]])
            held.setdefault(container, []).append(item)
        return held

    def readings(self) -> Iterator[Mapping[str, str]]:
        """Item → category, in every way that fits the layers and the totals that the text speaks of."""
        if not self.totals:
            yield {}
            return
        if any(name.rpartition("'s ")[2] not in _PLACE for name in self.totals):
            raise UnsolvableError("a quantity is neither given nor a total of a known category")
        chain, _ = _PLACE[self.totals[0].rpartition("'s ")[2]]
        layers = self._layers()
        for top in range(len(chain) - max(layers.values())):
            places = {item: top + layer for item, layer in layers.items()}
            if all(self._fits(name, places, chain) for name in self.totals):
                yield {item: chain[place] for item, place in places.items()}

    def _fits(self, total: str, places: Mapping[str, int], chain: tuple[str, ...]) -> bool:
        container, _, category = total[5:].rpartition("'s ")
        of, place = _PLACE[category]
        return of == chain and places.get(container, -1) < place

    def _layers(self) -> dict[str, int]:
        """Item → layer, 0 being the outermost. In BRIDGE's texts (a premise a line) every container holds something, so
        layers are counted from what holds nothing; in the original's everything is held, and they are counted from what
        nothing holds."""
        containers: dict[str, list[str]] = {}
        for container, items in self.held.items():
            for item in items:
                containers.setdefault(item, []).append(container)
        everything = [*dict.fromkeys([*self.held, *containers])]
        depth = {item: _longest(item, containers) for item in everything}
        height = {item: _longest(item, self.held) for item in everything}
        most = max(height.values())
        inwards = {item: most - height[item] for item in everything}
        for layers in (inwards, depth) if self._by_line else (depth, inwards):
            if all(layers[item] == layers[container] + 1 for item in containers for container in containers[item]):
                return layers
        raise UnsolvableError("an item is held by things of two categories")


def _longest(item: str, following: Mapping[str, list[str]], seen: tuple[str, ...] = ()) -> int:
    """Steps of the longest way from an item."""
    if item in seen or len(seen) > len(CHAINS[0]):
        raise UnsolvableError(f"{item} holds itself, or more than four categories hold each other")
    return max((1 + _longest(other, following, (*seen, item)) for other in following.get(item, ())), default=0)


class _Original(Reader):
    """A statement under one reading of what is of which category."""

    def __init__(self, statement: _Statement, modulus: int, categories: Mapping[str, str]) -> None:
        self.premises, self.question, self.modulus = statement.premises, statement.question, modulus
        self.held = {f"each {container}": items for container, items in statement.held.items()}
        self._solved = {}
        self._statement, self._category = statement, categories
        self.met_empty = False

    def _names(self, text: str) -> list[str]:
        return self._statement.names(text)

    def _is(self, item: str, category: str) -> bool:
        return self._category[item] == category

    def _total(self, name: str) -> Solved:
        if not self._reaches(name.rpartition("'s ")[0][5:], name.rpartition("'s ")[2]):
            self.met_empty = True
            return Solved(0, [])
        return super()._total(name)


def _each(name: str) -> str:
    return name if name.startswith("each ") else f"each {name}"
