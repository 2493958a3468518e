"""A profile: how one cluster, or this machine, is used. One YAML file in `slurm/`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from bridge.config.base import Settings, matching
from bridge.config.stages import MEMORY, Positive, Resources

GPU_OPTION = r"--[a-z][a-z-]*=[A-Za-z0-9_.:,=-]*\{gpus\}[A-Za-z0-9_.:,=-]*"
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
MAX_ATTEMPTS, QUIET, MAX_ARRAY = 20, "30m", 1001
Runtime = Literal["apptainer", "singularity", "pyxis", "charliecloud", "none"]
PLACE = r"/[^\n\r\0:,\\]*"  # a colon and a comma have a meaning for every runtime

# sbatch options that the launcher sets itself, or that a setting stands for.
OURS = (
    "array", "a", "job-name", "J", "output", "o", "error", "e", "dependency", "d", "export", "export-file", "requeue",
    "no-requeue", "wait", "W", "parsable", "chdir", "D", "signal", "kill-on-invalid-dep", "hold", "H", "open-mode",
    "wrap", "nodes", "N", "ntasks", "n", "ntasks-per-node", "cpus-per-task", "c", "mem", "mem-per-cpu", "mem-per-gpu",
    "time", "t", "partition", "p", "account", "A", "qos", "q", "constraint", "C", "exclusive", "test-only", "quiet",
    "Q",
)  # fmt: skip


def _not_ours(value: str) -> str:
    found = re.fullmatch(r"--([a-z][a-z-]*)(=.*)?|-([A-Za-z])(.*)", value)
    if found is None:
        raise ValueError(f"must be one sbatch option, such as --mail-type=FAIL, but it is {value!r}")
    if (found[1] or found[3]) in OURS:
        raise ValueError(f"{value!r}: bridge-rl sets this itself, from its own settings (docs/settings.md)")
    return value


Variable = Annotated[str, AfterValidator(matching(NAME, "a variable's name"))]
Line = Annotated[str, AfterValidator(matching(r"[^\n\r\0]+", "one line"))]


class Allocation(Resources):
    """Resources and where to take them."""

    partition: Line | None = None
    """Partition to submit to, or several with commas."""
    account: Line | None = None
    """Account to charge."""
    qos: Line | None = None
    """Quality of service."""
    constraint: Line | None = None
    """Node features that are needed, such as `a100&nvlink`."""
    exclusive: bool | None = None
    """Whole nodes, whatever the element asks for."""
    gpu_option: Annotated[str, AfterValidator(matching(GPU_OPTION, "an option with {gpus} in it"))] | None = None
    """How this cluster wants GPUs to be asked for; `{gpus}` is their number on each node. Default:
    `--gres=gpu:{gpus}`. Others: `--gres=gpu:a100:{gpus}`, `--gpus-per-node={gpus}`."""
    sbatch: list[Annotated[Line, AfterValidator(_not_ours)]] = []
    """Further sbatch options, one each, such as `--mail-type=FAIL`."""
    setup: list[Line] = []
    """Shell lines that run on the node before the stage, such as `module load cuda/12.4`."""
    env: dict[Variable, str] = {}
    """Environment variables of the stage."""
    scratch: Line | None = None
    """A folder on the node's own disk: each job gets a folder below it as TMPDIR, removed when the job ends."""
    runtime: Runtime | None = None
    """slurm: what starts the experiment's `image`. `none`: nothing does, and stages run in the environment of
    `python`, whatever the experiment says."""
    binds: list[
        Annotated[str, AfterValidator(matching(f"{PLACE}(:{PLACE})?(:r[ow])?", "like /data, or /data:/mnt:ro"))]
    ] = []
    """Folders of the node that stages in an image see too: `/data`, `/data:ro`, `/data:/inside:ro`. The run's own
    folder and the experiment's inputs are always there."""


class Profile(Settings):
    """How jobs are run."""

    cluster: Literal["local", "slurm"]
    """`local`: submitit's local executor on this machine; of the resources it heeds `cpus`, `gpus` and `time`.
    `slurm`: submitit's Slurm executor."""
    cpus: Positive | None = None
    """local: cores used at once by all elements together. Default: all."""
    python: Line | None = None
    """The Python that runs the jobs outside of images. Default: the one that launches."""
    images: dict[str, Line] = {}
    """Name of an image → where this cluster has it: a SIF, a folder (charliecloud), a .sqsh file or an address with a
    digest (pyxis). Default: the file that `bridge-rl image build` or `pull` made."""
    stage_image: bool = False
    """Copy the image to `scratch` before use, once for each node."""
    env: dict[Variable, str] = {}
    """Environment variables of every job. On Slurm a job has these, `secrets`, and what the site's `/etc/profile` sets
    on the node; nothing else of the launching shell, and nothing of `~/.bashrc`. Local jobs get all of the shell."""
    secrets: list[Variable] = []
    """slurm: names of variables of the launching shell that jobs get too, such as `WANDB_API_KEY` and `HF_TOKEN`. Their
    values are in no script, record or log; Slurm keeps them with the job."""
    secrets_file: Annotated[str, AfterValidator(matching(r"/[^\n\r\0]+", "an absolute path"))] | None = None
    """slurm: the absolute path of a file with lines NAME=VALUE that only you can read (mode 0600); each job reads it
    when it starts."""
    setup: list[Line] = []
    """slurm: shell lines that run before every stage, such as `module load cuda/12.4`."""
    slurm_conf: str | None = None
    """slurm: the cluster's slurm.conf, when it is not where Slurm looks by itself."""
    max_array: Positive | None = None
    """slurm: the cluster's MaxArraySize; longer arrays are split. Default: what the cluster says at the launch; `plan`,
    which asks no cluster, then takes Slurm's usual 1001."""
    throttle: Positive | None = None
    """slurm: how many elements of one array may run at once."""
    warn: Annotated[int, Field(ge=0)] = 120
    """slurm: seconds before the time limit at which a stage is told to save and stop."""
    defaults: Allocation = Allocation()
    """For every kind of stage."""
    stages: dict[str, Allocation] = {}
    """For one kind of stage, on top of the defaults. The experiment's own `resources` win over both."""

    @model_validator(mode="after")
    def _secrets_stay_secret(self) -> Profile:
        levels = [("env", self.env), ("defaults.env", self.defaults.env)]
        levels += [(f"stages.{kind}.env", level.env) for kind, level in self.stages.items()]
        for where, env in levels:
            if both := sorted(set(env) & set(self.secrets)):
                raise ValueError(f"{where} gives {both[0]}, one of the secrets: its value would stand in scripts")
        return self


def allocation(profile: Profile, kind: str, resources: Resources) -> Allocation:
    """What one element gets: the profile's defaults, then its lines for this kind, then the experiment's.

    A later single value replaces an earlier one, and a memory setting replaces any other of the three; lists are
    joined, and variables are added.
    """
    merged: dict[str, Any] = {"env": {}, "setup": [], "sbatch": [], "binds": []}
    for level in (profile.defaults, profile.stages.get(kind, Allocation()), resources):
        given = level.model_dump(exclude_defaults=True)
        if any(name in given for name in MEMORY):
            merged = {key: value for key, value in merged.items() if key not in MEMORY}
        for name, value in given.items():
            if name == "env":
                merged[name] = merged[name] | value
            elif name in ("setup", "sbatch", "binds"):
                merged[name] = merged[name] + value
            else:
                merged[name] = value
    defaults: dict[str, Any] = {"max_attempts": MAX_ATTEMPTS, "quiet": QUIET}
    return Allocation(**(defaults | merged))


def processes(kind: str, need: Resources) -> int:
    """How many processes of a stage train together on each node."""
    return need.processes or (max(need.gpus or 0, 1) if kind == "sft" else 1)
