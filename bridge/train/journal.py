"""What a training run writes down: metrics.jsonl, samples.jsonl and, when asked, W&B."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.config.stages import OptimizerSettings
from bridge.errors import UserError
from bridge.train.parallel import together

Row = Mapping[str, Any]


class Journal:
    """JSON lines, each with its `step`, in a folder; the same to W&B where there is a run.

    A resumed run calls `rewind` first, so that no step appears twice and none is missing.
    """

    def __init__(self, folder: Path, wandb_run: Any = None) -> None:
        self._metrics, self._samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        self._wandb = wandb_run

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`, and a last line that was cut in the middle."""
        for path in (self._metrics, self._samples):
            if path.exists():
                kept = [line for line in path.read_bytes().splitlines(keepends=True) if _belongs(line, step)]
                temporary = path.with_name(path.name + ".tmp")
                temporary.write_bytes(b"".join(kept))
                temporary.replace(path)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl."""
        _append(self._metrics, [{"step": step, **values}])
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Some completions with their rewards: lines of samples.jsonl, and a table in W&B."""
        _append(self._samples, [{"step": step, **row} for row in rows])
        if self._wandb is not None and rows:
            import wandb

            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._wandb.log({"samples": table}, step=step)

    def last(self) -> dict[str, float]:
        """The newest line of metrics.jsonl."""
        line: dict[str, float] = json.loads(self._metrics.read_bytes().splitlines()[-1])
        return line


class _Unwritten(Journal):
    """The journal of all ranks but the first."""

    def rewind(self, step: int) -> None:
        pass

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        pass


@contextmanager
def open_journal(settings: OptimizerSettings, label: str, out: Path, scratch: Path) -> Iterator[Journal]:
    """The journal of a stage, with a W&B run when the settings ask for one. What ranks other than 0 note is dropped.

    The W&B run is offline unless WANDB_MODE says otherwise. Its files go to `out`, so that `wandb sync` works on the
    finished artifact; its id is kept in `scratch`, so that a resumed stage continues the same run. The run is always
    ended: its service process would stay.
    """
    if not together().leads:
        yield _Unwritten(out)
        return
    if settings.wandb is None:
        yield Journal(out)
        return
    try:
        import wandb
    except ImportError as error:
        raise UserError("wandb is set, but the package is not installed; pip install wandb") from error
    id_file = scratch / "wandb-id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = wandb.init(
        project=settings.wandb,
        name=label,
        id=id_file.read_text(encoding="utf-8"),
        resume="allow",
        mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
        dir=out,
        config=settings.model_dump(mode="json"),
    )
    try:
        yield Journal(out, run)
    finally:
        run.finish()
        for path in (out / "wandb").rglob("*"):
            if path.is_symlink():  # to the latest run and to logs elsewhere: an artifact holds plain files only
                path.unlink()


def _append(path: Path, rows: Sequence[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _belongs(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step) and line.endswith(b"\n")
    except (ValueError, KeyError, TypeError):
        return False
