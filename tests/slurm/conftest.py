"""The dev cluster as a fixture, for every test that needs a real Slurm."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "devcluster" / "cluster.sh"
NOT_FINAL = {"PENDING", "RUNNING", "REQUEUED", "COMPLETING", "SUSPENDED"}


@dataclass(frozen=True)
class Cluster:
    """A running dev cluster. `state` is its state folder; SLURM_CONF is already set."""

    state: Path

    def run(self, *command: str | Path) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The dev cluster that is up, which stays up; else one that lives as long as this test session.

    Where it cannot be had (no root, no Debian) the test is skipped with the reason, and fails in CI.
    """
    state = Path(os.environ.get("BRIDGE_DEVCLUSTER") or "/var/lib/bridge-devcluster")
    was_up = (state / "base-port").exists()
    if not was_up and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("several pytest workers cannot share a cluster that one of them stops: make cluster-up first")
    try:
        up = subprocess.run([SCRIPT, "up"], capture_output=True, text=True, check=False)
        if up.returncode == 2 and "CI" not in os.environ:
            pytest.skip(up.stderr.strip())
        assert up.returncode == 0, up.stdout + up.stderr
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(state / "etc" / "slurm.conf"))
            yield Cluster(state)
    finally:
        if not was_up:
            subprocess.run([SCRIPT, "down"], check=False, capture_output=True)
