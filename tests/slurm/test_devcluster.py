"""The dev cluster is a Slurm as a launcher meets it, and harms nothing but itself."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import SCRIPT, Cluster, another_cluster, wait_until

pytestmark = pytest.mark.slurm

# A step that saves when told to stop, and a script that requeues it then; the second attempt ends at once.
HEEDS = """
trap 'echo batch got TERM' TERM
[ -z "$SLURM_RESTART_COUNT" ] || { echo again; exit 0; }
srun sh -c 'trap "echo step got TERM; exit 75" TERM; echo ready; while :; do sleep 0.2; done'
code=$?
scontrol show job $SLURM_JOB_ID
[ $code != 75 ] || scontrol requeue $SLURM_JOB_ID
exit $code
"""
IGNORES = """
trap 'echo batch got TERM' TERM
srun sh -c 'trap "echo step got TERM" TERM; echo ready; while :; do sleep 0.2; done'
"""
# Half a minute in a step on a node that is lost; the second attempt ends at once.
LOST = '[ -z "$SLURM_RESTART_COUNT" ] || exit 0; srun sleep 300; echo "srun: $?"'

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "n1", "n2")


def pids(state: Path) -> dict[str, int]:
    return {name: int((state / "run" / f"{name}.pid").read_text(encoding="utf-8")) for name in DAEMONS}


@dataclass(frozen=True)
class Broken:
    """A cluster where n1 is being lost and jobs on n2 are being preempted: half a minute of waiting, begun early."""

    cluster: Cluster
    logs: Path  # JOB.log
    heeds: str  # preempted with REQUEUE
    ignores: str  # preempted with CANCEL
    preempts: str
    requeued: str  # on the lost node
    failed: str  # the same with --no-requeue
    child: str  # of `failed`


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of these tests alone: the shared one may be busy with other tests' jobs."""
    with another_cluster() as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", own.env["SLURM_CONF"])
        yield own


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    with another_cluster() as own:
        logs = tmp_path_factory.mktemp("broken")
        options = (f"--output={logs}/%j.log", "--open-mode=append", "--requeue")
        requeued = own.submit(LOST, *options, "--nodelist=n1")
        failed = own.submit(LOST, *options, "--nodelist=n1", "--no-requeue")
        child = own.submit("true", f"--dependency=afterok:{failed}", "--kill-on-invalid-dep=yes")
        half = (*options, "--nodelist=n2", "--cpus-per-task=2")
        heeds = own.submit(HEEDS, *half, "--partition=lowprio")
        ignores = own.submit(IGNORES, *half, "--partition=scavenge")
        for job in (heeds, ignores):
            await_text(logs / f"{job}.log", "ready")
        wait_until(lambda: own.job(requeued)["JobState"] == own.job(failed)["JobState"] == "RUNNING", "jobs on n1")
        own.script("kill", "n1")
        preempts = own.submit("true", "--nodelist=n2", "--cpus-per-task=4")
        yield Broken(own, logs, heeds, ignores, preempts, requeued, failed, child)


def test_a_preempted_job_is_warned_and_can_save(broken: Broken) -> None:
    """The step gets TERM, the script does not; the controller says since when; the script requeues itself."""
    log = broken.logs / f"{broken.heeds}.log"
    await_text(log, "\nagain\n")  # Slurm's own word of the requeue comes only if the script is still there to be told
    first = log.read_text(encoding="utf-8").partition("\nagain\n")[0]
    assert "CANCELLED AT" in first
    assert "step got TERM" in first
    assert "JobState=RUNNING" in first
    assert "PreemptTime=20" in first
    assert "batch got TERM" not in first


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


def await_text(path: Path, text: str, seconds: float = 90) -> None:
    wait_until(lambda: path.exists() and text in path.read_text(encoding="utf-8"), f"{text!r} in {path}", seconds)


def test_more_memory_than_asked_for_is_fatal(cluster: Cluster, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    program = tmp_path / "eat.py"
    program.write_text("import time; eaten = b'x' * 300_000_000; time.sleep(5); print('survived')", encoding="utf-8")
    eat = f"{python} {program}"
    options = ("--mem=200M", f"--output={tmp_path}/%j.log")
    batch, step = cluster.submit(f"exec {eat}", *options), cluster.submit(f"srun {eat}; exit $?", *options)
    fits = cluster.submit(f"srun {eat}", "--mem=400M", f"--output={tmp_path}/%j.log")
    states = cluster.settle(batch, step, fits)
    logs = {job: (tmp_path / f"{job}.log").read_text(encoding="utf-8") for job in (batch, step, fits)}
    assert (states[fits], logs[fits]) == ("COMPLETED", "survived\n")
    assert "survived" not in logs[batch] + logs[step]
    if (cluster.state / "cgroup" / "memory").is_symlink():
        assert states[batch] == "OUT_OF_MEMORY"
        assert states[step] in {"FAILED", "OUT_OF_MEMORY"}  # of the job; Slurm 21.08 and younger ones differ
        assert re.search("oom.kill event", logs[batch])
        assert "Out Of Memory" in logs[step]
        assert "OUT_OF_ME" in cluster.run("sacct", "-n", "-j", f"{step}.0", "-o", "state")
    else:
        assert (states[batch], states[step]) == ("FAILED", "FAILED")
        assert "exceeded memory limit" in logs[batch]
        assert "exceeded memory limit" in logs[step]


def test_jobs_on_two_nodes_reach_each_other(cluster: Cluster, tmp_path: Path) -> None:
    """By the address of the node that started the step, which Slurm tells each of its processes."""
    program = tmp_path / "meet.py"
    program.write_text(
        """
import os, pathlib, socket, time
port, address = pathlib.Path("port"), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
if os.environ["SLURM_PROCID"] == "0":
    server = socket.create_server((address, 0))
    pathlib.Path("port.new").write_text(str(server.getsockname()[1]))
    pathlib.Path("port.new").rename(port)
    server.accept()[0].sendall(os.environ["SLURMD_NODENAME"].encode())
else:
    while not port.exists():
        time.sleep(0.1)
    print(os.environ["SLURMD_NODENAME"], "meets", socket.create_connection((address, int(port.read_text()))).recv(9))
""",
        encoding="utf-8",
    )
    run = f"srun --nodes=2 --ntasks-per-node=1 {shlex.quote(sys.executable)} meet.py"
    job = cluster.submit(run, "--nodes=2", "--time=2", f"--chdir={tmp_path}", "--output=out.txt")
    assert cluster.settle(job) == {job: "COMPLETED"}
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "n2 meets b'n1'\n"


def test_arrays_are_limited_and_ended_jobs_are_soon_forgotten(cluster: Cluster) -> None:
    job = cluster.submit("true")
    whole = cluster.submit("true", "--array=0-100", "--hold")
    cluster.run("scancel", whole)
    for too_much in ("0-101", "101"):
        refused = cluster.ask("sbatch", f"--array={too_much}", "--wrap=true")
        assert "Invalid job array specification" in refused.stderr
    assert cluster.settle(job) == {job: "COMPLETED"}
    wait_until(lambda: "Invalid job id" in cluster.ask("squeue", "--jobs", job).stderr, "squeue to forget the job")
    assert cluster.states(job) == {job: "COMPLETED"}


@pytest.fixture
def as_user() -> Iterator[tuple[str, Path, list[str]]]:
    """An ordinary user, made for the test if we are root: name, a folder of theirs, what runs a command as them."""
    folder = Path(tempfile.mkdtemp(prefix="devcluster-user-", dir="/tmp"))
    name = pwd.getpwuid(os.geteuid()).pw_name
    command: list[str] = []
    try:
        if os.geteuid() == 0:
            name = f"bridge-test-{os.getpid()}"
            shell = ("--shell", "/bin/bash", "--home-dir", folder)
            subprocess.run(["useradd", "--system", "--no-log-init", *shell, name], check=True)
            shutil.chown(folder, name)
            command = ["runuser", "-u", name, "--"]
        yield name, folder, command
    finally:
        if command:  # a job that was cancelled just now may have a process left
            wait_until(lambda: subprocess.run(["userdel", name], check=False).returncode == 0, "the user to be gone")
        shutil.rmtree(folder)


def test_an_ordinary_user_can_run_jobs(cluster: Cluster, as_user: tuple[str, Path, list[str]]) -> None:
    name, folder, command = as_user
    sbatch = (*command, "sbatch", "--parsable", "--export=NIL", f"--chdir={folder}", "--output=%j.txt")
    job = cluster.run(*sbatch, "--wrap=srun --export=ALL id -un; touch made")
    long = cluster.run(*sbatch, "--array=0-1", "--wrap=sleep 300")
    theirs = (*command, "squeue", "--noheader", "--me", "--format=%i %u %T")
    both = {f"{long}_0 {name} RUNNING", f"{long}_1 {name} RUNNING"}
    wait_until(lambda: both <= set(cluster.run(*theirs).splitlines()), "both elements to run")
    cluster.run(*command, "scancel", f"{long}_1")
    cluster.run(*command, "scancel", long)
    states = cluster.settle(job, f"{long}_0", f"{long}_1")
    assert states == {job: "COMPLETED", f"{long}_0": "CANCELLED", f"{long}_1": "CANCELLED"}
    assert cluster.run(*command, "sacct", "-X", "-n", "-P", "-j", job, "-o", "user,state") == f"{name}|COMPLETED"
    assert (folder / f"{job}.txt").read_text(encoding="utf-8") == f"{name}\n"
    assert (folder / "made").owner() == name


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


def test_a_cluster_without_accounting_and_without_cgroups(cluster: Cluster, tmp_path: Path) -> None:
    """It stays what it was made; with the kernel's fence out of its sight, Slurm itself kills what takes too much."""
    refused = cluster.ask(SCRIPT, "up", "--no-accounting")
    assert refused.returncode == 2
    assert "was made with accounting" in refused.stderr

    hide = 'mount -t tmpfs none /sys/fs/cgroup/memory && exec "$@"'
    hidden = (cluster.state / "cgroup" / "memory").is_symlink()
    prefix = ("unshare", "--mount", "sh", "-c", hide, "sh") if hidden else ()
    with another_cluster("--no-accounting", prefix=prefix) as own:
        eat = "import time; eaten = b'x' * 300_000_000; time.sleep(20)"
        command = f"echo ready; exec {shlex.quote(sys.executable)} -c {shlex.quote(eat)}"
        job = own.submit(command, "--mem=200M", f"--output={tmp_path}/out.txt")
        wait_until(lambda: own.job(job)["JobState"] == "FAILED", "the job to be killed")
        assert own.job(job)["ExitCode"] == "0:9"
        await_text(tmp_path / "out.txt", "exceeded memory limit")
        assert "accounting storage is disabled" in own.ask("sacct").stderr
        own.script("kill", "slurmctld")
        assert "slurmctld started" in own.script("up")
        assert not (own.state / "run" / "mariadbd.pid").exists()
        assert (own.state / "cgroup" / "memory").is_symlink() != bool(prefix)


def test_a_preempted_job_that_goes_on_is_killed(broken: Broken) -> None:
    own = broken.cluster
    states = own.settle(broken.ignores, broken.preempts, broken.heeds)
    assert states == {broken.ignores: "PREEMPTED", broken.preempts: "COMPLETED", broken.heeds: "COMPLETED"}
    log = (broken.logs / f"{broken.ignores}.log").read_text(encoding="utf-8")
    warning, due, _ = log.partition("DUE TO PREEMPTION")
    assert "step got TERM" in warning
    assert due
    assert "again" in (broken.logs / f"{broken.heeds}.log").read_text(encoding="utf-8")


def test_a_lost_node_comes_back(broken: Broken) -> None:
    """Its jobs fail or wait to run again, but what they started goes on until a new slurmd ends it."""
    own = broken.cluster

    def attempts(job: str) -> list[str]:
        return own.run("sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", "state").splitlines()

    def n1() -> str:
        return own.run("sinfo", "--noheader", "--nodes=n1", "--partition=debug", "--format=%T")

    wait_until(lambda: n1() == "down*", "n1 to be given up", 80)
    assert own.settle(broken.failed, broken.child) == {broken.failed: "NODE_FAIL", broken.child: "CANCELLED"}
    wait_until(lambda: attempts(broken.requeued) == ["NODE_FAIL", "PENDING"], "the requeue in accounting")
    await_text(broken.logs / f"{broken.failed}.log", "Node failure on n1")
    await_text(broken.logs / f"{broken.failed}.log", "srun: 0")
    assert any("sleep 300" in command for command in processes_of(own.state))
    own.script("start", "n1")
    assert n1() in {"idle", "mixed"}
    assert own.settle(broken.requeued) == {broken.requeued: "COMPLETED"}
    assert not any("sleep 300" in command for command in processes_of(own.state))


def test_daemons_stop_and_start_one_by_one(broken: Broken) -> None:
    own = broken.cluster
    job = own.submit("sleep 4; exit 3")
    wait_until(lambda: own.job(job)["JobState"] == "RUNNING", "the job to start")
    before = pids(own.state)
    own.script("stop", "slurmdbd")
    assert own.ask("sacct").returncode != 0
    for node in ("n1", "n2"):  # a slurmd that comes back in time harms no job
        own.script("kill", node)
        own.script("start", node)
    own.script("stop", "slurmctld")
    assert "is DOWN" in own.ask("scontrol", "ping").stdout
    own.script("start", "slurmctld")
    own.script("start", "slurmdbd")
    own.script("start", "slurmdbd")
    changed = {name for name, pid in pids(own.state).items() if pid != before[name]}
    assert changed == {"slurmctld", "slurmdbd", "n1", "n2"}
    assert own.settle(job) == {job: "FAILED"}
    for action, name in (("stop", "n3"), ("kill", ""), ("start", "../n1")):
        refused = own.ask(SCRIPT, action, name)
        assert refused.returncode == 2
        assert "no daemon" in refused.stderr


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
