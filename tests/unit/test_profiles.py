"""Every shipped profile is valid, the documented one is complete, and such a cluster can serve it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from chain import bridge, bridge_json, write_tiny

from bridge.config.profile import Allocation, Profile
from bridge.launch import nodes
from bridge.launch.prepare import load_profile

SLURM = Path(__file__).parents[2] / "slurm"
SHIPPED = sorted(path.stem for path in SLURM.glob("*.yaml"))
EXAMPLE = SLURM / "example-a100.yaml"

# What sinfo would print on the cluster that the example describes.
SINFO = """\
cpu*|up|7-00:00:00|1:00:00|mixed|(null)|amd
gpu|up|2-00:00:00|1:00:00|idle|gpu:a100:8(S:0-7)|a100,nvlink
"""


def test_what_is_shipped() -> None:
    assert SHIPPED == ["devcluster", "example-a100", "local"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_makes_a_plan(tmp_path: Path, name: str) -> None:
    experiment = write_tiny(tmp_path)
    assert bridge_json("plan", experiment, "--profile", name, runs=tmp_path)["experiment"] == "tiny"
    if load_profile(name).cluster == "slurm":
        text = bridge("plan", experiment, "--profile", name, "--scripts", runs=tmp_path).stdout
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_example_shows_every_setting() -> None:
    shown = set(re.findall(r"^[ #]*(\w+):", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {*Profile.model_fields, *Allocation.model_fields} <= shown


def test_what_the_example_hides_behind_a_hash_is_valid_too(tmp_path: Path) -> None:
    """Every commented line, one at a time, switched on."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    hidden = [n for n, line in enumerate(lines) if re.match(r" *# \w+: \S", line)]
    assert len(hidden) >= 10
    for number in hidden:
        changed = [re.sub(r"# ", "", line, count=1) if n == number else line for n, line in enumerate(lines)]
        if "mem_per" in lines[number]:
            changed = [line for line in changed if not re.match(r"  mem:", line)]
        (tmp_path / "changed.yaml").write_text("\n".join(changed), encoding="utf-8")
        load_profile(str(tmp_path / "changed.yaml"))


def test_a_cluster_like_that_serves_the_example() -> None:
    profile, there = load_profile("example-a100"), nodes.read_nodes(SINFO)
    for wish in nodes.wishes(profile):
        assert not list(nodes.partition_problems(wish, there))
        assert not list(nodes.time_problems(wish, there, profile.warn))
        assert not list(nodes.gpu_problems(wish, there))
        assert not list(nodes.feature_problems(wish, there))
        assert any(node.gres for node in nodes.chosen(wish.need, there)) == bool(wish.need.gpus)
