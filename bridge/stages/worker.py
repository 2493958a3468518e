"""`python -m bridge.stages.worker`: one of the processes that work on an element together. Only torchrun starts it.

What to do comes from the store that the runner of node 0 keeps open, and how it ended goes there: torchrun itself knows
only success and failure. Exit codes: 0 done, or stopped early and saved; LOST another process ended; else it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.config.stages import STAGE_KINDS
from bridge.config.tasks import parse_task
from bridge.errors import UserError, WorkFailedError
from bridge.stages.job import SIGNALS, Job, StopEarlyError, StopFlag

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

JOB, WORD = "bridge/job", "bridge/word"
"""Keys of the store: what is to be done, and how it ended. The first word counts: what fails later fails of that."""

LOOK_EVERY = timedelta(seconds=2)  # between two looks at whether the runner of this node is there

LOST = 3
"""Exit code of a worker that had to end because another one did."""


def pack(job: Job) -> dict[str, Any]:
    """A job as JSON values, without its stop flag."""
    return {
        "label": job.label,
        "settings": job.settings.model_dump(mode="json"),
        "task": job.task.model_dump(mode="json"),
        "inputs": {field: str(path) for field, path in job.inputs.items()},
        "out": str(job.out),
        "scratch": str(job.scratch),
        "threads": job.threads,
    }


def unpack(facts: Mapping[str, Any], stop: StopFlag) -> Job:
    """The job that `pack` took apart."""
    return Job(
        label=facts["label"],
        settings=STAGE_KINDS[facts["settings"]["kind"]].model_validate(facts["settings"], strict=False),
        task=parse_task(facts["task"], strict=False),
        inputs={field: Path(path) for field, path in facts["inputs"].items()},
        out=Path(facts["out"]),
        scratch=Path(facts["scratch"]),
        threads=facts["threads"],
        stop=stop,
    )


def main() -> int:
    """Work; the exit code."""
    stop = StopFlag()
    stop.listen()
    store = _connect()
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # torchrun.py held them back until somebody listens
    facts = json.loads(store.get(JOB))["job"]
    job = unpack(facts, stop)

    from bridge.train.parallel import LostContactError, join

    rank = int(os.environ["RANK"])
    word: dict[str, Any]
    if stop.requested:  # nothing has begun, so there is nothing to agree on with the others
        store.compare_set(WORD, "", json.dumps({"halted": "asked to stop before the work began"}))
        return 0
    try:
        join()
        word = {"summary": importlib.import_module(f"bridge.stages.{facts['settings']['kind']}").run(job)}
    except StopEarlyError as error:
        word = {"stopped": str(error)}
    except LostContactError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        return LOST
    except (UserError, WorkFailedError) as error:
        word = {"failed": str(error)}
    except Exception as error:  # whatever went wrong is put on record and shown
        traceback.print_exc()
        word = {"failed": f"{type(error).__name__}: {error}"}
    if rank == 0 or "failed" in word:
        store.compare_set(WORD, "", json.dumps(word))
    return 1 if "failed" in word else 0


def _connect() -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _end_with_the_runner() -> None:
    """Leave no worker behind when the runner of node 0 or the one that started it has ended.

    Nobody would take the result, and another attempt may begin.
    """
    from torch.distributed import DistStoreError

    runner = os.getppid()
    try:
        store = _connect()
        while os.getppid() == runner:
            with suppress(DistStoreError):  # time to look again; a store that is gone raises another error, at once
                store.wait(["bridge/never"], LOOK_EVERY)
    finally:
        os._exit(LOST)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written; taking torch and its threads down in order can end in an abort
