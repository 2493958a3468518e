"""Numbers as people and models write them, read exactly or not at all.

A literal that is only partly understood has no value: `1e3` is never 1 and `12,34` is neither 12 nor 34. Values are
rational numbers. What a percent sign, a unit or the number of decimals means is not decided here but in `grade.py`.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from bridge.tasks.grading.response import after_cues, after_hashes, in_box, in_tag

MAX_DIGITS = 300  # also the largest exponent: a longer literal is no answer, and could take hours to expand

_SAME = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–˗➖﹣－", "-"),
        **dict.fromkeys("’ʼ＇", "'"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"),
        **{chr(ord(zero) + digit): str(digit) for zero in "０٠۰०০੦૦୦௦౦೦൦๐໐༠၀" for digit in range(10)},
        **{chr(0x1D7CE + index): str(index % 10) for index in range(50)},  # bold and other mathematical digits
        **dict(zip("＝％，：＋．／∕＄￥￡٫٬٪", "=%,:+.//$¥£.,%", strict=True)),
    }
)
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_POWERS = str.maketrans("²³", "23")
_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_MONEY = "€£¥₹₩₽₺₪₫₦₱₴฿"
_CODES = "USD|EUR|GBP|CHF|INR|JPY|CNY|CAD|AUD"
_SEPARATOR = r"(?:\{,\}|,\\!|\\,|\\!|[,'\u00a0\u2009\u202f])"
_INT = (
    r"(?:[0-9]{1,2}(?:,[0-9]{2}){1,6},[0-9]{3}(?![0-9,])|"  # 1,00,000: lakhs
    rf"[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}}){{1,12}}(?![0-9])"
    r"|[0-9]{1,3}(?:\ [0-9]{3}){1,12}(?![0-9-])"  # not "3 200-page books"
    r"|[0-9]+)"
)
# 1.234,56 and 1 234,56 and 1.234.567: nothing else can be meant. 12,34 and 1.234 say no such thing.
_CONTINENTAL = (
    r"[0-9]{1,3}(?:(?:\.[0-9]{3}){1,12},[0-9]+|(?:[\ \u00a0\u2009\u202f][0-9]{3}){1,12},[0-9]{1,2}"
    r"|(?:\.[0-9]{3}){2,12})(?![0-9])"
)
_DECIMAL = rf"(?:{_CONTINENTAL}|{_INT}(?:\.[0-9]+)?|\.[0-9]+)"
_FRAC = (
    rf"\\[dtc]?frac\s*(?:\{{\s*(?P<top>[-+]?{_DECIMAL})\s*\}}|(?P<top1>[0-9]))"
    rf"\s*(?:\{{\s*(?P<bottom>[-+]?{_DECIMAL})\s*\}}|(?P<bottom1>[0-9]))"
)
_LITERAL = re.compile(
    rf"""
    (?<![A-Za-z0-9]) (?<![A-Za-z0-9]_) (?<![A-Za-z]\^) (?<![A-Za-z]\^\{{)
    (?: (?: (?: (?P<whole>{_INT}) \s* )? (?: {_FRAC} | (?P<vulgar>[{_VULGAR}]) )
      | (?: (?P<mixed>{_INT}) \ +(?:and\ +)? )? (?P<over>{_DECIMAL}) \s* [/⁄] \s* (?P<under>{_DECIMAL})
      | (?P<decimal>{_DECIMAL})
        (?: [eE](?P<e>[-+]?[0-9]+)
          | \s*(?:\\times|\\cdot|[×·*x])\s*10\s*(?:\^\s*\{{?\s*(?P<power>[-+]?[0-9]+)\s*\}}?
                                               |\*\*\s*(?P<power2>-?[0-9]+)|(?P<power3>⁻?[⁰¹²³⁴-⁹]+)) )?
    )
    (?! [0-9] | [.,:/'_]+[0-9] | [eE][-+]?[0-9] | (?:\{{,\}}|\\[,!])[0-9] )
    | (?P<bad>[0-9](?:(?:[0-9.,:/'_]|[eE][-+]?(?=[0-9])|\{{,\}}|\\[,!])*[0-9])?) )
    """,
    re.VERBOSE,
)
_SIGNED_CONTINENTAL = re.compile(rf"[-+]?{_CONTINENTAL}")
_PLAIN = re.compile(r"[\s*$]*([-+]?[0-9]{1,18})[\s*$.]*")
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = re.compile(
    rf"""[\s*_"'“(\[]* (?P<sign>(?:minus|negative)\s+)?
    (?: (?P<tens>{"|".join(_TENS[2:])}) (?:[-\s](?P<one>{"|".join(_ONES[1:10])}))? | (?P<ones>{"|".join(_ONES)}) )
    (?:\s+(?P<unit>[A-Za-z]+))? [\s*_"'”)\].!]*""",
    re.VERBOSE | re.IGNORECASE,
)
_OR = re.compile(r"[\s,*_$]*\bor\b[\s*_$]*", re.IGNORECASE)
_LIST = re.compile(rf"[\s*_$]*(?:[,;&]|,?\s*\band\b|\bto\b)[\s*_$\\{_MONEY}]*", re.IGNORECASE)
_SIGN_WORD = re.compile(
    r"(?:\bnegative|(?:\A|[=:(*]|\b(?:is|was|be|to))\s*\bminus)\s+(?:\\?\$|[€£¥₹])?\Z", re.IGNORECASE
)
_SIGN = re.compile(
    rf"([-+])(\s*)(?:\\[,;! ])?[(\[{{]?(?:(?:\b[A-Z]{{1,2}})?\\?\$|[{_MONEY}]|\b(?:{_CODES}|Rs\.?))?\s*[(\[{{]?\s*\Z"
)
_MINUS_GROUP = re.compile(r"-\s*[(\[{]\s*\Z")
_UNREAD_BEFORE = re.compile(r"(?:\\(?:sqrt|log|ln|exp|[dt]?frac|pm|binom)\b[^\s]*|[√±≤≥])\s*\Z")
_UNREAD_AFTER = re.compile(r"\s*(?:\^(?!\s*\{?\s*\\circ)|[²³⁴-⁹]|\*\*[0-9(]|[π√∞]|\\(?:pi|sqrt|[dt]?frac|infty)\b)")

_UNIT = r"(?:\s*(?:\\(?:text|mathrm|mbox)\{[^{}]*\}|[A-Za-z%°¢]+(?![A-Za-z%°¢]))){0,3}"
_OPERATOR = re.compile(
    rf"\s+|{_UNIT}[\s)\]}}$]*"
    r"(?:-{1,3}|[+*/×·÷^]|(?<=\s):|:(?!\s)|\*\*|\\times|\\cdot|\\div|x|times|plus|minus|(?:divided|multiplied)\ by)"
    rf"[\s(\[{{$\\{_MONEY}]*"
)
_EQUALS = re.compile(rf"{_UNIT}[\s()\]}}$*]*(?:=|≈|\\approx)(?:\s*[A-Za-z][\w ]{{0,20}}=)*[\s(\[{{$\\{_MONEY}*]*")
_NEW_THOUGHT = re.compile(r"\b(?:because|since|as|so|where|when|if|and|with|for|but|or|then|that|which|is|are|was)\b")

_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BOX_HEAD = re.compile(
    r"(?:[^0-9\\]*(?:[=:≈]|\\approx|\\sim))?"
    rf"(?:\\[ ,;!$]|[\s$(\[{{~{_MONEY}*\"'+]|{_CODES}|Rs\.?|[A-Z]{{1,2}}(?=\\?\$))*"
)
_BOX_TAIL = re.compile(
    r"(?!\s*!)(?![xyzn]\b)"
    r"(?:\\[ ,;!%$]|\^?\{?\\circ\}?|[\s$()\[\]}~%°¢€£₽₺₫₴.!,;:*\"']|/?[A-Za-z](?:\^\{?[23]\}?|[²³])?)*"
)
_SCALE = re.compile(
    r"[\s~$}]*\b((?i:hundred|thousand|lakh|million|crore|billion|trillion))\b(?!-)|(k)\b|\s*(万亿|万|亿)"
    r"|(?<=[0-9])(K|[Mm]|B|bn)\b"
)
_TIMES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TIMES |= {"lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8, "万亿": 10**12}
_TIMES |= {"k": 10**3, "m": 10**6, "b": 10**9, "bn": 10**9}
_PERCENT = re.compile(r"[\s~$}]*(?:\\?%|\\text\s*\{\s*(?:%|percent)|percent\b)", re.IGNORECASE)
_WORD = re.compile(
    r"(?:\\[ ,;!]|[\s~$}])*(?:\\(?:text|mathrm|mbox)\s*\{\s*)?(\^?\{?\\circ|[A-Za-z°¢/]+(?:\^?\{?[23]|[²³])?)"
)
_CURRENCY = re.compile(rf"([${_MONEY}])[\s{{]*\Z")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_SENTENCE_END = re.compile(r"(?<=[A-Za-z)])[.!?]\s")


class _Literal(NamedTuple):
    match: re.Match[str]
    negative: bool | None
    """None: glued to a word, no number."""
    start: int
    """Of the sign or currency before the digits."""
    end: int


class Number(NamedTuple):
    """A number and how it was written, which is looked at only where a policy asks for it."""

    value: Fraction
    literal: _Literal | None = None
    """None: it was digits only, or words."""
    word: str = ""
    """Its unit, where there is no literal."""

    @property
    def percent(self) -> bool:
        """Whether a percent sign, or the word, stands behind it."""
        match = self.literal and self.literal.match
        return bool(match and _PERCENT.match(match.string, match.end()))

    @property
    def decimals(self) -> int | None:
        """Digits after the decimal point; None for a fraction or a power of ten, which say nothing about rounding."""
        if self.literal is None:
            return 0
        match = self.literal.match
        scaled = match["e"] or match["power"] or match["power2"] or match["power3"] or _scale(self.literal) != 1
        return len(_pointed(match["decimal"]).partition(".")[2]) if match["decimal"] and not scaled else None

    @property
    def unit(self) -> str:
        """The currency before it, else the word behind it in lower case without a plural s; not the percent sign."""
        if self.literal is None:
            return _unit(self.word)
        match, start = self.literal.match, self.literal.start
        before = match.string[max(0, start - 8) : match.start()].rstrip("+-")
        word, currency = _WORD.match(match.string, match.end()), _CURRENCY.search(before)
        return currency.group(1) if currency else _unit(word.group(1)) if word else ""


def extract(text: str, explicit: bool) -> tuple[Number | None, str]:
    """The number that a response's final part gives, or None, and the rule that found its place.

    Order: last `####` line, last box, last answer tag, last answer phrase, and unless `explicit` the last number.
    """
    for rule, find in (("hash", after_hashes), ("box", in_box), ("tag", in_tag)):
        region = find(text)
        if region is not None:
            return (exact(region) if rule == "box" else _read(region)), rule
    for position, tail in enumerate(after_cues(text)):
        if not tail.strip() and position == 0:
            return None, "phrase"
        sentence = _SENTENCE_END.split(tail, maxsplit=1)[0]
        if _LITERAL.search(same(sentence)) or _in_words(sentence):
            return _read(sentence), "phrase"
    return (None, "none") if explicit else (_last(text), "last_number")


def _read(region: str) -> Number | None:
    """The number that a marked region gives: its first number, or the result of the equation there."""
    plain = _PLAIN.fullmatch(region)
    if plain:
        return Number(Fraction(int(plain.group(1))), word="$" if plain.string.count("$") == 1 else "")
    box = in_box(region)
    if box is not None:
        return exact(box)
    cues = [tail for tail in after_cues(region) if any(c.isdigit() for c in tail)]
    text = _clean(cues[0] if cues else region)
    chains = _chains(text, _literals(text, signed_start=True))
    if not chains:
        return _in_words(text)
    between = [text[a[-1][-1].end : b[0][0].start] for a, b in pairwise(chains)]
    if between and (_OR.fullmatch(between[0]) or _is_list(between, text[chains[-1][-1][-1].end :])):
        return None
    return _result(chains[0])


def _is_list(between: list[str], tail: str) -> bool:
    """Whether a region is nothing but numbers side by side, "5, 6 and 7" or "5 to 7"."""
    return not tail.strip(" \t.*_$)") and all(map(_LIST.fullmatch, between))


def _in_words(region: str) -> Number | None:
    """The number of a region that is a number word below a hundred, perhaps with one word behind it: "twelve eggs",
    "two million"."""
    match = _WORDS.fullmatch(region)
    if match is None:
        return None
    tens, ones = match.group("tens"), match.group("one") or match.group("ones")
    value = (10 * _TENS.index(tens.lower()) if tens else 0) + (_ONES.index(ones.lower()) if ones else 0)
    word = match.group("unit") or ""
    scale = _TIMES.get(word.lower()) if len(word) > 2 else None  # five m are metres
    value *= scale or 1
    return Number(Fraction(-value if match.group("sign") else value), word="" if scale else word)


def _last(text: str) -> Number | None:
    """The last number of the last line that has one."""
    for line in reversed(text.split("\n")):
        line = _clean(line)
        literals = _literals(line, signed_start=False)
        if literals:
            chains = _chains(line, literals)
            if len(chains) > 1 and _OR.fullmatch(line[chains[-2][-1][-1].end : chains[-1][0][0].start]):
                return None
            return _result(chains[-1])
    return None


def exact(content: str) -> Number | None:
    """The number of a text that is one number or equation and nothing else but a unit or a name: what a box
    holds, or a gold answer. Otherwise None."""
    plain = _PLAIN.fullmatch(content)
    if plain:
        return Number(Fraction(int(plain.group(1))), word="$" if plain.string.count("$") == 1 else "")
    text = _WRAPPER.sub(r"\1", _clean(content))
    literals = _literals(text, signed_start=True)
    chains = _chains(text, literals)
    if len(chains) != 1 or not _BOX_HEAD.fullmatch(text[: literals[0].start]):
        return None
    return _result(chains[0]) if _BOX_TAIL.fullmatch(text[literals[-1].end :]) else None


def same(text: str) -> str:
    return text if text.isascii() else text.translate(_SAME)


def _clean(text: str) -> str:
    text = same(text)
    return _CALCULATOR.sub("", text) if "<<" in text else text


def _literals(text: str, signed_start: bool) -> list[_Literal]:
    return [
        _Literal(match, *_sign(text, match.start(), signed_start), match.end()) for match in _LITERAL.finditer(text)
    ]


def _sign(text: str, start: int, signed_start: bool) -> tuple[bool | None, int]:
    """Whether the number at `start` is negative, and where it begins with its sign and currency.

    None instead of a truth value: it is glued to a word (B-52, x+7). A dash after a number is an operator or a range,
    and one before a space is a sign only at the start of an answer or after `=`, `(` or `:`.
    """
    match = _SIGN.search(text, max(0, start - 12), start)
    if match is None:
        worded = text[max(0, start - 9) : start].rstrip("$€£¥₹\\ ")[-1:] in ("s", "e", "S", "E")
        return worded and bool(_SIGN_WORD.search(text, max(0, start - 20), start)), start
    before = text[max(0, match.start() - 40) : match.start()]
    previous = before.rstrip()[-1:]
    if _MINUS_GROUP.search(before):  # -(-5)
        return None, match.start()
    if previous.isdigit() or (previous and previous in ")]}%°-" + _VULGAR):
        return False, start
    if before[-1:].isalpha() and not match.group(2):
        return None, start
    if match.group(2) and not (previous in ("=", "(", ":") or (not previous and signed_start)):
        return False, start
    return match.group(1) == "-", match.start()


def _value(literal: _Literal) -> Fraction | None:
    """The value of a literal; None where it or what it stands in is not wholly understood."""
    match, text = literal.match, literal.match.string
    if literal.negative is None or match.end() - match.start() > MAX_DIGITS or match["bad"]:
        return None
    if _UNREAD_AFTER.match(text, match.end()) or _UNREAD_BEFORE.search(
        text[max(0, literal.start - 40) : literal.start]
    ):
        return None
    size = _decimal_or_exponent(match) if match["decimal"] else _fraction(match)
    if size is None:
        return None
    scale = _scale(literal)
    return (-size if literal.negative else size) * scale if scale != 1 else -size if literal.negative else size


def _scale(literal: _Literal) -> int:
    """What a word such as million behind a literal multiplies it by. 5k and $5K are thousands, 300K a temperature."""
    text, start = literal.match.string, literal.match.start()
    found = _SCALE.match(text, literal.match.end())
    if not found or (found.group(4) and not _CURRENCY.search(text[max(0, start - 3) : start])):
        return 1
    return _TIMES[next(filter(None, found.groups())).lower()]


def _unit(word: str) -> str:
    lower = word.lower().replace("^", "").replace("{", "").translate(_POWERS)
    if _NEW_THOUGHT.fullmatch(lower) or lower == "percent":
        return ""
    return lower.removesuffix("s") if len(lower) > 2 else lower


def _decimal_or_exponent(match: re.Match[str]) -> Fraction | None:
    exponent = match["e"] or match["power"] or match["power2"] or (match["power3"] or "").translate(_SUPER)
    size = _decimal(match["decimal"])
    if not exponent:
        return size
    return size * Fraction(10) ** int(exponent) if abs(int(exponent)) <= MAX_DIGITS else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    whole, top, bottom = match["mixed"], match["over"], match["under"]
    if match["vulgar"]:
        whole, (top, bottom) = match["whole"], unicodedata.normalize("NFKC", match["vulgar"]).split("\u2044")
    elif not top:
        whole, top, bottom = match["whole"], match["top"] or match["top1"], match["bottom"] or match["bottom1"]
    above, below = _decimal(top), _decimal(bottom)
    if below == 0 or (whole and not 0 <= above < below):
        return None
    return _decimal(whole or "0") + above / below


def _decimal(text: str) -> Fraction:
    return Fraction(int(text) if text.isdigit() else _pointed(text))


def _pointed(text: str) -> str:
    """A decimal as Python reads it: a point before the decimals, and no separators."""
    if _SIGNED_CONTINENTAL.fullmatch(text):
        return re.sub(r"[^0-9,+-]", "", text).replace(",", ".")
    return re.sub(r"[^0-9.+-]", "", text)


def _chains(text: str, literals: list[_Literal]) -> list[list[list[_Literal]]]:
    """Group literals into equations: a chain is a list of sides, a side a list of the literals joined by operators."""
    chains: list[list[list[_Literal]]] = []
    for index, literal in enumerate(literals):
        glue = text[literals[index - 1].end : literal.start] if index else ""
        linked = 0 < len(glue) <= 60 and not _NEW_THOUGHT.search(glue)
        if index and linked and _OPERATOR.fullmatch(glue):
            chains[-1][-1].append(literal)
        elif index and linked and _EQUALS.fullmatch(glue):
            chains[-1].append([literal])
        else:
            chains.append([[literal]])
    return chains


def _result(chain: list[list[_Literal]]) -> Number | None:
    """The last side of an equation that is one number: 10 + 62 = 72 gives 72, and so does 72 = 10 + 62."""
    for side in reversed(chain):
        if len(side) == 1:
            value = _value(side[0])
            return None if value is None else Number(value, side[0])
    return None
