"""What SFT and RL share around their steps: resume, learning rate, log, save, stop."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.config.stages import OptimizerSettings
from bridge.errors import WorkFailedError
from bridge.progress import Meter, progress
from bridge.train import checkpoint
from bridge.train.journal import Journal
from bridge.train.parallel import together
from bridge.train.schedules import learning_rate

FORMAT = 1
SHOWN = ("loss", "reward")  # beside the progress bar


class Training:
    """The state of a training run and its loop.

        training = Training(...); training.resume()
        for step in training.steps(stop):     # saves every `save_every` steps and when `stop()` says so
            loss, norm = training.update(losses)
            training.record({"loss": loss, ...})
        if training.step < training.total: ...  # stopped early, saved

    A step is what the stage calls a step; it may hold several optimizer updates (`updates` of them). Where several
    processes train together, each calls the same methods, and rank 0 alone writes. A checkpoint that is `wanted` is
    not deleted when newer ones come.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        total: int,
        journal: Journal,
        folder: Path,
        updates: int = 1,
        wanted: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.model, self.settings, self.total = model, settings, total
        self.journal, self.folder = journal, folder
        self.group = together()
        self.step = 0
        """Steps that are done."""
        self._updates, self._in_step, self._wanted = updates, 0, wanted
        self._window: dict[str, list[float]] = {}
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        s = self.settings
        done = self.step * self._updates + self._in_step
        return learning_rate(done, self.total * self._updates, s.lr, s.schedule, s.warmup, s.min_lr)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; forget what was logged after it."""
        state = self._newest()
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self._window = state["step"], state["window"]
            rngs = [state["rng"], *state.get("rng_of_other_ranks", [])]
            if self.group.rank < len(rngs):
                self._set_rng(rngs[self.group.rank])
        self.journal.rewind(self.step)

    def _newest(self) -> dict[str, Any] | None:
        """The state to go on from. Rank 0 chooses: it also deletes damaged files, which others must not read."""
        state = checkpoint.latest(self.folder) if self.group.leads else None
        step = self.group.lead(lambda: None if state is None else int(state["step"]))
        if step is None or self.group.leads:
            return state
        path = checkpoint.step_file(self.folder, step)
        state = checkpoint.read_checkpoint(path)
        if state is None:
            raise WorkFailedError(f"{path}: rank 0 can read it, but {socket.gethostname()} cannot")
        return state

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on. `cursor` is the position in the stream of rows."""
        s = self.settings
        rng, *others = self.group.gather(self._rng())
        return {
            "format": FORMAT,
            "step": self.step,
            "cursor": {"step": self.step, "seed": s.seed},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {"schedule": s.schedule, "step": self.step, "total": self.total, "lr": self.lr},
            "rng": rng,
            "window": self._window,
        } | ({"rng_of_other_ranks": others} if others else {})

    def steps(self, stop: Callable[[], bool], label: str, unit: str = "steps") -> Iterator[int]:
        """The numbers of the steps to do, from 0. Ends early, with a checkpoint, once `stop()` is true."""
        saved = self.step
        silent = nullcontext(Meter(label, self.total, unit))
        with progress(label, self.total, unit, done=self.step) if self.group.leads else silent as meter:
            while self.step < self.total:
                if self.group.any(stop()):  # all or none: a process that went on would wait for the others in vain
                    if self.step > saved:
                        self._save()
                    return
                self._in_step = 0
                started = time.monotonic()
                yield self.step
                self.step += 1
                self.record({"seconds": time.monotonic() - started})
                meter.advance(1, **{name: self._window[name][-1] for name in SHOWN if name in self._window})
                if self.step % self.settings.log_every == 0 or self.step == self.total:
                    self._write_line()
                if any(
                    every and self.step % every == 0 for every in (self.settings.save_every, self.settings.keep_every)
                ):
                    self._save()
                    saved = self.step

    def _save(self) -> None:
        state = self.state()
        if self.group.leads:
            checkpoint.save_step(self.folder, self.step, state, self._wanted)

    def update(self, losses: Iterable[Tensor]) -> tuple[float, float]:
        """One optimizer update from the losses of its micro-batches, whose sum is the loss of the update.

        Where several processes train together these are the micro-batches of this one, and the sum is over all of
        them. Returns that loss and the norm of the gradient before clipping. Raises WorkFailedError when the norm is
        not finite: the weights would be lost.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        total = self.group.sum(total)
        self.group.add_gradients(self.model.parameters())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip))
        if not math.isfinite(norm):
            raise WorkFailedError(f"step {self.step + 1}: the gradient is not finite (loss {total}); lower lr")
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self._in_step += 1
        return total, norm

    def record(self, values: Mapping[str, float]) -> None:
        """Note values of the present step. Lines of metrics.jsonl hold their means since the line before."""
        for name, value in values.items():
            self._window.setdefault(name, []).append(float(value))

    def finish(self, path: Path) -> None:
        """Write the final checkpoint."""
        state = self.state()
        if self.group.leads:
            checkpoint.write_checkpoint(path, state)

    def _write_line(self) -> None:
        line = {name: sum(values) / len(values) for name, values in self._window.items()}
        line["tokens_per_second"] = line.get("tokens", 0.0) / max(line["seconds"], 1e-9)
        self.journal.metrics(self.step, line)
        self._window = {}

    def _rng(self) -> dict[str, Any]:
        cuda = [torch.cuda.get_rng_state(gpu) for gpu in self.group.gpus]
        return {"torch": torch.get_rng_state(), "cuda": cuda}

    def _set_rng(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        for gpu, own in zip(self.group.gpus, state["cuda"], strict=False):
            torch.cuda.set_rng_state(own, gpu)
