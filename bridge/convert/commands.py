"""`bridge-rl convert` and `bridge-rl inspect`: what they do beside the conversion itself.

These two are used alone and often, so they import no more than they need: no settings, no tasks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bridge.artifacts import SEAL, open_artifact, pruned, read_seal
from bridge.convert.api import Report, as_user_errors, convert, inspect, parse_size
from bridge.convert.follow import follow
from bridge.convert.plan import check_dtype
from bridge.errors import UserError
from bridge.progress import progress

Json = dict[str, Any]


def convert_file(source: Path, output: Path, dtype: str, base: Path | None, max_shard_size: str) -> Json:
    """`bridge-rl convert`; its report."""
    size = parse_size(max_shard_size)
    with as_user_errors(source):
        if source.is_dir() and (found := read_seal(source)) and pruned(source, found):
            open_artifact(source, found.kind, digests=False)  # says what is missing, and how to get it back
    with progress("convert", 100, "%") as meter:

        def advance(done: int, total: int) -> None:
            meter.advance(int(100 * done / max(total, 1)) - meter.done)

        return convert(source, output, dtype=dtype, base=base, max_shard_size=size, progress=advance).to_json()


def follow_folder(
    source: Path, output: Path, dtype: str, base: Path | None, max_shard_size: str, until: int | None
) -> Json:
    """`bridge-rl convert --follow`; what was converted and what was refused."""
    check_dtype(dtype)
    size = parse_size(max_shard_size)

    def one(step: Path, out: Path) -> Report:
        report = convert(step, out, dtype=dtype, base=base, max_shard_size=size)
        sys.stderr.write(f"{out}: {report.tensors} tensors, {report.bytes:,} bytes of {report.dtype}\n")
        return report

    return follow(source, output, one, until=until).to_json()


def inspect_path(path: Path) -> Json:
    """`bridge-rl inspect`: an artifact by its seal, a model folder by its headers, a checkpoint by its index."""
    with as_user_errors(path):
        found = read_seal(path) if path.is_dir() else None
    facts: Json = {}
    if found is not None:
        facts = {"artifact": found.kind, "made_by": found.made_by, "fingerprint": found.fingerprint}
        facts |= {"summary": dict(found.summary), "files": {n: f["size"] for n, f in found.files.items()}}
        if gone := pruned(path, found):
            return facts | {"pruned": sorted(gone)}
        if found.kind not in ("checkpoint", "model"):
            return facts
    elif os.path.lexists(path / SEAL):
        raise UserError(f"{path}: its {SEAL} cannot be read")
    return facts | inspect(path)
