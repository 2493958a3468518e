"""The grading rules, case by case, and as properties of any text."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.config.grading import Grading
from bridge.errors import UserError
from bridge.tasks.grading import KINDS, REASONS, canonical, format_reward, grade, listed_options

SHARED = Path(__file__).parents[3] / "shared"

NUMBERS = [
    # the last marker, and the order of markers
    ("#### 24", "24", True),
    ("####24", "24", True),
    ("####\u00a024.", "24", True),
    ("####\n24", "24", True),
    ("#### 5\nNo, wait.\n#### 6", "6", True),
    ("#### 5\nNo, wait.\n#### 6", "5", False),
    ("#### 5\nThat took 3 steps.", "5", True),
    ("####", "5", False),
    ("We had 5.\n#### ,", "5", False),
    ("#### Step 2: add\nThat gives 7 plums.", "7", True),
    ("#### Conclusion\nIn the end \\boxed{42}", "42", True),
    ("#### Final Answer\n72", "72", True),
    ("#### The answer is 42\nGood luck!", "42", True),
    (r"\boxed{7}, no, \boxed{8}", "8", True),
    (r"\boxed{7}. Hence \boxed{", "7", False),
    (r"\boxed{} so 7", "7", False),
    (r"\fbox{42}", "42", True),
    (r"\boxed {42}", "42", True),
    (r"\boxed{\boxed{42}}", "42", True),
    ("<answer>\nIt is \\boxed{-3}.\n</answer>", "-3", True),
    ("<answer> The total is 42 eggs </answer> Bye 7", "42", True),
    ("<answer>42", "42", True),
    ("<answer></answer> 42", "42", False),
    ("<answer>5</answer> or rather <answer>6</answer>", "6", True),
    ("The answer is 42. I hope this answer is helpful.", "42", True),
    ("The answer is not 5. It is 6.", "6", True),
    ("The answer to question 3 is 42.", "42", True),
    ("**Final Answer**\n\n42", "42", True),
    ("Final answer: $\\boxed{42}$.", "42", True),
    ("Antwort: 42", "42", True),
    ("答案是72", "72", True),
    ("She has 3 cats and 24 dogs.", "24", True),
    ("There is nothing to count.", "0", False),
    # traces and run-on text
    ("<think>maybe 5</think>\n#### 6", "6", True),
    ("<Thinking>5</THINKING>6", "6", True),
    ("<think>#### 6", "6", False),
    ("it was 6</think>I give up.", "6", False),
    ("#### 42\n\nQuestion: And 2 + 2?\nAnswer: #### 4", "42", True),
    ("#### 42\n\n**Q2:** And 2 + 2?\n#### 4", "42", True),
    ("Question: how many?\nAnswer: 5", "5", True),
    # thousands
    *(
        (f"#### 1{separator}234", "1234", True)
        for separator in (",", "{,}", "\\,", ",\\!", "\u2009", "\u202f", " ", "'")
    ),
    ("#### 1,234,567.50", "1234567.5", True),
    ("#### 12,34", "12", False),
    ("#### 12,34", "34", False),
    ("#### 12,34", "1234", False),
    ("#### 1,2345", "1", False),
    (r"\boxed{1\,234}", "1", False),
    # signs and currency
    ("#### -7", "-7", True),
    ("#### \u22127", "-7", True),
    ("It fell to –7 degrees", "-7", True),
    ("It fell to −7 degrees", "7", False),
    ("#### -$15", "-15", True),
    ("#### $-15", "-15", True),
    ("#### - 7", "-7", True),
    ("#### +7", "7", True),
    (r"#### -\$15", "-15", True),
    ("The shop is open 9-5", "-5", False),
    ("#### 10–12", "-12", False),
    ("#### 10-12", "10", False),
    ("We sent a B-52", "-52", False),
    ("#### US$15 per day", "15", True),
    ("- 7 plums", "7", True),
    # decimals, exponents, fractions
    ("#### 24.0", "24", True),
    ("#### .5", "1/2", True),
    ("#### 24..", "24", True),
    ("#### 1e3", "1000", True),
    ("#### 1e3", "1", False),
    ("#### 7e-1", "0.7", True),
    ("#### 1e3.5", "1", False),
    (r"\boxed{3 \times 10^{4}}", "30000", True),
    ("#### 3 × 10³", "3000", True),
    ("#### 10^3", "10", False),
    ("#### 3/8", "0.375", True),
    ("#### 2 1/2", "2.5", True),
    ("#### 2½", "2.5", True),
    ("#### 2½", "2", False),
    ("#### ⅔", "2/3", True),
    (r"\boxed{-\frac{3}{4}}", "-0.75", True),
    (r"\boxed{1\frac12}", "1.5", True),
    ("#### 5 7/2", "5", False),
    ("#### 3/0", "3", False),
    ("#### 1/2/3", "1", False),
    ("#### 3:30", "3", False),
    ("#### 0.333", "1/3", False),
    ("#### ７２", "72", True),
    # equations, units, leftovers
    ("#### 10 + 62 = 72", "72", True),
    ("#### 72 = 10 + 62", "72", True),
    ("#### 5 + 3", "5", False),
    ("#### 42 because x = 3", "42", True),
    ("6x3=18", "18", True),
    ("x^2 + 7 = 11", "11", True),
    ("9 * 2 = $<<9*2=18>>18 a day", "18", True),
    ("#### 18 eggs (3 boxes of 6)", "18", True),
    ("#### 10 cm^2", "10", True),
    ("So it covers 10 m²", "10", True),
    ("共72个", "72", True),
    (r"\boxed{72\text{ dollars}}", "72", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{x = 5}", "5", True),
    (r"\boxed{2, 3}", "2", False),
    (r"\boxed{2x + 3}", "2", False),
    (r"\boxed{5x}", "5", False),
    (r"\boxed{5\pi}", "5", False),
    (r"\boxed{2\sqrt{3}}", "2", False),
    (r"#### \sqrt{16}", "16", False),
    # no tolerance, no scaling
    ("#### 123457", "123456", False),
    ("#### 35%", "35", True),
    ("#### 35", "35%", True),
    ("#### 0.35", "35", False),
    ("50 in total", "5", False),
    # words and suffixes that change a number are part of it
    ("#### 5 million", "5000000", True),
    ("#### 5 million", "5", False),
    ("The answer is $2.5 million.", "2500000", True),
    (r"\boxed{5\text{ million}}", "5000000", True),
    ("#### $5K", "5000", True),
    ("#### 300K", "300", True),
    ("#### minus 5", "-5", True),
    ("#### negative 5", "5", False),
    ("8 minus 5 is 3", "3", True),
    ("The answer is twelve.", "12", True),
    ("The answer is twenty-one eggs.", "21", True),
    ("She had 3. The answer is two.", "2", True),
    ("The answer is one of these.", "1", False),
    (r"\boxed{5!}", "5", False),
    ("#### 1_000", "1", False),
    ("#### _46_", "46", True),
    # more spellings
    ("#### 1,00,000", "100000", True),
    ("#### 1 and 1/2", "1.5", True),
    ("#### ٤٢", "42", True),
    (r"\boxed{\approx 5}", "5", True),
    ("15 (= 5 × 3)", "15", True),
    # separators of other countries, where nothing else can be meant
    ("#### 1.234,56", "1234.56", True),
    ("#### 1.234,56", "1.234", False),
    ("#### -1.234,5", "-1234.5", True),
    ("#### 1.234.567", "1234567", True),
    ("#### 1 234,56", "1234.56", True),
    ("#### 1\u202f234,5", "1234.5", True),
    ("#### 1\u2019234", "1234", True),
    ("#### 1\u2019234", "1", False),
    ("#### 1.234", "1234", False),
    # a sign before a bracket, a space command or another currency is a sign
    ("#### -(5)", "-5", True),
    (r"\boxed{-(5)}", "5", False),
    (r"\boxed{-\,5}", "-5", True),
    (r"\boxed{-(-5)}", "-5", False),
    ("3 + (-5) = -2", "-2", True),
    ("#### 3 - (-5) = 8", "8", True),
    ("#### +-5", "5", False),
    ("#### -US$15", "-15", True),
    ("#### -$(15)", "15", False),
    ("Step 1: 5\nStep 2: 6", "6", True),
    ("#### -₩500", "-500", True),
    ("#### -Rs. 500", "500", False),
    (r"\boxed{\frac{1}{-2}}", "-1/2", True),
    ("#### 10--12", "10", False),
    ("Total -- 72", "72", True),
    # number words with a scale
    ("The answer is one hundred.", "100", True),
    ("The answer is two thousand.", "2", False),
    ("#### 3 hundred", "300", True),
    ("#### $5M", "5000000", True),
    ("#### 5m", "5", True),
    ("答案是5万", "50000", True),
    ("答案是5万", "5", False),
    ("#### \U0001d7d5\U0001d7d0", "72", True),
    # lists
    ("#### 5 and 6", "5", False),
    ("#### 2, 3", "2", False),
    ("#### 5 to 6", "5", False),
    ("It is 5 or 6.", "6", False),
    ("#### 72, 24 in May", "72", True),
    ("#### 3.14 to 2 decimal places", "3.14", True),
    # hedges
    ("#### 5 or 6", "5", False),
    ("The answer is 5 or 6.", "6", False),
    ("#### 5 or 7 or 6", "5", False),
    # other turns and end tokens
    ("#### 5\n\nHuman: next?\n#### 7", "5", True),
    ("#### 5\n### Instruction:\nDo\n#### 7", "5", True),
    ("#### 5<|endoftext|>Question: 3\n#### 7", "5", True),
    ("#### 5</s>", "5", True),
]

CHOICES = [
    ("The answer is B.", "B", True),
    ("The answer is (b)", "B", True),
    ("answer is D. Some would pick A.", "D", True),
    ("The answer is A because it is heavy", "A", True),
    ("The answer is a magnet", "A", False),
    ("The answer is I think C", "I", False),
    ("Answer: A magnet", "A", False),
    ("The answer is Dog", "D", False),
    ("The answer is B or C", "B", False),
    ("ANSWER IS b or c", "B", False),
    ("The answer is \u0130", "I", False),  # a letter only where case is ignored too freely
    ("The answer is not A. The answer is B", "B", True),
    ("The answer is: nine (C)", "C", True),
    ("Answer: B? No. ### D", "D", True),
    ("### D\nThe answer is C.", "C", True),
    (r"The answer is \boxed{\text{(C)}}.", "C", True),
    (r"\boxed{k_B T}. Answer: D", "D", True),
    (r"\boxed{k_B T}", "B", False),
    (r"\boxed{E: a coil}", "E", True),
    ("<answer>B</answer>", "B", True),
    ("**B**", "B", True),
    ("a", "A", True),
    ("c) four", "C", True),
    ("A. coil\nB. nail", "A", False),
    ("I think it is a nail", "A", False),
    ("I think it is a nail", "I", False),
    ("Both B and C fit", "B", False),
    ("So the best one is C", "C", True),
    ("It's C.", "(C)", True),
    ("<think>B", "B", False),
    ("Answer: B\n\nQuestion: next\nAnswer: C", "B", True),
    ("The answer is 'C'.", "C", True),
    ("The answer is C or maybe D", "C", False),
    ("The answer is C and not A.", "C", True),
    ("The answer is not B, it is C", "C", True),
    ("The answer is neither A nor B", "A", False),
    ("Between A and C, I pick C.", "C", True),
    ("C's the one", "C", False),
    ("The answer isn't B.", "B", False),
    ("B is wrong.", "B", False),
    ("It can't be B.", "B", False),
    ("Option A is incorrect. Option D is correct.", "D", True),
    ("The answer is (A) or B", "A", False),
    ("The answer is **A** or **B**", "A", False),
    ("The answer is either A or B.", "B", False),
    ("It is A or B", "B", False),
    ("The answer is A, B and C.", "A", False),
    (r"\boxed{A, C}", "A", False),
    ("The answer is A, B is wrong", "A", True),
    ("The answer is definitely C. A and B fail.", "C", True),
    (r"\boxed{\text{Option B}}", "B", True),
    ("答案是（Ａ）", "A", True),
    ("`A`", "A", True),
]

OPTIONS = ("a magnet", "a nail", "It depends.", "magnets and nails")
TEXTS = [
    ("The answer is a magnet.", "A", True),
    ("Answer: The nail, because it rusts", "B", True),
    ("The answer is: it depends", "C", True),
    ("The answer is magnets and nails", "D", True),
    ("The answer is a magnet or a nail", "A", False),
    ("The answer is a magnetic field", "A", False),
    ("The answer is B, a nail", "B", True),
    ("The answer is B, not a magnet", "B", True),
    (r"\boxed{\text{a nail}}", "B", True),
    ("<answer>A nail</answer>", "B", True),
    ("### a nail", "B", True),
    ("Rust is iron.\nA nail.", "B", True),
    ("A nail rusts, and a magnet does not", "B", False),
]

LABELS = [
    ("It follows. ### yes", "yes", True),
    ("#### Yes.", "yes", True),
    ("### no? ### **yes**", "yes", True),
    ("### entailment", "yes", True),
    ("### contradiction, clearly", "no", True),
    ("### neutral", "It is not possible to tell.", True),
    ("### It's not possible to tell", "neutral", True),
    ("### not possible to tell", "no", False),
    ("### nobody", "no", False),
    ("I know it", "no", False),
    ("No man is seen", "no", False),
    ("Let me see.\nNo.", "no", True),
    ("The answer is no. I hope this answer helps.", "no", True),
    (r"\boxed{yes}", "yes", True),
    ("### Positive.", "positive", True),
    ("### negative", "positive", False),
    ("### yes and no", "yes", False),
    ("### yes or maybe no", "yes", False),
    ("### yes and it is clear", "yes", True),
    ("### no one knows", "no", False),
    ("### yes-ish", "yes", False),
    ("### not entailment", "yes", False),
    ("### non-entailment", "yes", False),
    ("The relationship is entailment.", "yes", True),
    ("**Label:** neutral", "neutral", True),
    ("The relation is not clear, so no", "no", False),
    ("### no, yes", "no", False),
    ("### no contradiction", "no", False),
    ("### **yes** or **no**", "yes", False),
    ("### Yes, no doubt about it", "yes", True),
    ("### It isn’t possible to tell.", "neutral", True),
    ("### ｙｅｓ", "yes", True),
]


@pytest.mark.parametrize(("response", "gold", "want"), NUMBERS)
def test_numbers(response: str, gold: str, want: bool) -> None:
    assert grade(response, gold, "number").correct is want


@pytest.mark.parametrize(("response", "gold", "want"), CHOICES)
def test_choices(response: str, gold: str, want: bool) -> None:
    assert grade(response, gold, "choice").correct is want


@pytest.mark.parametrize(("response", "gold", "want"), TEXTS)
def test_the_text_of_an_option_is_as_good_as_its_letter(response: str, gold: str, want: bool) -> None:
    assert grade(response, gold, "choice", options=OPTIONS).correct is want


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Which?\nA. coil\nB. nail of iron \nC. rope", ("coil", "nail of iron", "rope")),
        ("Which?\n(A) coil\n(B) nail", ("coil", "nail")),
        ("Which?\nA) x\nB) y\n\nAnswer: A\n\nWhich?\nA) coil\nB) nail\nAnswer:", ("coil", "nail")),
        ("Article: A. B.\nQuestion: Which?\nOptions: A: coil\nB: nail", ("coil", "nail")),
        ("A. Smith asks: which?", ()),
        ("How many?", ()),
    ],
)
def test_options_are_read_from_the_question(question: str, options: tuple[str, ...]) -> None:
    assert listed_options(question) == options


POLICIES = [
    ("#### 35%", "0.35", {"percent": "hundredth"}, True),
    ("#### 35%", "35%", {"percent": "hundredth"}, True),
    ("#### 35", "35%", {"percent": "hundredth"}, False),
    ("#### 35 percent", "7/20", {"percent": "hundredth"}, True),
    (r"\boxed{35\%}", "0.35", {"percent": "hundredth"}, True),
    ("#### 0.33", "0.333", {"rounding": "gold"}, False),
    ("#### 0.3333", "0.333", {"rounding": "gold"}, True),
    ("#### 1/3", "0.333", {"rounding": "gold"}, True),
    ("#### 0.3335", "0.333", {"rounding": "gold"}, True),
    ("#### 0.3336", "0.333", {"rounding": "gold"}, False),
    ("#### 71.5", "72", {"rounding": "gold"}, True),
    ("#### 71.4", "72", {"rounding": "gold"}, False),
    ("#### 0.333", "1/3", {"rounding": "gold"}, False),
    ("#### 10 m", "10 cm", {}, True),
    ("#### 10 m", "10 cm", {"units": "match"}, False),
    ("#### 10 cm", "10 cm", {"units": "match"}, True),
    (r"\boxed{10\text{ cm}}", "10 cm", {"units": "match"}, True),
    ("#### 10 Meters", "10 meter", {"units": "match"}, True),
    ("#### 10", "10 cm", {"units": "match"}, True),
    ("#### 10 because it is so", "10 cm", {"units": "match"}, True),
    ("#### €10", "$10", {"units": "match"}, False),
    ("#### $10", "$10", {"units": "match"}, True),
    ("#### 0.35", "35.0%", {"percent": "hundredth", "rounding": "gold"}, True),
    ("#### 0.3504", "35.0%", {"percent": "hundredth", "rounding": "gold"}, True),
    ("#### 0.36", "35.0%", {"percent": "hundredth", "rounding": "gold"}, False),
]


@pytest.mark.parametrize(("response", "gold", "settings", "want"), POLICIES)
def test_policies(response: str, gold: str, settings: dict[str, str], want: bool) -> None:
    policy = Grading.model_validate(settings)
    result = grade(response, gold, "number", policy=policy)
    assert result.correct is want
    assert (result.answer == canonical(gold, "number", policy)) is want  # a vote counts what is equal as equal


@pytest.mark.parametrize(("response", "gold", "want"), LABELS)
def test_labels(response: str, gold: str, want: bool) -> None:
    assert grade(response, gold, "label").correct is want


@pytest.mark.skipif(
    not (SHARED / "cases/grading.jsonl").exists(), reason="the shared cases are not beside this checkout"
)
def test_shared_cases() -> None:
    with (SHARED / "cases/grading.jsonl").open(encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    wrong = [c for c in cases if grade(c["response"], c["gold"], c["kind"]).correct is not c["want"]]
    assert len(cases) == 110
    assert not wrong


@pytest.mark.skipif(not (SHARED / "data/gsm8k").exists(), reason="GSM8K is not beside this checkout")
def test_every_gsm8k_solution_grades_itself() -> None:
    with (SHARED / "data/gsm8k/test.jsonl").open(encoding="utf-8") as file:
        solutions = [json.loads(line)["answer"] for line in file]
    graded = [grade(solution, solution.rpartition("####")[2], "number") for solution in solutions]
    assert len(graded) == 1319
    assert all(g.correct and g.rule == "hash" for g in graded)


@pytest.mark.parametrize(
    ("response", "truncated", "answer", "reason", "rule"),
    [
        ("#### 1,450.50", False, "2901/2", "wrong", "hash"),
        ("The answer is 007", False, "7", "correct", "phrase"),
        ("So 7", False, "7", "correct", "last_number"),
        ("No idea", False, None, "no_answer", "last_number"),
        ("<think>7", False, None, "think_unclosed", "none"),
        # A response that was cut off: its last word may be half of one, and only a marker counts.
        ("#### 7", True, None, "truncated", "hash"),
        ("#### 7\n", True, "7", "correct", "hash"),
        ("\\boxed{7}", True, "7", "correct", "box"),
        ("The answer is 7. The", True, "7", "correct", "phrase"),
        ("So there are 7 plums and", True, None, "truncated", "none"),
        ("<think>7", True, None, "think_unclosed", "none"),
        ("#### 7\n\nQuestion: <think> and", True, "7", "correct", "hash"),
    ],
)
def test_what_a_grade_records(response: str, truncated: bool, answer: str | None, reason: str, rule: str) -> None:
    assert grade(response, "7", "number", truncated=truncated) == (answer, reason == "correct", reason, rule)


@pytest.mark.parametrize(
    ("gold", "kind", "message"),
    [
        ("seven", "number", "gold 'seven' is not a number"),
        ("5 or 6", "number", "is not a number"),
        ("", "number", "is not a number"),
        ("Q", "choice", "is not an option letter"),
        ("...", "label", "is not a label"),
        ("", "latex:unit", "is not a formula"),
        ("7", "numeral", "kind 'numeral' is not known"),
    ],
)
def test_a_gold_answer_that_cannot_be_used_is_refused(gold: str, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        grade("#### 7", gold, kind)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>\n5\n</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think> so <answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer> bye", 0.0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0.0),
        ("<think>a<think>b</think><answer>5</answer>", 0.0),
        ("a</think><answer>5</answer>", 0.0),
        ("<think>a<answer>5</answer></think>", 0.0),
        ("5", 0.0),
    ],
)
def test_format_reward(response: str, reward: float) -> None:
    assert format_reward(response) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>", 1.0),
        ("<think>a</think><answer>5</answer>\nbye", 1.0),
        ("<think>a</think><answer>5</answer> bye", 0.0),
        ("<think>a<think>b</think><answer>5</answer>", 1.0),
        ("<think>a</think> so <answer>5</answer>", 0.0),
        ("so <think>a</think><answer>5</answer>", 0.0),
        ("5", 0.0),
    ],
)
def test_format_reward_as_bridge_has_it(response: str, reward: float) -> None:
    assert format_reward(response, "bridge") == reward


integers = st.integers(-(10**9), 10**9)
FRAMES = ["#### {}", "So \\boxed{{{}}}.", "The answer is {}.", "<answer>{}</answer>", "Answer: **{}**", "It makes {}"]


def spellings(number: int) -> list[str]:
    sign, size = "-" * (number < 0), abs(number)
    grouped = f"{size:,}"
    return [
        f"{sign}{size}",
        f"{sign}{grouped}",
        sign + grouped.replace(",", "{,}"),
        sign + grouped.replace(",", "\u00a0"),
        f"{sign}${grouped}.00",
        f"{sign}{size}.0 plums",
        sign.replace("-", "\u2212") + str(size),
        f"{sign}{size}e0",
        f"{sign}{2 * size}/2",
    ]


@given(integers, st.sampled_from(FRAMES), st.data())
def test_an_integer_is_found_however_it_is_written(number: int, frame: str, data: st.DataObject) -> None:
    written = data.draw(st.sampled_from(spellings(number)))
    assert grade(frame.format(written), str(number), "number").correct


@given(integers, integers, st.sampled_from(FRAMES), st.data())
def test_another_integer_is_never_taken_for_it(number: int, gold: int, frame: str, data: st.DataObject) -> None:
    written = data.draw(st.sampled_from(spellings(number)))
    assert grade(frame.format(written), str(gold), "number").correct is (number == gold)


@given(st.fractions(max_denominator=10**6), st.integers(1, 9), st.sampled_from(FRAMES))
def test_a_fraction_equals_its_multiples(value: Fraction, factor: int, frame: str) -> None:
    written = f"{value.numerator * factor}/{value.denominator * factor}"
    result = grade(frame.format(written), str(value), "number")
    assert result.correct
    assert result.answer == str(value)


@given(st.from_regex(r"[0-9][0-9.,]{0,9}", fullmatch=True), st.sampled_from(FRAMES[:4]))
def test_digits_are_read_as_a_whole_or_not_at_all(written: str, frame: str) -> None:
    answer = grade(frame.format(written), "7", "number").answer
    assert answer is None or Fraction(answer) == Fraction(written.rstrip(".,").replace(",", ""))


FRAGMENTS = (
    "#### ### \\boxed{ } <think> </think> <answer> </answer> Answer: Question: 12 1,2 - = $ \\frac{ ½ A b. yes not é ²"
)
fragments = st.sampled_from([*FRAGMENTS.split(" "), "The answer is ", "\n", " ", "\u0130", "\u2028"])


@settings(max_examples=400)
@given(st.lists(st.one_of(fragments, st.text(max_size=4)), max_size=25).map("".join), st.booleans())
def test_any_text_gets_a_verdict(response: str, truncated: bool) -> None:
    for kind, gold in (("number", "12"), ("choice", "A"), ("label", "yes")):
        result = grade(response, gold, kind, truncated=truncated)
        assert result.reason in REASONS
        assert result.correct is (result.reason == "correct")
        assert result.correct is (result.answer == canonical(gold, kind))
        if result.answer is not None:
            assert canonical(result.answer, kind) == result.answer  # canonical already
        if kind != "label":
            assert result == grade(response, f" {gold} ", f"{kind}:suffix", truncated=truncated)


DEGENERATE = [
    "9",
    "9 ",
    "1,",
    "1 + ",
    "1 = ",
    "1 234 ",
    ".5",
    "1.234",
    "1.234,",
    "A, ",
    "\\boxed{",
    "\\text{",
    "the answer is ",
    "### ",
    "A or ",
]


@pytest.mark.parametrize("unit", [*DEGENERATE, "<answer>", "</think>", "<think>", "\n", "答案", "a", "Question:\n"])
@pytest.mark.timeout(20)
def test_degenerate_responses_take_no_time(unit: str) -> None:
    """A sampler stuck in a loop writes such text; a quadratic rule would take minutes on it (and did)."""
    for kind, gold in (("number", "12"), ("choice", "A"), ("label", "yes")):
        for response in (unit * 20_000, "\\boxed{5" + unit * 20_000 + "_1}", "#### 5 " + unit * 20_000 + "_"):
            for truncated in (False, True):
                assert grade(response, gold, kind, truncated=truncated).reason in REASONS


def test_huge_numbers_are_refused_not_expanded() -> None:
    assert grade("#### 1e999999999", "1", "number").answer is None
    assert grade("#### " + "9" * 5000, "9", "number").answer is None


def test_kinds_are_those_of_the_command_line() -> None:
    assert KINDS == ("number", "choice", "label", "latex")
