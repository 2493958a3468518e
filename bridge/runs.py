"""A run: one launch of an experiment. A directory with a write-once record, and everything that came of it.

RUNS/NAME-ID/
  run.json            the record: experiment, graph, code, versions, profile
  experiment.yaml     the file as it was given
  code/               the code that the jobs import, and uncommitted.diff
  stages/STAGE/N/     artifacts; stages/STAGE/.N.work/ while one is being made
  scripts/            what was submitted
  logs/STAGE/         N.ATTEMPT.log from the stage, JOB.host.log from the scheduler's side
  attempts/STAGE/     N.jsonl: start and end of each attempt
  jobs.jsonl          what was submitted and cancelled
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.artifacts import is_sealed
from bridge.config.words import nearest
from bridge.errors import UserError
from bridge.graph import Edge, External

if TYPE_CHECKING:
    from bridge.config.profile import Profile

RECORD = "run.json"
FORMAT = 1
LOCK_PATIENCE = 0.5  # seconds; `locked` holds a lock for an instant too

Json = dict[str, Any]


class BusyError(UserError):
    """Another process holds a lock of the run."""


@dataclass(frozen=True)
class RunElement:
    """One element as the record holds it."""

    stage: str
    index: int
    kind: str
    output: str
    label: str
    settings: Json
    task: Json
    inputs: Mapping[str, Edge | External]
    fingerprint: str

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.index}"

    @property
    def parents(self) -> tuple[Edge, ...]:
        return tuple(source for source in self.inputs.values() if isinstance(source, Edge))


class Run:
    """An existing run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def record(self) -> Json:
        """run.json."""
        try:
            value: Json = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{self.folder}: is no run: it has no {RECORD}") from None
        except ValueError:
            raise UserError(f"{self.folder / RECORD}: is damaged: not valid JSON") from None
        if not isinstance(value, dict) or not {"format", "stages", "profile", "created"} <= set(value):
            raise UserError(f"{self.folder / RECORD}: is damaged: no record of a run")
        if value["format"] != FORMAT:
            raise UserError(f"{self.folder}: was made by another version of bridge-rl (format {value['format']})")
        return value

    @property
    def id(self) -> str:
        return self.folder.name

    @cached_property
    def elements(self) -> dict[Edge, RunElement]:
        """Every element, stages in the order of the graph."""
        return {Edge(e.stage, e.index): e for e in read_elements(self.record["stages"])}

    def parents(self) -> dict[str, tuple[tuple[Edge, ...], ...]]:
        """The edges, as `graph.arrays` wants them."""
        edges: dict[str, tuple[tuple[Edge, ...], ...]] = {}
        for key, element in self.elements.items():
            edges[key.stage] = (*edges.get(key.stage, ()), element.parents)
        return edges

    def find(self, text: str) -> list[RunElement]:
        """The elements that `STAGE` or `STAGE/ELEMENT` names."""
        stage, slash, number = text.partition("/")
        chosen = [e for e in self.elements.values() if e.stage == stage]
        if not chosen:
            raise UserError(f"{self.id}: there is no stage {stage!r}{nearest(stage, {e.stage for e in self.elements})}")
        if slash:
            chosen = [e for e in chosen if str(e.index) == number]
            if not chosen:
                raise UserError(f"{self.id}: the stage {stage!r} has no element {number!r}")
        return chosen

    def artifact(self, key: Edge) -> Path:
        return self.folder / "stages" / key.stage / str(key.element)

    def work(self, key: Edge) -> Path:
        return self.folder / "stages" / key.stage / f".{key.element}.work"

    def log(self, key: Edge, attempt: int) -> Path:
        return self.folder / "logs" / key.stage / f"{key.element}.{attempt}.log"

    def node_logs(self, key: Edge, attempt: int) -> dict[int, Path]:
        """What the nodes of an element printed, other than the first: the node's number → its log, in order."""
        log = self.log(key, attempt)
        paths = log.parent.glob(f"{log.stem}.node[0-9]*.log")
        found = {int(path.stem.rpartition(".node")[2]): path for path in paths}
        return dict(sorted(found.items()))

    def host_log(self, key: Edge, job: str) -> Path:
        """What the scheduler's side of a job printed."""
        return self.folder / "logs" / key.stage / f"{job}.host.log"

    def sealed(self) -> frozenset[Edge]:
        """The elements whose artifact is there, by their seals."""
        return frozenset(key for key, e in self.elements.items() if is_sealed(self.artifact(key), e.fingerprint))

    def attempts(self, key: Edge) -> list[Json]:
        """Start and end lines of each attempt, oldest first."""
        lines = read_lines(self.folder / "attempts" / key.stage / f"{key.element}.jsonl")
        return [line for line in lines if isinstance(line.get("attempt"), int)]

    def note_attempt(self, key: Edge, line: Json) -> None:
        append_line(self.folder / "attempts" / key.stage / f"{key.element}.jsonl", line)

    def progress(self, key: Edge) -> Json:
        """What a running stage last said of its progress; empty when it has said nothing."""
        try:
            value = json.loads((self.work(key) / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def submissions(self) -> list[Json]:
        """What was launched, submitted and cancelled, oldest first."""
        return [line for line in read_lines(self.folder / "jobs.jsonl") if "event" in line]

    def note_submission(self, line: Json) -> None:
        append_line(self.folder / "jobs.jsonl", line)

    def profile(self) -> Profile:
        """The profile of the last launch."""
        from bridge.config.profile import Profile

        value = self.record["profile"]
        for line in self.submissions():
            value = line.get("profile", value)
        return Profile.model_validate(value, strict=False)

    @contextmanager
    def lock(self, name: str, doing: str, *, wait: bool = False) -> Iterator[None]:
        """Hold one of the run's locks. BusyError when another process keeps it, unless `wait` is set."""
        path = self.folder / "locks" / name
        deadline = time.monotonic() + LOCK_PATIENCE
        with open_for_append(path) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        what = f"another process is {doing} this run right now"
                        raise BusyError(f"{self.id}: {what}; try again later") from None
                    time.sleep(0.02)
            yield

    def locked(self, name: str) -> bool:
        """Whether some process holds a lock of this run."""
        path = self.folder / "locks" / name
        if not path.exists():
            return False
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            return False


def read_elements(stages: Sequence[Json]) -> Iterator[RunElement]:
    """The elements of a record's `stages`."""
    for stage in stages:
        for index, item in enumerate(stage["elements"]):
            inputs = {
                field: Edge(source["stage"], source["element"]) if "stage" in source else External(source["path"])
                for field, source in item["inputs"].items()
            }
            facts = (item["label"], item["settings"], item["task"], inputs, item["fingerprint"])
            yield RunElement(stage["name"], index, stage["kind"], stage["output"], *facts)


def open_for_append(path: Path) -> Any:
    """A file opened for appending, or UserError with the reason."""
    try:
        return path.open("ab")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def append_line(path: Path, line: Json) -> None:
    """Add one JSON line; a torn line of a killed writer is closed first. UserError when it cannot be written."""
    data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def read_lines(path: Path) -> list[Json]:
    """The JSON lines of a file; a torn last line is left out, a missing file is empty."""
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


# ---- where runs lie


def runs_folder(given: Path | None) -> Path:
    """`--runs`, else $BRIDGE_RUNS, else `runs/` here; absolute."""
    return user_path(str(given or os.environ.get("BRIDGE_RUNS") or "runs")).resolve()


def user_path(text: str) -> Path:
    """A path as a user gives it; UserError when it cannot be one."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{text[:80]!r} is no usable path: {error}") from None
    return path


def open_run(text: str, runs: Path) -> Run:
    """The run that a user names: a path, an id, or the beginning of an id that only one run has."""
    if not text.strip():
        raise UserError("no run is named; `bridge-rl runs` lists them")
    path = user_path(text)
    if (path / RECORD).is_file():
        return Run(path.resolve())
    known = [p.parent.name for p in sorted(runs.glob(f"*/{RECORD}"))]
    matching = [name for name in known if name == text] or [name for name in known if name.startswith(text)]
    if len(matching) == 1:
        return Run(runs / matching[0])
    if matching:
        raise UserError(f"{text!r} fits several runs in {runs}: {', '.join(matching)}")
    raise UserError(f"there is no run {text!r} in {runs}{nearest(text, known)}")


def all_runs(runs: Path) -> list[Run]:
    """Every run in a folder, oldest first."""
    return [Run(path.parent) for path in sorted(runs.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)]
