"""How a stage is started inside an image: options of srun, and the command of each task. Pure.

Nothing of the host gets in by itself: no home, no variables but those named, no /tmp but the job's own. What only the
node knows stands in the words as RUN (the run's folder), TMP (the job's own folder on the node) and IMAGE.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from bridge.config.profile import Runtime

RUN, TMP, IMAGE = "\0run\0", "\0tmp\0", "\0image\0"  # no path and no variable holds such a thing

PYTHON = "/opt/venv/bin/python"
"""Where the recipes of `containers/` put it."""

KEPT = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "LANG", "LOGNAME", "NVIDIA_VISIBLE_DEVICES", "PYTHONPATH",
    "ROCR_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR", "TZ", "USER",
)  # fmt: skip
"""Variables that every stage gets, beside SLURM_* and BRIDGE_*."""

# Inside, /tmp is the job's own folder: two jobs on a node share no cache, and the paths of sockets stay short.
SET = {
    "HOME": "/tmp/home",
    "TMPDIR": "/tmp",
    "CUDA_HOME": "/usr/local/cuda",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "XDG_CACHE_HOME": "/tmp/cache",
    "CUDA_CACHE_PATH": "/tmp/cache/cuda",
    "HF_DATASETS_CACHE": "/tmp/cache/datasets",
    "MPLCONFIGDIR": "/tmp/cache/matplotlib",
    "NUMBA_CACHE_DIR": "/tmp/cache/numba",
    "OUTLINES_CACHE_DIR": "/tmp/cache/outlines",
    "TORCH_EXTENSIONS_DIR": "/tmp/cache/extensions",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/cache/inductor",
    "TRITON_CACHE_DIR": "/tmp/cache/triton",
    "VLLM_CACHE_ROOT": "/tmp/cache/vllm",
    "VLLM_CONFIG_ROOT": "/tmp/cache/vllm-config",
    "WANDB_CACHE_DIR": "/tmp/cache/wandb",
    "WANDB_CONFIG_DIR": "/tmp/cache/wandb-config",
    "WANDB_DATA_DIR": "/tmp/cache/wandb-data",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""What the variables are inside, unless the profile's `env` says otherwise: not of OURS, which name places inside."""
OURS = ("HOME", "TMPDIR")

SYSTEM_PATH = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """The image that a run uses, as one cluster has it."""

    name: str
    place: str
    """A file, a folder, or an address with a digest."""
    checked: str
    """The file that is compared before each use: the image itself, or in a folder the list of what was installed."""
    sha256: str | None
    """Of that file; None for an address, which holds a digest of its own."""
    binds: Mapping[str, str] = field(default_factory=dict)
    """Of the experiment's inputs, the absolute path inside → the one outside: bound read-only."""


@dataclass(frozen=True)
class Contained:
    """How srun starts a stage in an image. Both are words without any quoting."""

    srun: list[str]
    """Further options of srun."""
    command: list[str]
    """What each task runs."""


def contained(
    runtime: Runtime, image: Image, binds: Sequence[str], names: Sequence[str], gpus: int, command: Sequence[str]
) -> Contained:
    """The command line of a stage in an image.

    Args:
        runtime: what starts it; not `none`.
        image: where it is, and the paths that the experiment needs inside.
        binds: `/data`, `/data:ro` or `/data:/inside:ro`.
        names: variables that the stage gets, beside KEPT, SLURM_* and BRIDGE_*.
        gpus: how many GPUs of the node it uses; 0 for none.
        command: program and arguments inside; the program is a path of the image.
    """
    variables = {"PATH": path_inside(command[0]), **SET}
    fixed = [f"{name}={value}" for name, value in variables.items() if name in OURS or name not in names]
    inside = ["/usr/bin/env", *fixed, *command]
    enter = [
        "bash",
        "bridge/launch/contain.sh",
        ",".join(dict.fromkeys(name for name in [*KEPT, *names] if name not in OURS)),
    ]
    further = [(outside, inside, "ro") for inside, outside in image.binds.items()] + [_parts(bind) for bind in binds]
    further.sort(key=lambda mount: len(PurePosixPath(mount[1]).parts))
    # A later one covers what it is above of: the run may lie below /tmp, and below a folder that is bound read-only.
    mounts = [(TMP, "/tmp", ""), *further, (RUN, RUN, "")]
    triples = [":".join(part for part in mount if part) for mount in mounts]
    if runtime in ("apptainer", "singularity"):
        words = [runtime, "exec", "--cleanenv", "--no-eval", "--no-home", "--no-mount=tmp,cwd", f"--pwd={RUN}/code"]
        words += [f"--bind={triple}" for triple in triples]
        return Contained([], [*enter, *words, *(["--nv"] if gpus else []), IMAGE, *inside])
    if runtime == "charliecloud":  # it binds read-write only, and takes GPUs from `ch-fromhost --nvidia` at build time
        words = ["ch-run", "--write-fake", f"--cd={RUN}/code"]  # else it cannot make the mount points
        words += [f"--bind={source}:{target}" for source, target, _ in mounts]
        return Contained([], [*enter, *words, IMAGE, "--", *inside])
    options = [
        f"--container-image={IMAGE}",
        f"--container-mounts={','.join(triples)}",
        f"--container-workdir={RUN}/code",
    ]
    options += ["--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"]
    return Contained(options, [*enter, *inside])


def path_inside(python: str) -> str:
    """PATH inside: the programs beside its Python first."""
    return f"{PurePosixPath(python).parent}:{SYSTEM_PATH}"


def _parts(bind: str) -> tuple[str, str, str]:
    """`/data:ro` → source, target, mode."""
    source, *rest = bind.split(":")
    mode = rest.pop() if rest and rest[-1] in ("ro", "rw") else ""
    return source, rest[0] if rest else source, mode


def shell(words: Sequence[str]) -> str:
    """Words as bash reads them; RUN, TMP and IMAGE become variables of the script."""
    variables = {RUN: '"$run"', TMP: '"$TMPDIR"', IMAGE: '"$image"'}

    def quoted(word: str) -> str:
        pieces = re.split(f"({RUN}|{TMP}|{IMAGE})", word)
        return "".join(variables.get(piece) or shlex.quote(piece) for piece in pieces if piece) or "''"

    return " ".join(quoted(word) for word in words)
