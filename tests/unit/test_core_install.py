"""The light install, as on a login node: a wheel in an environment of its own, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chain import TINY, write_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bridge-rl` of an environment that holds the core and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "--quiet", ROOT], check=True)
    return folder / "venv/bin/bridge-rl"


def run(core: Path, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BRIDGE"))}
    return subprocess.run(
        [core, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_what_a_login_node_does_needs_no_torch(core: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path, TINY)
    (tmp_path / "rows.jsonl").write_text('{"response": "#### 4", "gold": "4", "kind": "number"}\n', encoding="utf-8")
    for words in (
        ("plan", "tiny.yaml", "--profile", "devcluster", "--scripts"),
        ("status",),
        ("grade", "rows.jsonl", "-o", "graded.jsonl"),
        ("image", "list"),
        ("data", "igsm", "--split", "sft", "--size", "3", "-o", "x.parquet"),
    ):
        done = run(core, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert '"correct": true' in (tmp_path / "graded.jsonl").read_text(encoding="utf-8")


def test_a_local_launch_without_torch_is_refused_before_anything_runs(core: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path, TINY)
    (tmp_path / "mine.yaml").write_text("cluster: local\ncpus: 1\n", encoding="utf-8")
    for words in (("launch", "tiny.yaml"), ("demo",), ("launch", "tiny.yaml", "--profile", "./mine.yaml")):
        done = run(core, *words, cwd=tmp_path)
        assert done.returncode == 2
        assert "has no torch and no transformers" in done.stderr
        assert "with its extra `train`" in done.stderr
        assert not (tmp_path / "runs").exists()
