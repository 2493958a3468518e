"""A profile: how one cluster, or this machine, is used. One YAML file in `slurm/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bridge.config.base import Settings
from bridge.config.stages import Positive, Resources


class Allocation(Resources):
    """Resources and where to take them."""

    partition: str | None = None
    """Partition to submit to."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features that are needed."""
    sbatch: list[str] = []
    """Further sbatch options, one each, such as `--exclusive`."""


class Profile(Settings):
    """How jobs are run."""

    cluster: Literal["local", "slurm"]
    """`local`: submitit's local executor on this machine; of the resources it heeds `cpus`, `gpus` and `time`.
    `slurm`: submitit's Slurm executor."""
    cpus: Positive | None = None
    """local: cores used at once by all elements together. Default: all."""
    python: str | None = None
    """The Python that runs the jobs. Default: the one that launches."""
    env: dict[str, Annotated[str, Field(strict=True)]] = {}
    """Environment variables of every job. Jobs on Slurm get nothing else of the launching shell; local ones get all."""
    setup: list[str] = []
    """slurm: shell lines that run before the stage, such as `module load cuda/12.4`."""
    slurm_conf: str | None = None
    """slurm: the cluster's slurm.conf, when it is not where Slurm looks by itself."""
    max_array: Positive = 1001
    """slurm: the cluster's MaxArraySize; longer arrays are split."""
    throttle: Positive | None = None
    """slurm: how many elements of one array may run at once."""
    warn: Annotated[int, Field(ge=0)] = 120
    """slurm: seconds before the time limit at which a stage is told to save and stop."""
    defaults: Allocation = Allocation()
    """For every kind of stage."""
    stages: dict[str, Allocation] = {}
    """For one kind of stage, on top of the defaults. The experiment's own `resources` win over both."""


def allocation(profile: Profile, kind: str, resources: Resources) -> Allocation:
    """What one element gets: the profile's defaults, then its lines for this kind, then the experiment's."""
    merged = profile.defaults.model_dump(exclude_defaults=True)
    if kind in profile.stages:
        merged |= profile.stages[kind].model_dump(exclude_defaults=True)
    return Allocation(**(merged | resources.model_dump(exclude_defaults=True)))
