"""Several processes for one element, on one or more nodes, through torch's own launcher (torchrun's agent).

Each node has one runner, and each runner starts the workers of its node. The runner of node 0 opens a store on a port
that the system picks, and keeps it for the whole attempt: no two jobs can have the same, and nothing else listens on a
port that was chosen beforehand. Its address reaches the other nodes through a file in the work folder. The workers meet
through this store too. When the runner of node 0 ends, for whatever reason, the store is gone, and everybody leaves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from bridge.errors import WorkFailedError
from bridge.stages.job import SIGNALS, Job, StopEarlyError, StopFlag
from bridge.stages.worker import JOB, LOST, WORD, pack

PLACE = "store.json"  # in the work folder: where the store of this attempt is
PATIENCE = 600.0  # seconds that node 0 waits for the other nodes
POLL = 0.2  # seconds between two looks at the store
LAST_WORDS = 5.0  # seconds that the reason has to come to light once a worker has lost contact
LOST_CONTACT = "a process or a node ended without a word, and the others lost contact with it"


class Shape(NamedTuple):
    """How the processes lie on the nodes."""

    nodes: int
    node: int
    """Which of them this is."""
    processes: int
    """On each node."""


class Team:
    """The workers of this node, and the store that all nodes share."""

    def __init__(self, store: TCPStore, shape: Shape, work: Path, stop: StopFlag) -> None:
        self.store, self.shape, self.work, self.stop = store, shape, work, stop

    def run(self, job: Job, log: Path) -> dict[str, Any]:
        """At node 0: have all workers run the job's stage; its summary.

        Args:
            job: what to do.
            log: this node's log; those of the others lie beside it.

        Raises:
            StopEarlyError: the stage was asked to stop, and has saved.
            WorkFailedError: a worker failed, with its reason, or a node did not come.
        """
        self._gather()
        self.store.set(JOB, json.dumps({"job": pack(job), "log": str(log)}))
        failed = self._work()
        word = self._word() or {"failed": failed or "the workers ended without a word"}
        if "summary" in word:
            summary: dict[str, Any] = word["summary"]
            return summary
        if "failed" in word:
            raise WorkFailedError(word["failed"])
        raise StopEarlyError(word["stopped"] if "stopped" in word else word["halted"])

    def follow(self, redirect: Callable[[Path], None]) -> None:
        """At another node: run its workers, and stay until node 0's runner has ended, which knows how it went."""
        self.store.set(_arrival(self.shape.node), "")
        try:
            while not self.store.check([JOB]):
                time.sleep(POLL)
            log = Path(json.loads(self.store.get(JOB))["log"])
            redirect(log.with_suffix(f".node{self.shape.node}.log"))
            try:
                failed = self._work()
                if failed not in (None, LOST_CONTACT):
                    self._say({"failed": failed})
            except StopEarlyError as error:
                self._say({"halted": str(error)})
            while self.store.check([JOB]):
                time.sleep(POLL)
        except DistNetworkError:
            pass

    def _gather(self) -> None:
        others = [_arrival(node) for node in range(1, self.shape.nodes)]
        deadline = time.monotonic() + PATIENCE
        while others and not (self.stop.requested or self.store.check(others)):
            if time.monotonic() > deadline:
                raise WorkFailedError(f"not all of {self.shape.nodes} nodes started within {PATIENCE:.0f} s")
            time.sleep(POLL)
        if self.stop.requested:
            raise StopEarlyError("asked to stop before the workers began")

    def _work(self) -> str | None:
        """Start the workers of this node and wait for their end; what went wrong here, or None."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=self.shape.processes,
            rdzv_handler=_Meeting(self.store, self.shape),
            entrypoint=sys.executable,
            args=("-u", "-m", "bridge.stages.worker"),
            max_restarts=0,
        )
        agent = _Agent(spec, self)
        try:
            result = agent.run()
        except SignalException as error:
            raise StopEarlyError(f"{error.sigval.name} came while the workers began; they were ended") from None
        return _reason(agent.failed) if result.is_failed() else None

    def _word(self) -> dict[str, Any] | None:
        """What has been said of the end."""
        word: dict[str, Any] | None = json.loads(self.store.get(WORD)) if self.store.check([WORD]) else None
        return word

    def _say(self, word: dict[str, str]) -> None:
        self.store.compare_set(WORD, "", json.dumps(word))

    def broken(self) -> bool:
        """Whether the work cannot succeed any more, whatever the workers of this node do."""
        try:
            return not {"failed", "halted"}.isdisjoint(self._word() or {})
        except DistNetworkError:
            return True


def lead(nodes: int, processes: int, work: Path, stop: StopFlag) -> Team:
    """At node 0: open the store of this attempt, and tell the other nodes where it is."""
    host = _address() if nodes > 1 else "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    if nodes > 1:
        place, temporary = work / PLACE, work / f"{PLACE}.tmp"
        temporary.write_text(json.dumps({"host": host, "port": store.port, "attempt": _attempt()}), encoding="utf-8")
        temporary.replace(place)
    return Team(store, Shape(nodes, 0, processes), work, stop)


def follow(
    shape: Shape, work: Path, stop: StopFlag, over: Callable[[], bool], redirect: Callable[[Path], None]
) -> None:
    """At another node: wait for node 0's store, then work until node 0's runner ends. Never says how it went.

    Args:
        shape: which node this is.
        work: the work folder of the element, where node 0 leaves the address.
        stop: whether to give up waiting.
        over: whether there is nothing to do any more.
        redirect: sends what this process prints to a log.
    """
    place = None
    while place is None:
        if stop.requested or over():
            return
        time.sleep(POLL)
        place = _read(work / PLACE)
    try:
        store = TCPStore(place["host"], place["port"], is_master=False, timeout=timedelta(seconds=PATIENCE))
    except (DistNetworkError, DistStoreError):  # node 0 has ended already
        return
    Team(store, shape, work, stop).follow(redirect)
    for number in SIGNALS:  # node 0 has left, and srun may now end what is left of the step, this process included
        signal.signal(number, signal.SIG_IGN)


def _read(path: Path) -> dict[str, Any] | None:
    """The address of this attempt's store; that of an earlier attempt does not count."""
    try:
        place: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return place if place["attempt"] == _attempt() else None


def _attempt() -> str:
    """The same on all nodes of one attempt, and at no other time."""
    return ".".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))


def _address() -> str:
    """This machine's address as the node sees it that started the step; names of nodes do not resolve everywhere."""
    starter = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    family, kind, protocol, _, target = socket.getaddrinfo(starter, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the system only picks the address to send from
        return str(probe.getsockname()[0])


def _reason(codes: Mapping[int, int]) -> str:
    """Why the work failed, by the exit codes of this node's ranks that failed by themselves."""
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for rank, code in codes.items():
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"rank {rank} on {here} was ended by {signal.Signals(-code).name}{hint}"
    for rank, code in codes.items():
        if code != LOST:
            return f"rank {rank} on {here} ended with exit code {code}; the log says why"
    return LOST_CONTACT


def _arrival(node: int) -> str:
    return f"bridge/node/{node}"


class _Meeting(RendezvousHandler):
    """Who is who is known from Slurm, so nothing is negotiated: node k is the k-th, and its ranks follow in order."""

    def __init__(self, store: TCPStore, shape: Shape) -> None:
        self._store, self._shape = store, shape

    def get_backend(self) -> str:
        return "bridge"

    @property
    def use_agent_store(self) -> bool:
        return True  # the workers meet in this store; otherwise they would need a port of their own

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(self._store, self._shape.node, self._shape.nodes, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "bridge"

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """torch's agent, which starts the workers and watches them, with our answers to signals and to failures.

    Its own answer to TERM is to end the workers, and it does not know USR2; this one passes on the wish to stop. When
    a worker fails, its own answer is TERM and half a minute of patience, for which our workers have no use; and one
    that only lost contact with another is no reason.
    """

    def __init__(self, spec: WorkerSpec, team: Team) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(team.work / "torchrun")))
        self._team = team
        self._told = False
        self._lost: float | None = None
        self.failed: dict[int, int] = {}
        """Rank → exit code of the workers that failed by themselves."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A signal would kill a worker that does not listen yet. The workers inherit that signals are held back, and
        # let them through once they listen.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            self._team.stop.listen()  # the agent has put its own handlers there
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _exit_barrier(self) -> None:
        """Nobody waits here for the agents of other nodes, one of which may be gone: the store outlives them all."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        codes = {worker_group.workers[local].global_rank: handler.proc.poll() for local, handler in handlers.items()}
        self.failed = {rank: code for rank, code in codes.items() if code}
        if self.failed and self._lost is None:
            self._lost = time.monotonic()
        known = any(code != LOST for code in self.failed.values()) or self._team.broken()
        if known or (self._lost is not None and time.monotonic() - self._lost > LAST_WORDS):
            for handler in handlers.values():
                if handler.proc.poll() is None:
                    handler.close(signal.SIGKILL)
                    with suppress(TimeoutExpired):
                        handler.proc.wait(LAST_WORDS)
            return RunResult(state=WorkerState.FAILED)
        if self._team.stop.requested and not self._told:
            self._told = True
            for handler in handlers.values():
                handler.proc.send_signal(signal.SIGUSR2)
        if all(code == 0 for code in codes.values()):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        return RunResult(state=WorkerState.HEALTHY)
