"""A whole experiment that is as small as it can be, and the command line to run it with. Shared by several tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TINY = """\
name: tiny
model: {init: {tokenizer: train_data, hidden: 32, layers: 2, heads: 2, kv_heads: 1, ffn: 64}}
task:
  name: igsm
  ops: [2, 4]
  literals: [1, 9]
  max_answer: 21
  bound: all
  negative: false
  depth: [2, 2]
  width: [2, 3]
  max_instances: 5
  distractors: 1
  ecosystems: [museum]
  names: 4
  split_by: numbers
  style: {wording: fixed, letters: sequential, frame: plain}
stages:
  train_data: {kind: data, split: sft, size: 200, tokenizer: true}
  rl_data: {kind: data, split: rl, size: 100}
  test_data: {kind: data, split: test, size: 20}
  sft:
    kind: sft
    model: $model
    data: train_data
    steps: 24
    batch: 16
    micro_batch: 8
    lr: 3e-3
    schedule: cosine
    warmup: 5
    save_every: 4
    samples_every: 12
    log_every: 1
    resources: {cpus: 1}
  rl:
    kind: rl
    model: sft
    data: rl_data
    steps: 4
    prompts: 4
    group: 4
    lr: 1e-4
    max_new_tokens: 64
    save_every: 2
    samples_every: 2
    log_every: 1
    resources: {cpus: 1}
  eval: {kind: eval, model: [$model, sft, rl], data: test_data, samples: 8, max_new_tokens: 64}
"""

# The same up to the model that SFT makes. Most of a test's time goes into processes that import torch: it has two.
TRAINED = (
    TINY.partition("  rl:\n")[0]
    .replace("  rl_data: {kind: data, split: rl, size: 100}\n", "")
    .replace("  test_data: {kind: data, split: test, size: 20}\n", "")
    + "  convert_sft: {kind: convert, checkpoint: sft}\n"
)


def write_tiny(folder: Path, text: str = TINY) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "bridge", *map(str, words)]


def bridge(
    *words: object, runs: Path, check: int | None = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `bridge-rl` and return what it printed; its exit code must be `check` (None: any)."""
    environment = {**os.environ, "BRIDGE_RUNS": str(runs)}
    done = subprocess.run(
        command(*words), capture_output=True, text=True, env=environment, cwd=cwd, timeout=600, check=False
    )
    if check is not None:
        assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def bridge_json(*words: object, runs: Path, check: int | None = 0) -> Any:
    """The same with `--json`: standard output must be one JSON value and nothing else."""
    return json.loads(bridge(*words, "--json", runs=runs, check=check).stdout)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
