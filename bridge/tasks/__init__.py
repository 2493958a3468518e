"""Problems with answers that can be checked."""

from bridge.config.tasks import TaskSettings
from bridge.tasks.base import Example, Split, Task, Writer

__all__ = ["Example", "Split", "Task", "Writer", "load_task"]


def load_task(settings: TaskSettings) -> Task:
    """The task that the settings describe."""
    from bridge.tasks.igsm.task import Igsm

    return Igsm(settings)
