"""Doctor against the real cluster: what is right is found right, what is wrong is found with its remedy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chain import bridge, command, tree
from conftest import Cluster
from launching import patient

pytestmark = pytest.mark.slurm

CHECKS = {
    "slurm commands", "slurm controller", "accounting", "partitions", "time", "warning", "gpus", "sbatch",
    "array limit", "a node", "runs folder on the node", "file locks on the node", "python of the jobs", "torch",
}  # fmt: skip


def write_profile(folder: Path, text: str, conf: Path | None = None) -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"cluster: slurm\nslurm_conf: {conf or os.environ['SLURM_CONF']}\n{text}", encoding="utf-8")
    return path


def examine(profile: str | Path, runs: Path, seconds: float = 300) -> dict[str, list[dict[str, object]]]:
    """The checks by name; some have several."""
    found: dict[str, list[dict[str, object]]] = {}
    words = ("doctor", "--profile", profile, "--json")
    for check in patient(lambda: bridge(*words, runs=runs, check=None).stdout, seconds):
        found.setdefault(check["name"], []).append(check)
    return found


def wrong(found: dict[str, list[dict[str, object]]], name: str) -> list[str]:
    """What was found wrong under a name, each with its remedy."""
    assert all(check["remedy"] for check in found[name] if not check["ok"])
    return [f"{check['found']} → {check['remedy']}" for check in found[name] if not check["ok"]]


def test_the_shipped_profile_fits_and_nothing_is_left(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from inside a job, whose variables would make a step of the probe and a wrong request of the rest."""
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "9000", "SBATCH_PARTITION": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    before = tree(tmp_path)
    found = examine("devcluster", tmp_path / "runs")
    assert {name for name, checks in found.items() if all(c["ok"] for c in checks)} >= CHECKS, found
    assert str(found["a node"][0]["found"]).startswith(("n1", "n2"))
    assert tree(tmp_path) == before
    assert "bridge-doctor" not in cluster.run("squeue", "-h", "-o", "%j")


def test_a_profile_with_everything_wrong(cluster: Cluster, tmp_path: Path) -> None:
    text = """\
python: /no/python
max_array: 5000
secrets: [DOCTOR_TOKEN]
defaults: {partition: short, time: 4m, mem: 1G, scratch: /no/scratch}
stages:
  data: {time: 1m}
  sft: {partition: debugg, gpus: 2}
  rl: {partition: debug, gpus: 2, gpu_option: '--gres=gpu:a100:{gpus}', constraint: 'a100&nvlink'}
  eval: {partition: debug, cpus: 100}
"""
    found = examine(write_profile(tmp_path, text), tmp_path)
    assert wrong(found, "partitions") == [
        "sft: there is no partition 'debugg'; did you mean 'debug'? → change `stages.sft.partition`"
    ]
    assert [line[:55] for line in wrong(found, "time")] == [
        "data: the limit is 1m00s, and a stage is told to stop 120 s before it"[:55],
        "init, convert: 4m is longer than 2m00s, the limit of the partition"[:55],
    ]
    (gpus,) = wrong(found, "gpus")
    assert gpus.startswith(
        "rl: no node of its partition has gpu:a100:2; there is no gpu at all → change `stages.rl.gpus`"
    )
    assert len(wrong(found, "constraint")) == 2
    refused = {line.partition(":")[0]: line for line in wrong(found, "sbatch")}
    assert set(refused) == {"sft", "rl", "eval"}
    assert "Requested node configuration is not available → no node has so many `cpus`" in refused["eval"]
    limit = cluster.run("scontrol", "show", "config").partition("MaxArraySize")[2].split()[1]
    assert wrong(found, "array limit") == [f"MaxArraySize {limit} → set `max_array: {limit}` in the profile"]
    assert wrong(found, "secrets") == ["secrets: DOCTOR_TOKEN is not set in this shell → export it, then launch"]
    assert "/no/scratch" in wrong(found, "scratch")[0]
    (python,) = wrong(found, "python of the jobs")
    assert "/no/python: No such file or directory → set `python`" in python


def test_secrets_setup_and_scratch_that_work(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_TOKEN", "hunter2")
    (tmp_path / "secrets").write_text("OTHER=hunter2\n", encoding="utf-8")
    text = f"secrets: [DOCTOR_TOKEN]\nsecrets_file: {tmp_path}/secrets\nsetup: ['echo noise; echo @lock unseen']\n"
    profile = write_profile(tmp_path, text + f"defaults: {{scratch: {tmp_path}, mem_per_cpu: 500M}}\n")
    (tmp_path / "secrets").chmod(0o640)
    assert "chmod 600" in wrong(examine(profile, tmp_path), "secrets")[0]
    (tmp_path / "secrets").chmod(0o600)
    found = examine(profile, tmp_path)
    assert all(check["ok"] for checks in found.values() for check in checks) and "hunter2" not in str(found)
    assert {"secrets on the node", "scratch"} <= set(found)


@pytest.fixture
def closed(cluster: Cluster) -> Iterator[str]:
    """A partition that starts nothing, beside those that others use."""
    cluster.run("scontrol", "create", "PartitionName=closed", "Nodes=n1", "State=DOWN")
    yield "closed"
    cluster.run("scontrol", "delete", "PartitionName=closed")


def test_no_node_is_free(cluster: Cluster, tmp_path: Path, closed: str) -> None:
    """The probe gives up after 15 seconds, says what it does not know, and takes its job with it."""
    (tmp_path / "no.sif").write_bytes(b"")
    text = f"images: {{train: {tmp_path}/no.sif}}\ndefaults: {{partition: {closed}, runtime: apptainer}}\n"
    found = examine(write_profile(tmp_path, text), tmp_path, seconds=0)
    assert "the partition closed is down" in wrong(found, "partitions")[0]
    (node,) = found["a node"]
    assert node["ok"] and "could not be tried" in str(node["found"]) and "is not known" in str(node["remedy"])
    assert "python of the jobs" not in found
    (image,) = found["image train"]
    assert image["ok"] and str(image["found"]).startswith("could not be tried: Partition in DOWN state")
    assert "bridge-doctor" not in cluster.run("squeue", "-h", "-o", "%j")


def test_a_runs_folder_that_the_nodes_do_not_see(cluster: Cluster, tmp_path: Path) -> None:
    """A file system that is mounted for this process alone, as a local disk of a login node is."""
    (tmp_path / "own").mkdir()
    words = " ".join(command("doctor", "--profile", "devcluster", "--json", "--runs", tmp_path / "own"))
    inner = f"mount -t tmpfs tmpfs {tmp_path}/own || exit 99; exec {words}"

    def ask() -> str:
        done = subprocess.run(["unshare", "-m", "bash", "-c", inner], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) and "CI" not in os.environ:
            pytest.skip(f"no mounts of one's own here: {done.stderr}")
        return done.stdout

    found = {check["name"]: check for check in patient(ask)}
    assert found["runs folder"]["ok"] and not found["runs folder on the node"]["ok"]
    assert "BRIDGE_RUNS" in found["runs folder on the node"]["remedy"]


def test_a_controller_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    conf = Path(os.environ["SLURM_CONF"]).read_text(encoding="utf-8").splitlines()
    dead = [f"{line.split('=')[0]}=1" if line.startswith("SlurmctldPort=") else line for line in conf]
    (tmp_path / "dead.conf").write_text("\n".join(dead), encoding="utf-8")
    for name, said in (("dead.conf", "Unable to contact slurm controller"), ("none.conf", "does not exist")):
        found = examine(write_profile(tmp_path, "", tmp_path / name), tmp_path)
        assert said in wrong(found, "slurm controller")[0] and "`slurm_conf`" in wrong(found, "slurm controller")[0]
        assert "partitions" not in found


def test_a_cluster_without_accounting(cluster: Cluster, tmp_path: Path) -> None:
    conf = Path(os.environ["SLURM_CONF"]).read_text(encoding="utf-8").splitlines()
    kept = [line for line in conf if not line.startswith("AccountingStorage")]
    (tmp_path / "none.conf").write_text("\n".join(kept), encoding="utf-8")
    found = examine(write_profile(tmp_path, "", tmp_path / "none.conf"), tmp_path)
    (accounting,) = wrong(found, "accounting")
    assert "disabled" in accounting and "everything works without it" in accounting and "MinJobAge" in accounting
    assert found["sbatch"][0]["ok"]
