"""Grading: what a response answers, and whether that is the gold answer. Rules and their reasons: docs/grading.md."""

from bridge.tasks.grading.grade import KINDS, Grade, Reason, canonical, grade
from bridge.tasks.grading.response import format_reward
from bridge.tasks.grading.rows import Summary, grade_rows

__all__ = ["KINDS", "Grade", "Reason", "Summary", "canonical", "format_reward", "grade", "grade_rows"]
