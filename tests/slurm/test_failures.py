"""What breaks on real clusters: nodes, daemons, memory, disks, logs. The run survives, or says what happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from chain import TRAINED, bridge, command, write_tiny
from conftest import Cluster, another_cluster
from launching import FAST, launch, profile, queue, resume, saved_steps, states, wait_for

from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm

SFT = Edge("sft", 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of these tests alone: they break it."""
    with another_cluster() as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", own.env["SLURM_CONF"])
        yield own


@contextmanager
def without(cluster: Cluster, name: str, verb: str = "kill") -> Iterator[None]:
    """A daemon of the cluster is gone for a while, and comes back."""
    cluster.script(verb, name)
    try:
        yield
    finally:
        cluster.script("start", name)


@pytest.mark.timeout(900)
def test_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    """slurmd is killed: Slurm gives the node up and starts the job elsewhere, while the first training still runs.

    The second attempt waits for the end of the first: the artifact is made once, and sealed once.
    """
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=4000", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    node, job = run.attempts(SFT)[-1]["host"], states(run, tmp_path)["sft/0"]["job"]
    with without(cluster, node):
        waiting = "an earlier attempt is still running somewhere; waiting for its end"
        wait_for(lambda: waiting in run.host_log(SFT, job).read_text(encoding="utf-8"), "the second attempt", 120)
        wait_for(lambda: not queue(cluster, run), "the run to end elsewhere", 600)
    found = states(run, tmp_path)
    assert {e["state"] for e in found.values()} == {"done"}
    sealed = [line for line in run.attempts(SFT) if line.get("exit") == 0]
    assert len(sealed) == 1


def test_the_controller_is_away_while_a_run_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """No state is made up meanwhile, nothing can be submitted twice, and the wait ends when the run does."""
    waiting = subprocess.Popen(
        command("launch", write_tiny(tmp_path, TRAINED), "stages.sft.steps=1000", "-p", profile(tmp_path), "--wait"),
        env={**os.environ, "BRIDGE_RUNS": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: list(tmp_path.glob("tiny-*/attempts/sft/0.jsonl")), "SFT to begin")
    run = Run(next(tmp_path.glob("tiny-*")))
    with without(cluster, "slurmctld", "stop"):
        found = states(run, tmp_path)
        assert found["sft/0"]["state"] in ("unknown", "running")
        assert {e["state"] for e in found.values()} <= {"done", "unknown", "running"}
        assert "the scheduler does not answer" in found["convert_sft/0"]["reason"]
        refused = bridge("resume", run.id, runs=tmp_path, check=2)
        assert "the Slurm controller does not answer" in refused.stderr
        time.sleep(10)  # it asks again every 3 to 6 s by now
        assert waiting.poll() is None
    _, printed = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, printed
    assert {e["state"] for e in states(run, tmp_path).values()} == {"done"}
    assert all(len(run.attempts(key)) == 2 for key in run.elements)  # each element started and ended once


def test_accounting_is_away(cluster: Cluster, tmp_path: Path) -> None:
    """The queue alone says what runs; of a job that was killed meanwhile everything is said that can be known."""
    with without(cluster, "slurmdbd", "stop"):
        run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", runs=tmp_path, wait=False)
        wait_for(lambda: saved_steps(run), "SFT to save")
        assert states(run, tmp_path)["sft/0"]["state"] == "running"
        os.kill(run.attempts(SFT)[-1]["pid"], signal.SIGKILL)
        wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] in ("failed", "unknown"), "the end to be seen", 60)
        wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] == "unknown", "the controller to forget it", 60)
        found = states(run, tmp_path)["sft/0"]
        assert "no longer in the queue" in found["reason"]
        assert "accounting does not answer" in found["reason"]
    wait_for(lambda: "FAILED (exit " in states(run, tmp_path)["sft/0"]["reason"], "accounting to know", 60)
    assert states(run, tmp_path)["convert_sft/0"]["state"] == "blocked"
    wait_for(lambda: not queue(cluster, run), "the children to leave the queue", 60)


def test_a_cluster_without_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chain on a cluster that has none; a killed job is told from one that runs, and resume ends it."""
    with another_cluster("--no-accounting") as bare:
        monkeypatch.setenv("SLURM_CONF", bare.env["SLURM_CONF"])
        run = launch(
            write_tiny(tmp_path), *FAST, "stages.eval.model=[rl]", "stages.sft.steps=100", runs=tmp_path, wait=False
        )
        wait_for(lambda: saved_steps(run), "SFT to save")
        os.kill(run.attempts(SFT)[-1]["pid"], signal.SIGKILL)
        wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] == "failed", "the end to be seen", 60)
        wait_for(lambda: "no longer in the queue" in states(run, tmp_path)["sft/0"]["reason"], "Slurm to forget it", 60)
        reason = states(run, tmp_path)["sft/0"]["reason"]
        assert "killed, or its node was lost" in reason
        assert "its last line: sft/0:" in reason
        assert states(run, tmp_path)["rl/0"]["state"] == "blocked"
        bridge("resume", run.id, "--wait", runs=tmp_path)
        assert {e["state"] for e in states(run, tmp_path).values()} == {"done"}


def test_out_of_memory(cluster: Cluster, tmp_path: Path) -> None:
    """A training that is given far too little memory is failed, with Slurm's own words for it."""
    run = launch(
        write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", "stages.sft.resources.mem=150M", runs=tmp_path, check=1
    )
    found = states(run, tmp_path)
    assert found["sft/0"]["state"] == "failed"
    assert "memory" in found["sft/0"]["reason"].lower()
    assert found["convert_sft/0"]["state"] == "blocked"
    assert "memory" in found["convert_sft/0"]["reason"].lower()


def test_a_missing_log_folder(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm ends such a job with 0:53 and no log at all; the reason says what that means."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=60", runs=tmp_path, wait=False)
    wait_for(lambda: run.attempts(SFT), "SFT to begin")
    shutil.rmtree(run.folder / "logs" / "convert_sft")
    (run.folder / "logs" / "convert_sft").write_text("no folder", encoding="utf-8")
    wait_for(lambda: states(run, tmp_path)["convert_sft/0"]["state"] == "failed", "the convert job to fail", 120)
    assert "can the node write to the run" in states(run, tmp_path)["convert_sft/0"]["reason"]
    wait_for(lambda: "could not write the job's log" in states(run, tmp_path)["convert_sft/0"]["reason"], "0:53", 60)
    wait_for(lambda: not queue(cluster, run), "the children to leave the queue", 60)
    (run.folder / "logs" / "convert_sft").unlink()
    resume(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(cluster: Cluster, tmp_path: Path, small_disk: Path) -> None:
    """The disk of the runs fills up in mid-run: status says so; with room again, resume goes on and ends."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=300", runs=small_disk, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    wait_for(lambda: states(run, small_disk)["sft/0"]["state"] == "failed", "SFT to fail", 120)
    reason = states(run, small_disk)["sft/0"]["reason"]
    assert "No space left on device" in reason or "is full" in reason
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
    filler.unlink()
    resume(run)
    assert {e["state"] for e in states(run, small_disk).values()} == {"done"}


def test_secrets_reach_the_job_and_nothing_else(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by name, one from a file that only its owner can read; neither is in any file of the run, nor in `plan`.

    What else a job has is of Slurm, of the site's profile or ours; a file that a login shell of the user reads counts
    for nothing.
    """
    monkeypatch.setenv("WANDB_API_KEY", "by-name-5ecret")
    monkeypatch.setenv("UNRELATED_TOKEN", "leak-5ecret")
    monkeypatch.setenv("SLURM_UNRELATED", "leak-5ecret")
    monkeypatch.setenv("BASH_FUNC_leak%%", "() { echo leak-5ecret; }")
    secrets = tmp_path / "my 'secrets'"
    secrets.write_text("HF_TOKEN=in-file-5ecret\n", encoding="utf-8")
    out = tmp_path / "seen"
    out.mkdir()
    show = f"env -0 > {out}/$SLURM_JOB_ID"
    mine = profile(tmp_path, secrets=["WANDB_API_KEY"], secrets_file=str(secrets), setup=[show])
    words = (write_tiny(tmp_path, TRAINED), "--profile", mine)
    assert "can be read by others" in bridge("launch", *words, runs=tmp_path / "runs", check=2).stderr
    secrets.chmod(0o600)
    scripts = bridge("plan", *words, "--scripts", runs=tmp_path / "runs").stdout
    run = launch(*words, runs=tmp_path / "runs", wait=False)  # type: ignore[arg-type]
    wait_for(lambda: run.artifact(Edge("train_data", 0)).exists(), "the first stages")
    bridge("cancel", run.id, runs=tmp_path / "runs")
    site = subprocess.run(
        ["env", "-i", "bash", "-c", ". /etc/profile; env -0"], capture_output=True, text=True, check=True
    )
    allowed = {line.partition("=")[0] for line in site.stdout.split("\0")} | {
        "HOME", "USER", "LOGNAME", "SLURM_CONF", "PATH", "LANG", "PYTHONPATH", "BRIDGE_CPUS", "SUBMITIT_EXECUTOR",
        "WANDB_API_KEY", "HF_TOKEN", "TMPDIR", "HOSTNAME", "ENVIRONMENT", "SLURMD_NODENAME",
    }  # fmt: skip
    seen = [dict(line.split("=", 1) for line in path.read_text("utf-8").split("\0") if line) for path in out.iterdir()]
    for job in seen:
        assert (job["WANDB_API_KEY"], job["HF_TOKEN"]) == ("by-name-5ecret", "in-file-5ecret")
        assert "SLURM_UNRELATED" not in job and "SLURM_GET_USER_ENV" not in job
        assert {name for name in job if not name.startswith("SLURM_")} <= allowed
    assert seen
    assert "5ecret" not in scripts
    for path in run.folder.rglob("*"):
        if path.is_file() and path.suffix != ".diff":
            assert b"5ecret" not in path.read_bytes(), path
    monkeypatch.delenv("WANDB_API_KEY")
    refused = bridge("resume", run.id, runs=tmp_path / "runs", check=2)
    assert "secrets: WANDB_API_KEY is not set in this shell" in refused.stderr


def test_status_of_another_users_run(cluster: Cluster, tmp_path: Path) -> None:
    """Jobs are asked for by their numbers, not by who asks: a colleague sees that they run."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    tmp_path.chmod(0o755)
    # Another user, who may read everything: this checkout and its Python may lie in a private folder.
    read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *read, "env", "HOME=/tmp"]
    done = subprocess.run(
        [*user, *command("status", run.folder, "--json")], capture_output=True, text=True, check=False, timeout=60
    )
    bridge("cancel", run.id, runs=tmp_path)
    assert '"state": "running"' in done.stdout
