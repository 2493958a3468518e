"""The processes that train one model together (data parallel), behind one interface that a single process has too.

Every process holds the whole model and computes its part of each step's rows. The gradients are then added up, so that
the step is the one that a single process makes, up to rounding: losses are divided by the tokens of the whole step, and
nothing is averaged over processes, however few rows one of them has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridge.errors import UserError

T = TypeVar("T")

# How long a process waits for the others in one exchange, such as for rank 0 to write a large checkpoint. A process
# that dies does not need it: its runner ends the others.
PATIENCE = timedelta(hours=1)


class LostContactError(Exception):
    """An exchange with the other processes failed: one of them has ended. Why is for that one to say."""


class Group:
    """One process that trains alone: all rows are its own, and every sum has one term."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes what the training writes: rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def gpus(self) -> list[int]:
        """The GPUs whose generators this process may draw from."""
        return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []

    def seed(self, seed: int) -> int:
        """The seed of this process's generators, such as for dropout: `seed` itself at rank 0."""
        return seed + (self.rank << 32)

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Which of the rows with these lengths are this process's own, as indices."""
        return list(range(len(sizes)))

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether some process says so."""
        return flag

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all processes."""

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` returns at rank 0, for every process; the others wait and do not call it."""
        return work()

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in order."""
        return [value]


class Ranks(Group):
    """One of several processes that torchrun started.

    An explicit sum and not torch's DistributedDataParallel, which averages over processes, must see a backward pass in
    each of them at every step, and wraps the model that stages also sample from. What is given up is that its exchange
    overlaps with the last backward pass.

    Every method but `share` and `seed` is an exchange: all processes have to call the same ones in the same order.

    Raises:
        LostContactError: another process has ended.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def gpus(self) -> list[int]:
        return [torch.cuda.current_device()] if torch.cuda.is_available() else []

    def share(self, sizes: Sequence[int]) -> list[int]:
        return deal(sizes, self.rank, self.size)

    def sum(self, value: float) -> float:
        return float(self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.SUM))

    def any(self, flag: bool) -> bool:
        return bool(self._reduced(torch.tensor(int(flag)), dist.ReduceOp.MAX))

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        # A process without rows has no gradients at all, and a part that no token passes through has none anywhere:
        # such a parameter must stay without one, because the optimizer then leaves it alone.
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        used = self._reduced(torch.tensor([int(p.grad is not None) for p in trained]), dist.ReduceOp.MAX)
        with _contact():
            pending = []
            for parameter, needed in zip(trained, used.tolist(), strict=True):
                if needed:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    pending.append(dist.all_reduce(parameter.grad, async_op=True))
            for exchange in pending:
                exchange.wait()

    def lead(self, work: Callable[[], T]) -> T:
        found = [work() if self.leads else None]
        with _contact():
            dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _contact():
            dist.all_gather_object(found, value)
        return found

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        value = value.to(self.device)
        with _contact():
            dist.all_reduce(value, operation)
        return value


def deal(sizes: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The rows of one rank, by their sizes: dealt out from the longest on, so that all get about as many tokens."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    return order[rank::ranks]


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what gloo and NCCL raise, each in its own words
        raise LostContactError(f"lost contact with the other processes: {error}") from error


def join() -> None:
    """Become one of the processes that torchrun started: NCCL where there are GPUs, one for each process, else gloo.

    Raises:
        UserError: there are fewer GPUs than processes on this node.
        LostContactError: the others did not come.
    """
    if torch.cuda.is_available():
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if torch.cuda.device_count() < here:
            raise UserError(
                f"resources: {here} processes share {torch.cuda.device_count()} GPUs; each needs one of its own: "
                "set gpus, or processes, or hide the GPUs to train on the CPU"
            )
        torch.cuda.set_device(local)
    with _contact():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)


def together() -> Group:
    """The processes that train together: those that have joined, or this one alone."""
    return Ranks() if dist.is_available() and dist.is_initialized() else Group()
