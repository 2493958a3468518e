"""A sequence computed by several processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def sequence(work: Callable[[int], T], workers: int) -> Iterator[T]:
    """work(0), work(1), … without end, in this order, by `workers` processes (1: by this one).

    Process r of n computes r, r + n, … and waits where its pipe is full, so nothing piles up. `work` and its results
    must be picklable. What `work` raises is raised here. The processes end with the iterator, and with this process,
    however it ends.
    """
    if workers == 1:
        yield from map(work, count())
        return
    # "spawn": a copy of this process (fork) would hold the locks of its other threads for ever.
    context = get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, work, rank, workers), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for index in count():
            try:
                fine, result = pipes[index % workers].recv()
            except EOFError:
                raise RuntimeError("a process that computes rows has died; is the memory limit too low?") from None
            if not fine:
                raise result
            yield result
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _run(pipe: Connection, work: Callable[[int], object], rank: int, workers: int) -> None:
    # Signals for the job reach every process of it; this one ends when nobody reads from it any more.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    try:
        for index in count(rank, workers):
            pipe.send((True, work(index)))
    except BrokenPipeError:
        pass
    except Exception as error:
        pipe.send((False, error))
