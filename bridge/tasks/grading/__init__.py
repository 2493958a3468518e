"""Grading: what a response answers, and whether that is the gold answer.

1. Only the text after the last closing think tag counts; a trace that never closes holds no answer. Text after a new
   "Question:" line belongs to another question.
2. Numbers: the last `####` line, else the last `\\boxed`, else the last answer tag, else the last answer phrase, else
   the last number. A marker that holds nothing readable is a missing answer, never a reason to look further back.
3. After a marker: the result of an equation, else the first number. A literal is read as a whole or not at all, and
   compared as an exact rational: 0.75 = 3/4, 0.333 is not 1/3, 10001 is not 10000.
4. Disputed, so a setting (`bridge.config.grading`): units, currency and the percent sign are ignored on both sides,
   without scaling by 100, and nothing is rounded, unless the policy says otherwise.
5. Choices: a cue that decides, else a box, else the only letter that stands alone. "a" and "I" in prose are words.
   Where the options are known, the text of one is as good as its letter.
6. Labels: whole words at the start of the marked region, in any case; entailment, neutral and contradiction are R3's
   yes, it is not possible to tell, and no.
7. LaTeX: a marked formula, compared by Math-Verify in a process with limits of time and memory. A comparison that
   breaks them is a grader_error, never "wrong".
"""

from bridge.tasks.grading.grade import KINDS, REASONS, Grade, Reason, Response, canonical, grade, grade_all
from bridge.tasks.grading.response import format_reward
from bridge.tasks.grading.rows import Summary, grade_rows
from bridge.tasks.grading.words import listed_options

__all__ = [
    "KINDS",
    "REASONS",
    "Grade",
    "Reason",
    "Response",
    "Summary",
    "canonical",
    "format_reward",
    "grade",
    "grade_all",
    "grade_rows",
    "listed_options",
]
