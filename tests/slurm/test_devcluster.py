"""The dev cluster is a Slurm as a launcher meets it, and harms nothing but itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SCRIPT, Cluster

pytestmark = pytest.mark.slurm

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "n1", "n2")


def pids(state: Path) -> dict[str, int]:
    return {name: int((state / "run" / f"{name}.pid").read_text(encoding="utf-8")) for name in DAEMONS}


def test_two_nodes_serve(cluster: Cluster) -> None:
    rows = cluster.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %t %c %m").splitlines()
    nodes = {name: (state, int(cpus), int(memory)) for name, state, cpus, memory in map(str.split, rows)}
    assert set(nodes) == {"n1", "n2"}
    for state, cpus, memory in nodes.values():
        assert state in {"idle", "mix", "alloc", "comp"}
        assert (cpus, memory) == (4, 8000)


def test_elements_wait_for_their_own_element_only(cluster: Cluster) -> None:
    parent = cluster.submit("sleep $((SLURM_ARRAY_TASK_ID % 2)); [ $SLURM_ARRAY_TASK_ID != 3 ]", "--array=0-4")
    child = cluster.submit("true", "--array=0-4", f"--dependency=aftercorr:{parent}", "--kill-on-invalid-dep=yes")
    elements = [f"{job}_{k}" for job in (parent, child) for k in range(5)]
    states = cluster.settle(*elements)
    assert states.pop(f"{parent}_3") == "FAILED"
    assert states.pop(f"{child}_3") == "CANCELLED"
    assert set(states.values()) == {"COMPLETED"}
    rows = cluster.run("sacct", "-X", "-n", "-P", "-j", f"{parent},{child}", "-o", "jobid,start,end").splitlines()
    times = {job: (start, end) for job, start, end in (row.split("|") for row in rows)}
    for k in (0, 1, 2, 4):
        assert times[f"{child}_{k}"][0] >= times[f"{parent}_{k}"][1]


def test_child_of_a_failed_parent_is_cancelled(cluster: Cluster) -> None:
    parent = cluster.submit("exit 3")
    child = cluster.submit("true", f"--dependency=afterok:{parent}", "--kill-on-invalid-dep=yes")
    assert cluster.settle(parent, child) == {parent: "FAILED", child: "CANCELLED"}


def test_an_array_of_one_is_an_array(cluster: Cluster) -> None:
    job = cluster.submit("true", "--array=7-7")
    assert cluster.settle(f"{job}_7") == {f"{job}_7": "COMPLETED"}


def test_cpus_and_memory_are_allocated(cluster: Cluster) -> None:
    plain = cluster.submit("true")
    wide = cluster.submit("true", "--cpus-per-task=2", "--mem-per-cpu=1500M")
    cluster.settle(plain, wide)
    rows = cluster.run("sacct", "-X", "-n", "-P", "-j", f"{plain},{wide}", "-o", "jobid,alloctres").splitlines()
    allocated = {job: set(tres.split(",")) for job, tres in (row.split("|") for row in rows)}
    assert {"cpu=1", "mem=1000M"} <= allocated[plain]
    assert {"cpu=2", "mem=3000M"} <= allocated[wide]
    for too_much in ("--cpus-per-task=5", "--mem=8001M"):
        refused = subprocess.run(["sbatch", too_much, "--wrap=true"], capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert "not available" in refused.stderr or "can not be satisfied" in refused.stderr


def test_requeue_runs_again_soon(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    again = "scontrol requeue $SLURM_JOB_ID; sleep 60"
    script = f'echo attempt ${{SLURM_RESTART_COUNT:-0}}; [ -n "$SLURM_RESTART_COUNT" ] || {{ {again}; }}'
    job = cluster.submit(script, f"--output={out}", "--open-mode=append")
    assert cluster.settle(job, seconds=40) == {job: "COMPLETED"}
    assert [line for line in out.read_text(encoding="utf-8").splitlines() if "attempt" in line] == [
        "attempt 0",
        "attempt 1",
    ]
    assert "REQUEUED" in cluster.run("sacct", "-D", "-X", "-n", "-j", job, "-o", "state")


def test_a_signal_reaches_the_batch_script_and_the_step(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    step = "trap 'echo step' USR1; echo ready; while :; do sleep 0.1; done"
    job = cluster.submit(
        f'trap "echo batch" USR1; srun sh -c "{step}" & while :; do wait; done', f"--output={out}", "--time=5"
    )
    await_text(out, "ready")
    cluster.run("scancel", "--signal=USR1", "--full", job)
    await_text(out, "step")
    await_text(out, "batch")
    cluster.run("scancel", job)
    assert cluster.settle(job) == {job: "CANCELLED"}


def await_text(path: Path, text: str) -> None:
    end = time.monotonic() + 30
    while not (path.exists() and text in path.read_text(encoding="utf-8")):
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.1)


def test_an_unprivileged_user_can_run_jobs(cluster: Cluster) -> None:
    as_user = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
    job = cluster.run(*as_user, "sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--wrap=srun true")
    assert cluster.settle(job) == {job: "COMPLETED"}
    user = cluster.run(*as_user, "id", "-un")
    assert cluster.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "user") == user


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    job = cluster.submit("sleep 300")
    try:
        before = pids(cluster.state)
        assert "already up" in cluster.run(SCRIPT, "up")
        assert pids(cluster.state) == before
        assert cluster.run("squeue", "-h", "-j", job, "-o", "%T") in {"PENDING", "RUNNING"}
    finally:
        cluster.run("scancel", job)


@pytest.fixture
def own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for a second cluster, which these tests may break."""
    if os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("only root can start a cluster")
    base = Path(tempfile.mkdtemp(prefix="devcluster-", dir="/tmp"))
    base.chmod(0o755)  # other users' jobs pass through
    monkeypatch.setenv("BRIDGE_DEVCLUSTER", str(base / "state"))
    monkeypatch.setenv("SLURM_CONF", str(base / "state" / "etc" / "slurm.conf"))
    yield base / "state"
    subprocess.run([SCRIPT, "down"], check=False)
    shutil.rmtree(base)


def processes_of(state: Path) -> list[str]:
    """Command lines of what runs from this state folder, and of what its jobs left behind."""
    mine = f"{state}/".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if mine in command or (mine in environment and b"SLURMD_NODENAME=" in environment):
            found.append(command.replace(b"\0", b" ").decode())
    return found


@pytest.mark.slow
def test_life_of_a_cluster(cluster: Cluster, own_state: Path) -> None:
    first_pids = pids(cluster.state)

    # Two at once: one starts it, the other finds it.
    ups = [subprocess.Popen([SCRIPT, "up"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [up.communicate(timeout=120)[0] for up in ups]
    assert [up.returncode for up in ups] == [0, 0]
    assert sorted("already up" in output for output in outputs) == [False, True]

    # A job that will not end, with a child that left its session.
    second = Cluster(own_state)
    job = second.submit("trap '' TERM; setsid sleep 4000 & while :; do sleep 1; done")
    for _ in range(100):
        if second.run("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING":
            break
        time.sleep(0.1)
    time.sleep(6)  # slurmctld writes its state at most every 5 s; a younger job is forgotten when it is killed

    # Crashed daemons come back, and the job does not notice.
    before = pids(own_state)
    for name in ("slurmctld", "mariadbd"):
        os.kill(before[name], signal.SIGKILL)
    second.run(SCRIPT, "up")
    after = pids(own_state)
    assert {name for name in DAEMONS if after[name] != before[name]} == {"slurmctld", "mariadbd"}
    assert second.run("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING"

    # Down without a controller that could cancel the job, and with a pid file that names a stranger, as after a reboot.
    for name in ("slurmctld", "n2"):
        os.kill(after[name], signal.SIGKILL)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (own_state / "run" / "n2.pid").write_text(f"{stranger.pid}\n", encoding="utf-8")
        assert len(processes_of(own_state)) >= 6  # four daemons, the script, its child
        second.run(SCRIPT, "down")
        assert processes_of(own_state) == []
        assert not own_state.exists()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert "already down" in second.run(SCRIPT, "down")
    assert pids(cluster.state) == first_pids
    assert (
        "already up"
        in subprocess.run(
            [SCRIPT, "up"],
            env=os.environ | {"BRIDGE_DEVCLUSTER": str(cluster.state)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.parametrize(
    "folder", ["/", "/tmp", "relative/folder", "/tmp/with space", "/tmp/" + "x" * 70, str(SCRIPT.parent)]
)
def test_a_folder_that_cannot_be_ours_is_refused(folder: str) -> None:
    for action in ("up", "down"):
        done = subprocess.run(
            [SCRIPT, action],
            env=os.environ | {"BRIDGE_DEVCLUSTER": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "BRIDGE_DEVCLUSTER" in done.stderr
