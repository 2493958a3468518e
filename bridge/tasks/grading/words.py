"""Choice letters and labels. Text that leaves the choice open is no answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bridge.tasks.grading.response import MAX_CUES, MAX_TAIL, after_cues, in_box, in_tag

_MARK = re.compile(r"#{3,}[ \t]*([^\n#]*)")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")

# "a" and "I" are words as well as letters: before another word they are letters only if that word goes on to argue.
_ARGUES = r"(?:because|since|as|for|due|is|and|which|with|by|given|not)\b"
_HEDGED = r"[\s)\]*_\"']*(?:,\s*)?(?:or|and|[/&])\s*(?:(?:maybe|perhaps|possibly|even)\s+)?[(\[*_\"']*"
_ALONE = rf"(?![\w^\\]|['’]\w)(?!(?<=[AaIi])\s+(?!{_ARGUES})[A-Za-z])"
_PICK = r"(?:\b(?:choose|pick|select|go\ with)|\b(?:[Oo]ption|[Cc]hoice))\s+(?:option\s+)?"
_BEFORE_LETTER = (
    r"(?:(?i:the|correct|right|best|options?|choices?|letters?|answer|is|most|likely|probably|definitely|clearly"
    r"|certainly|either|both)\b|[\s*_`\"'(\[{$:#])*"
)
_LETTER_FIRST = re.compile(rf"{_BEFORE_LETTER}([A-Ja-j]){_ALONE}")
# "A or B", "(A), (C)", "A, B and D"
_SEVERAL = re.compile(
    rf"{_BEFORE_LETTER}[A-Ja-j](?!\w)(?:{_HEDGED}[A-Jb-j]\b"
    r"|[\s)\]*_\"']*,\s*[(\[*_\"']*[A-J](?!\w)[)\]}*_\"'.$\s]*(?:,|(?:and|or|&)\s|\Z))"
)
_LETTER_IN_TAIL = re.compile(rf"\(([A-J])\)|{_PICK}[(*\"']*([A-J])(?!\w)", re.VERBOSE)
_BOX_LETTER = re.compile(r"(?:(?i:option|choice|answer)\b[\s:]*)?[\s({\[*]*([A-Ja-j])\s*(?:\Z|[.:),\]}*])")
_LONE = re.compile(
    rf"""^[ \t*_"'(\[`$]*([A-Ja-j])[*_"'`$]*(?:[.):\]]|[ \t]*$)   # "b. nine", "(C)", a line of its own
    | [(\[*]([A-J])[)\]*]                                     # "so (C) it is", **C**
    | {_PICK}[(*"']*([A-Ja-j])(?!\w)
    | \b([A-J])\s+is\s+(?:the\s+)?(?:correct|right|best)\b
    | (?<![\w’\\.])(?<!\w')([B-HJ])(?![\w^\\=]|['’]\w)    # a capital in prose
    | (?<![\w'’\\.])([AI])(?=[.,;!/&]|\s*\Z|\s+(?:or|and|nor)\s+\(?[B-J]\b)  # A, I: where they are no words
    """,
    re.VERBOSE | re.MULTILINE,
)

_OPTION_LINE = re.compile(r"^[ \t]*(?:Options:[ \t]*)?\(?([A-J])[.):][ \t]+(\S.*?)[ \t]*$", re.MULTILINE)

_NEGATED = re.compile(
    r"(?:\b(?:not|neither|nor|never|cannot)|n['’]t)(?:\s+be)?\s+(?:(?:option|choice|answer)\s+)?\(?[A-J]\)?(?!\w)"
    r"|(?<!\w)\(?[A-J]\)?\s+(?:(?:is|was|seems|looks)(?:\s+not|n['’]t|\s+(?:clearly\s+)?(?:wrong|incorrect|false|out))"
    r"|(?:cannot|can\s+not|can['’]t)\s+be)\b"
    r"|\b[Bb]etween\s+\(?[A-J]\)?\s+and\s+\(?[A-J]\)?(?!\w)"
)
_WIDE = str.maketrans({chr(0xFF01 + index): chr(0x21 + index) for index in range(94)})
_RELATION = re.compile(r"\b(?:label|relation(?:ship)?)[*_]*\s*(?:\bis\b|:)[*_]*\s*(?:that\s+of\s+)?", re.IGNORECASE)

_SYNONYMS = {
    "yes": ("yes", "entailment", "entails", "entailed"),
    "it is not possible to tell": (
        "it is not possible to tell",
        "it's not possible to tell",
        "it isn't possible to tell",
        "not possible to tell",
        "it is impossible to tell",
        "impossible to tell",
        "cannot tell",
        "can't tell",
        "we cannot tell",
        "we can't tell",
        "neutral",
    ),
    "no": ("no", "contradiction", "contradicts", "contradictory"),
}
_LABEL_OF = {spelling: label for label, spellings in _SYNONYMS.items() for spelling in spellings}
_ARTICLE = re.compile(r"(?:a|an|the)\s+(?=\S)")
_LABEL_DECORATION = " \t\r\n*_`\"'’“”([{$.:!-"


def choice(text: str, explicit: bool, options: Sequence[str] = ()) -> tuple[str | None, str]:
    """The option letter A-J that a response's final part gives, in upper case, or None, and the rule that found it.

    Order: last answer phrase or `###` line that decides, last answer tag, last box, and unless `explicit` a letter that
    stands alone, if only one does, or a last line that is one option's text. In a marked region the text of one of
    `options` is as good as its letter.
    """
    text = _narrow(text)
    for tail in (*_cues(text), in_tag(text) or ""):
        letter = _cued(tail) or _named_option(tail, options)
        if letter:
            return letter, "cue"
    box = in_box(text)
    if box is not None:
        inner = _WRAPPER.sub(r"\1", box)
        match = None if _SEVERAL.match(inner) else _BOX_LETTER.match(inner)
        return (match.group(1).upper() if match else _named_option(inner, options)), "box"
    if explicit:
        return None, "none"
    last = _plain(text.strip().rpartition("\n")[2])
    if last and [_plain(option) for option in options].count(last) == 1:
        return _named_option(last, options), "text"
    alone = {next(filter(None, match.groups())).upper() for match in _LONE.finditer(_NEGATED.sub(" ", text))}
    return (alone.pop() if len(alone) == 1 else None), "letter"


def listed_options(question: str) -> tuple[str, ...]:
    """The texts of the options that a question lists last, one a line, letters from A; empty if none."""
    found: list[str] = []
    for match in _OPTION_LINE.finditer(question):
        letter, text = match.groups()
        if letter == "A":
            found = [text]
        elif found and ord(letter) - ord("A") == len(found):
            found.append(text)
    return tuple(found) if len(found) > 1 else ()


def label(text: str, gold: str, explicit: bool) -> tuple[str | None, str]:
    """The label that a response's final part gives, canonical, or None, and the rule that found its place.

    Order: last `###` line, last box, last answer tag, last answer phrase that decides, and unless `explicit` the last
    line if a label is all that its sentence says. A label counts where it starts the region as whole words. Where gold
    is none of the labels of inference, other labels are not known, and the words up to the first stop are the answer.
    """
    text = _narrow(text)
    marks = _MARK.findall(text)
    for rule, region in (("hash", marks[-1] if marks else None), ("box", in_box(text)), ("tag", in_tag(text))):
        if region is not None:
            return _leading_label(next(after_cues(region), region), gold, marked=True), rule
    for tail in after_cues(text):
        found = _leading_label(tail, gold, marked=True)
        if found:
            return found, "phrase"
    for cue in reversed(list(_RELATION.finditer(text))[-MAX_CUES:]):
        found = _leading_label(text[cue.end() : cue.end() + MAX_TAIL], gold, marked=True)
        if found in _SYNONYMS:
            return found, "phrase"
    if explicit:
        return None, "none"
    last = text.strip().rpartition("\n")[2]
    return _leading_label(last, gold, marked=False), "last_line"


def canonical_letter(gold: str) -> str | None:
    """The option letter of a gold answer such as `d`, `(D)` or `D.`; None if it is none."""
    match = re.fullmatch(r"\W*([A-Ja-j])\W*", gold)
    return match.group(1).upper() if match else None


def canonical_label(gold: str) -> str:
    """A label in lower case without decoration, and in R3's wording for the three relations of inference."""
    plain = " ".join(gold.strip(_LABEL_DECORATION).casefold().split())
    return _LABEL_OF.get(plain, plain)


def _cues(text: str) -> Iterator[str]:
    """What follows answer phrases and `###`, last first."""
    end = len(text)
    for mark in reversed(list(_MARK.finditer(text))[-MAX_CUES:]):
        yield from after_cues(text[mark.end() : end])
        yield mark.group(1)
        end = mark.start()
    yield from after_cues(text[:end])


def _cued(tail: str) -> str | None:
    marked = _WRAPPER.sub(r"\1", in_box(tail) or tail)
    if _SEVERAL.match(marked):
        return None
    match = _LETTER_FIRST.match(marked)
    if match:
        return match.group(1).upper()
    inner = {a or b for a, b in _LETTER_IN_TAIL.findall(tail)}
    return inner.pop() if len(inner) == 1 else None


def _named_option(region: str, options: Sequence[str]) -> str | None:
    """The letter of the option whose text starts the region, as whole words; None where it names another one too."""
    said = _plain(region[:MAX_TAIL])
    texts = [_plain(option) for option in options]
    starts = [text for text in texts if text and re.match(re.escape(text) + r"(?!\w)", said)]
    if not starts:
        return None
    first = max(starts, key=len)
    rest = said[len(first) :]
    others = (text for text in texts if text and text != first)
    if texts.count(first) > 1 or any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", rest) for text in others):
        return None
    return chr(ord("A") + texts.index(first))


def _narrow(text: str) -> str:
    """Letters, digits and punctuation as wide as in Chinese text are the ordinary ones."""
    return text if text.isascii() else text.translate(_WIDE)


def _plain(text: str) -> str:
    """A text as options are compared: lower case, single spaces, no article in front and no stop at the end."""
    words = " ".join(_narrow(text).strip(_LABEL_DECORATION + '")]}$,;').replace("’", "'").casefold().split())
    return _ARTICLE.sub("", words)


def _leading_label(region: str, gold: str, marked: bool) -> str | None:
    """The label that starts a region: as whole words after a marker, as all that a sentence says without one."""
    end = r"(?!-?\w)(?!\s+(?:one|contradiction|entailment)\b)" if marked else r"(?=\s*(?:[.,;:!*_]|\Z))"
    region = _WRAPPER.sub(r"\1", region[:MAX_TAIL])
    plain = " ".join(region.lstrip(_LABEL_DECORATION).replace("’", "'").casefold().split())
    wanted = canonical_label(gold)
    for spelling in sorted((*_LABEL_OF, wanted), key=len, reverse=True):
        match = re.match(re.escape(spelling) + end, plain)
        if match:
            found = _LABEL_OF.get(spelling, spelling)
            rest = plain[match.end() :]
            other = re.match(_HEDGED, rest)
            said = rest[other.end() :] if other else ""
            hedged = any(re.match(re.escape(word) + r"(?!\w)", said) for word in _LABEL_OF)
            second = canonical_label(rest.strip(",;/"))  # "yes, no"
            return None if hedged or (second in _SYNONYMS and second != found) else found
    if wanted in _SYNONYMS or not marked:
        return None
    return plain.partition(".")[0].partition(",")[0].strip(_LABEL_DECORATION) or None
