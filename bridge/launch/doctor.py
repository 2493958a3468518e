"""Is this machine, or this cluster, ready? Each check with its remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge.config.profile import Profile
from bridge.errors import UserError, WorkFailedError
from bridge.launch.prepare import load_profile

PACKAGES = ("torch", "transformers", "tokenizers", "submitit", "pyarrow", "safetensors")
FREE_GB = 2.0  # the demo needs far less; training runs far more


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(profile_name: str, runs: Path) -> list[Check]:
    """All checks for a profile; none of them changes anything."""
    profile = load_profile(profile_name)
    checks = [_python(), *_packages(profile.python or sys.executable), _runs_folder(runs), _disk(runs)]
    checks += _slurm(profile) if profile.cluster == "slurm" else [_cores(profile)]
    return checks


def print_checks(checks: list[Check]) -> None:
    """One line per check, and the remedy below what failed."""
    for check in checks:
        sys.stdout.write(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.found}\n")
        if not check.ok:
            sys.stdout.write(f"      → {check.remedy}\n")


def _python() -> Check:
    version = sys.version.split()[0]
    return Check("python", sys.version_info >= (3, 10), version, "install Python 3.10 or newer")


def _packages(python: str) -> Iterator[Check]:
    """What the Python of the jobs has; the one that launches needs no torch."""
    program = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {PACKAGES!r}:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check("python of the jobs", False, f"{python}: {error}", "set `python` in the profile to one that runs")
        return
    yield Check("python of the jobs", True, python)
    for package, version in json.loads(done.stdout).items():
        yield Check(
            package, version is not None, version or "not installed", "install bridge-rl with its extra `train` there"
        )


def _runs_folder(runs: Path) -> Check:
    place = next(p for p in (runs, *runs.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            return Check("runs folder", True, f"{runs} can be written")
    except OSError as error:
        return Check("runs folder", False, f"{runs}: {error.strerror}", "choose another with --runs or BRIDGE_RUNS")


def _disk(runs: Path) -> Check:
    place = next(p for p in (runs, *runs.parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    return Check("disk", free >= FREE_GB, f"{free:.1f} GB free at {place}", "make room, or choose another runs folder")


def _cores(profile: Profile) -> Check:
    return Check("cores", True, f"{profile.cpus or os.cpu_count()} for all elements together")


def _slurm(profile: Profile) -> Iterator[Check]:
    from bridge.launch import slurm

    missing = [name for name in ("sbatch", "srun", "squeue", "scancel", "scontrol") if shutil.which(name) is None]
    yield Check("slurm commands", not missing, f"missing: {missing}" if missing else "found", "run on a login node")
    if missing:
        return
    try:
        slurm.require_slurm(profile, "this one")
        yield Check("slurm controller", True, "answers")
    except UserError as error:
        yield Check("slurm controller", False, str(error), "is slurmctld up? is slurm_conf in the profile right?")
        return
    try:
        slurm.call(profile, ["sacct", "-X", "-n", "-S", "now"])
        yield Check("accounting", True, "answers")
    except WorkFailedError as error:
        yield Check("accounting", False, str(error), "states will come from squeue alone; ask the administrators")
    known = slurm.call(profile, ["sinfo", "-h", "-o", "%R"]).split()
    wanted = {a.partition for a in (profile.defaults, *profile.stages.values()) if a.partition}
    unknown = sorted(wanted - set(known))
    yield Check(
        "partitions",
        not unknown,
        f"{', '.join(known)}",
        f"in the profile, name one of these instead of {', '.join(unknown)}",
    )
    lines = slurm.call(profile, ["scontrol", "show", "config"]).splitlines()
    limit = next((int(line.split("=")[1]) for line in lines if line.startswith("MaxArraySize")), 0)
    right = profile.max_array <= limit
    yield Check("array limit", right, f"MaxArraySize {limit}", f"set max_array: {limit} in the profile")
