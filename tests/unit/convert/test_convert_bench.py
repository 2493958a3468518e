"""The benchmark of conversion runs and would notice a wrong tensor; no time is judged here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parents[3] / "bench" / "convert.py"


def test_the_plain_file_is_timed_and_compared(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--size", "1", "--rounds", "1"]
    done = subprocess.run([*command, "--cold", "--only", "plain"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["cold"] and line["peers"].startswith("not run")
    job = line["jobs"]["plain bf16 to bf16"]
    assert job["failed"] == {}
    assert all(job[tool]["equal"] and job[tool]["anonymous_mb"] > 1 for tool in ("ours", "ours-work", "naive"))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_or_missing_tensor_is_noticed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_convert", SCRIPT)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    true = {name: bench.digest(tensor.numpy()) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    assert bench.wrong(tmp_path, true) is None
    save_file({"a": tensors["a"]}, path)
    assert bench.wrong(tmp_path, true) == "1 tensors are missing"
    tensors["a"][1, 2] = -5.0
    save_file(tensors, path)
    assert bench.wrong(tmp_path, true) == "a differs"
