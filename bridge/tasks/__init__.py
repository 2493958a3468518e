"""Problems with answers that can be checked."""

from bridge.config.base import Settings
from bridge.config.tasks import TaskSettings
from bridge.tasks.base import Example, Split, Task, Writer
from bridge.tasks.streams import stream

__all__ = ["Example", "Settings", "Split", "Task", "Writer", "load_task", "resolve_task", "stream"]


def load_task(settings: TaskSettings) -> Task:
    """The task that the settings describe."""
    from bridge.config import tasks

    match settings:
        case tasks.IgsmSettings():
            from bridge.tasks.igsm.task import Igsm

            return Igsm(settings)
        case tasks.Gsm8kSettings():
            from bridge.tasks.gsm8k import Gsm8k

            return Gsm8k(settings)
        case tasks.SvampSettings():
            from bridge.tasks.svamp import Svamp

            return Svamp(settings)
        case tasks.ArcSettings():
            from bridge.tasks.arc import Arc

            return Arc(settings)
        case tasks.MnliSettings():
            from bridge.tasks.nli import Mnli

            return Mnli(settings)
        case tasks.SnliSettings():
            from bridge.tasks.nli import Snli

            return Snli(settings)
        case tasks.RaceSettings():
            from bridge.tasks.race import Race

            return Race(settings)
        case tasks.OwnTask():
            from bridge.tasks.own import load

            return load(settings)


def resolve_task(settings: TaskSettings) -> TaskSettings:
    """The settings with everything in them that a job needs and that only this machine knows: where the data or the
    user's file lie, as an absolute path, and their digest. Raises UserError if they are not there."""
    from bridge.config import tasks

    match settings:
        case tasks.FileTask():
            from bridge.tasks.hub import locate

            return locate(settings, load_task(settings))  # type: ignore[return-value, arg-type]
        case tasks.OwnTask():
            from bridge.tasks.own import resolve

            return resolve(settings)
    return settings
