"""Choice letters and labels. Text that leaves the choice open is no answer."""

from __future__ import annotations

import re

from bridge.tasks.grading.response import after_cues, in_box, in_tag

_MARK = re.compile(r"#{3,}[ \t]*([^\n#]*)")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")

# "a" and "I" are words as well as letters: before another word they are letters only if that word goes on to argue.
_ARGUES = r"(?:because|since|as|for|due|is|and|which|with|by|given|not)\b"
_ALONE = rf"(?![\w'’^\\])(?!(?<=[AaIi])\s+(?!{_ARGUES})[A-Za-z])(?!\s*(?:or|and|[/&])\s*\(?[A-J]\b)"
_PICK = r"(?:\b(?:choose|pick|select|go\ with)|\b(?:[Oo]ption|[Cc]hoice))\s+(?:option\s+)?"
_LETTER_FIRST = re.compile(
    r"(?:(?:the\ )?(?:correct\ |right\ )?(?:option|choice|letter|answer)\b\s*(?:is\b)?|[\s*_`\"'(\[{$:#])*"
    rf"([A-J]){_ALONE}",
    re.IGNORECASE,
)
_LETTER_IN_TAIL = re.compile(rf"\(([A-J])\)|{_PICK}[(*\"']*([A-J])(?!\w)", re.VERBOSE)
_BOX_LETTER = re.compile(r"[\s({\[*]*([A-Ja-j])\s*(?:\Z|[.:),\]}*])")
_LONE = re.compile(
    rf"""^[ \t*_"'(\[]*([A-Ja-j])[*_"']*(?:[.):\]]|[ \t]*$)   # "b. nine", "(C)", a line of its own
    | [(\[*]([A-J])[)\]*]                                     # "so (C) it is", **C**
    | {_PICK}[(*"']*([A-Ja-j])(?!\w)
    | \b([A-J])\s+is\s+(?:the\s+)?(?:correct|right|best)\b
    | (?<![\w'’\\.])([B-HJ])(?![\w'’^\\=])                    # a capital in prose
    | (?<![\w'’\\.])([AI])(?=[.,;!]|\s*\Z)                    # the same, where it cannot be an article or pronoun
    """,
    re.VERBOSE | re.MULTILINE,
)

_SYNONYMS = {
    "yes": ("yes", "entailment", "entails"),
    "it is not possible to tell": (
        "it is not possible to tell",
        "it's not possible to tell",
        "not possible to tell",
        "it is impossible to tell",
        "impossible to tell",
        "cannot tell",
        "can't tell",
        "neutral",
    ),
    "no": ("no", "contradiction", "contradicts"),
}
_LABEL_OF = {spelling: label for label, spellings in _SYNONYMS.items() for spelling in spellings}
_LABEL_DECORATION = " \t\r\n*_`\"'’“”([{$.:!-"


def choice(text: str, explicit: bool) -> tuple[str | None, str]:
    """The option letter A-J that a response's final part gives, in upper case, or None, and the rule that found it.

    Order: last cue that decides (an answer phrase, a `###` line or an answer tag), last box, and unless `explicit` a
    letter that stands alone, if only one does.
    """
    block = in_tag(text)
    tails = [
        *after_cues(text),
        *(m.group(1) for m in reversed(list(_MARK.finditer(text)))),
        *([block] if block else []),
    ]
    for tail in tails:
        letter = _cued(tail)
        if letter:
            return letter, "cue"
    box = in_box(text)
    if box is not None:
        match = _BOX_LETTER.match(_WRAPPER.sub(r"\1", box))
        return (match.group(1).upper() if match else None), "box"
    if explicit:
        return None, "none"
    alone = {next(filter(None, match.groups())).upper() for match in _LONE.finditer(text)}
    return (alone.pop() if len(alone) == 1 else None), "letter"


def label(text: str, gold: str, explicit: bool) -> tuple[str | None, str]:
    """The label that a response's final part gives, canonical, or None, and the rule that found its place.

    Order: last `###` line, last box, last answer tag, last answer phrase, and unless `explicit` the last line if it is
    a label and nothing else follows it in its sentence. A label counts where it starts the region as whole words.
    """
    known = {**_LABEL_OF, canonical_label(gold): canonical_label(gold)}
    marks = _MARK.findall(text)
    for rule, region in (
        ("hash", marks[-1] if marks else None),
        ("box", in_box(text)),
        ("tag", in_tag(text)),
        ("phrase", next(after_cues(text), None)),
    ):
        if region is not None:
            region = next(after_cues(region), region)
            return _leading_label(_WRAPPER.sub(r"\1", region), known, r"(?!\w)"), rule
    if explicit:
        return None, "none"
    lines = text.strip().split("\n")
    return _leading_label(lines[-1], known, r"(?=\s*(?:[.,;:!*_]|\Z))"), "last_line"


def canonical_letter(gold: str) -> str | None:
    """The option letter of a gold answer such as `d`, `(D)` or `D.`; None if it is none."""
    match = re.fullmatch(r"\W*([A-Ja-j])\W*", gold)
    return match.group(1).upper() if match else None


def canonical_label(gold: str) -> str:
    """A label in lower case without decoration, and in R3's wording for the three relations of inference."""
    plain = " ".join(gold.strip(_LABEL_DECORATION).casefold().split())
    return _LABEL_OF.get(plain, plain)


def _cued(tail: str) -> str | None:
    match = _LETTER_FIRST.match(_WRAPPER.sub(r"\1", in_box(tail) or tail))
    if match:
        return match.group(1).upper()
    inner = {a or b for a, b in _LETTER_IN_TAIL.findall(tail)}
    return inner.pop() if len(inner) == 1 else None


def _leading_label(region: str, known: dict[str, str], end: str) -> str | None:
    plain = " ".join(region.lstrip(_LABEL_DECORATION).replace("’", "'").casefold().split())
    for spelling in sorted(known, key=len, reverse=True):
        if spelling and re.match(re.escape(spelling) + end, plain):
            return known[spelling]
    return None
