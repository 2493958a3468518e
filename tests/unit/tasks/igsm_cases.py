"""Settings that several tests use."""

from __future__ import annotations

from bridge.config.tasks import IgsmSettings, Style
from bridge.tasks import Example

BRIDGE = IgsmSettings(name="igsm")
DEMO = IgsmSettings(
    name="igsm",
    ops=(3, 5),
    literals=(1, 9),
    max_answer=21,
    bound="all",
    negative=False,
    max_answer_share=0.08,
    depth=(2, 2),
    width=(2, 3),
    max_instances=5,
    distractors=1,
    ecosystems=["museum"],
    names=4,
    split_by="numbers",
    style=Style(wording="fixed", letters="sequential", frame="plain"),
)


def question(row: Example) -> str:
    """The text of the problem."""
    return row.prompt[-1]["content"]
