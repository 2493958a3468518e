"""The sbatch script: golden text, valid bash, and values that no shell may read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bridge.config.profile import Allocation, Profile, allocation
from bridge.config.stages import Resources
from bridge.graph import After, Array
from bridge.launch.script import minutes, sbatch_script
from bridge.launch.submit import dependency

GOLDEN = Path(__file__).with_name("golden.sbatch")
ARRAY = Array("sft", "sft", (0, 1, 2), (After("aftercorr", "base"), After("afterok", "train")))


def script(profile: Profile | None = None, need: Allocation | None = None, python: str = "/opt/venv/bin/python") -> str:
    profile = profile or Profile(cluster="slurm", slurm_conf="/etc/slurm/slurm.conf", throttle=8)
    return sbatch_script("demo-0123abcd", ARRAY, need or Allocation(cpus=2, mem="3G", time="30m"), profile, python)


def test_golden() -> None:
    """To accept a wanted change, write the new text into tests/unit/golden.sbatch."""
    assert script().splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_bash_accepts_it() -> None:
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True)


@pytest.mark.parametrize(
    "evil", ["a b", "'; echo evil; '", '"$(echo evil)"', "`echo evil`", "\\", "ü%j", "$HOME", "a\nb"]
)
def test_hostile_values_stay_values(evil: str) -> None:
    text = script(Profile(cluster="slurm", env={"VALUE": evil}), python="/bin/echo")
    line = text[text.index("export VALUE=") : text.index("export PYTHONPATH")]
    shown = subprocess.run(["bash", "-c", line + 'printf %s "$VALUE"'], capture_output=True, check=True)
    assert shown.stdout.decode() == evil


def test_a_python_in_a_folder_with_a_space() -> None:
    assert "'/my venv/bin/python' -u -m submitit.core._submit" in script(python="/my venv/bin/python")


@pytest.mark.parametrize(("text", "whole"), [("12h", 720), ("90m", 90), ("1h30m", 90), ("61s", 2), ("1s", 1)])
def test_limits_in_minutes_are_rounded_up(text: str, whole: int) -> None:
    assert minutes(text) == whole


def test_the_experiments_resources_win_over_the_profile() -> None:
    profile = Profile(
        cluster="slurm",
        defaults=Allocation(cpus=1, partition="short", time="1h"),
        stages={"sft": Allocation(partition="gpu", gpus=1)},
    )
    found = allocation(profile, "sft", Resources(gpus=2))
    assert (found.cpus, found.partition, found.time, found.gpus) == (1, "gpu", "1h", 2)
    assert allocation(profile, "eval", Resources()).gpus is None


def test_dependencies_as_sbatch_wants_them() -> None:
    submitted = {"base": "12", "train": "7"}
    assert dependency(ARRAY.after, submitted) == "aftercorr:12,afterok:7"
    assert dependency([After("afterok", jobs=("3_1", "3_2"))], {}) == "afterok:3_1:3_2"
    assert dependency([], {}) is None
