"""The dev cluster as a fixture, for every test that needs a real Slurm."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "devcluster" / "cluster.sh"
NOT_FINAL = {"PENDING", "RUNNING", "REQUEUED", "COMPLETING", "SUSPENDED"}


@dataclass(frozen=True)
class Cluster:
    """A running dev cluster. `state` is its state folder; for that of the fixture SLURM_CONF is already set."""

    state: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's programs and cluster.sh mean this cluster."""
        conf = str(self.state / "etc" / "slurm.conf")
        return os.environ | {"BRIDGE_DEVCLUSTER": str(self.state), "SLURM_CONF": conf}

    def ask(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a command that may fail."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=90)

    def run(self, *command: str | Path) -> str:
        """Standard output of a command that must succeed."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def script(self, *arguments: str) -> str:
        """Runs cluster.sh on this cluster: `script("kill", "n1")`."""
        return self.run(SCRIPT, *arguments)

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job or element: the fields of `scontrol show job` that hold no space."""
        return dict(
            word.split("=", 1) for word in self.run("scontrol", "-o", "show", "job", job).split() if "=" in word
        )

    def submit(self, script: str, *options: str) -> str:
        """Submits one line of shell; the job's id. No output file unless an option names one."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")

    def states(self, *jobs: str) -> dict[str, str]:
        """Job or element ("12", "13_0") → its state in accounting, without the "by UID" of a cancelled one.

        A job that has just ended can for two seconds be a provisional row: named "allocation", of user root, one for
        a whole array. Such rows are left out.
        """
        roots = ",".join({job.split("_")[0] for job in jobs})
        rows = self.run("sacct", "-X", "-n", "-P", "-j", roots, "-o", "jobid,jobname,state").splitlines()
        named = (row.split("|") for row in rows)
        return {job: state.split()[0] for job, name, state in named if job in jobs and name != "allocation"}

    def settle(self, *jobs: str, seconds: float = 60) -> dict[str, str]:
        """Waits until accounting holds a final state for each of these jobs or elements ("13_0", not an array's id)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            states = self.states(*jobs)
            if len(states) == len(set(jobs)) and not NOT_FINAL & set(states.values()):
                return states
            time.sleep(0.2)
        raise AssertionError(f"not final after {seconds} s: {states}; queue: {self.run('squeue')}")


def wait_until(happens: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Waits until it is true."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


@contextmanager
def another_cluster(*options: str, prefix: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """A cluster of one's own: for what would disturb the shared one, or to start it with options of `cluster.sh up`.

    `prefix` is a command that runs the command that follows it.
    """
    if os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("only root can start a cluster")
    base = Path(tempfile.mkdtemp(prefix="devcluster-", dir="/tmp"))
    base.chmod(0o755)  # other users' jobs pass through
    made = Cluster(base / "state")
    try:
        made.run(*prefix, SCRIPT, "up", *options)
        yield made
    finally:
        made.ask(SCRIPT, "down")
        shutil.rmtree(base)


@contextmanager
def shared_up(state: Path, users: Path) -> Iterator[None]:
    """The cluster is up while one of the workers of this test session needs it; the first starts it, the last stops it.

    One that was up before stays up. `users` is a file: how many need it, and whether they started it.
    """

    def change(by: int) -> None:
        with users.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            count, ours = (int(word) for word in (file.read() or "0 0").split())
            if by == 1 and count == 0:
                ours = int(not (state / "base-port").exists())
                up = subprocess.run([SCRIPT, "up"], capture_output=True, text=True, check=False)
                if up.returncode == 2 and "CI" not in os.environ:
                    pytest.skip(up.stderr.strip())
                if up.returncode != 0 and ours:
                    subprocess.run([SCRIPT, "down"], check=False, capture_output=True)
                assert up.returncode == 0, up.stdout + up.stderr
            if by == -1 and count == 1 and ours:
                subprocess.run([SCRIPT, "down"], check=False, capture_output=True)
            file.truncate(0)
            file.write(f"{count + by} {ours}")

    change(1)
    try:
        yield
    finally:
        change(-1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The dev cluster that is up, which stays up; else one that lives as long as this test session.

    Where it cannot be had (no root, no Debian) the test is skipped with the reason, and fails in CI.
    """
    state = Path(os.environ.get("BRIDGE_DEVCLUSTER") or "/var/lib/bridge-devcluster")
    base = tmp_path_factory.getbasetemp()
    users = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cluster-users"
    with shared_up(state, users), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(state / "etc" / "slurm.conf"))
        yield Cluster(state)


@pytest.fixture(autouse=True)
def nothing_left_in_the_queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """What a test has submitted from its own folder goes with it, also when it fails."""
    yield
    if "cluster" in request.fixturenames:
        used: Cluster = request.getfixturevalue("cluster")
        rows = [line.split("|", 1) for line in used.ask("squeue", "-h", "-o", "%F|%Z").stdout.splitlines()]
        if left := sorted({job for job, folder in rows if folder.startswith(f"{tmp_path}/")}):
            used.ask("scancel", *left)
