"""The launcher beside hand-written sbatch, for the same graph on the same cluster, alternating.

Measures the time from the command to everything being queued, the time between a parent's end and its child's start,
and the scheduler calls that one status of 1,000 elements makes. Prints one JSON line.

Both run `srun python -m …` with the same resources in the same folder, and both may cache bytecode there.

Usage: SLURM_CONF=… python bench/launch.py [rounds] (an idle dev cluster: make cluster-up)
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bridge.graph import Edge
from bridge.runs import Run

EXPERIMENT = """\
name: bench
model: {{init: {{tokenizer: data, hidden: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 64}}}}
task: {{name: igsm, ops: [2, 4], max_instances: 5, split_by: numbers}}
sweep: {{seed: {seeds}}}
stages:
  data: {{kind: data, split: sft, size: 20, tokenizer: true}}
  test: {{kind: data, split: test, size: 2}}
  sft: {{kind: sft, model: $model, data: data, steps: 1, batch: 2, lr: 1e-3, resources: {{cpus: 1}}}}
  eval: {{kind: eval, model: sft, data: test, samples: 1, max_new_tokens: 4}}
"""
# The same graph by hand: stage → the dependency of its array, by the ids of earlier ones.
PLAIN = {
    "data": "",
    "test": "",
    "base": "afterok:{data}",
    "sft": "aftercorr:{base},afterok:{data}",
    "convert_sft": "aftercorr:{sft}",
    "eval": "aftercorr:{convert_sft},afterok:{test}",
}
SCRIPT = """#!/bin/bash
srun --unbuffered {python} -u -m bridge.stages {run} {stage} "$SLURM_ARRAY_TASK_ID"
"""
PROFILE = """\
cluster: slurm
slurm_conf: {conf}
defaults: {{cpus: 1, mem: 3G, time: 30m}}
"""
PAIRS = (("base", "sft"), ("sft", "convert_sft"), ("convert_sft", "eval"))


def launch(experiment: Path, *words: str, runs: Path) -> dict:
    return bridge("launch", experiment, "--profile", experiment.with_name("profile.yaml"), *words, runs=runs)


def bridge(*words: object, runs: Path) -> dict:
    command = [sys.executable, "-m", "bridge", *map(str, words), "--runs", str(runs), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def ours(experiment: Path, runs: Path) -> tuple[Run, float]:
    start = time.perf_counter()
    value = launch(experiment, runs=runs)
    return Run(Path(value["dir"])), time.perf_counter() - start


def by_hand(experiment: Path, runs: Path) -> tuple[Run, float]:
    """Scripts are written beforehand; what is timed is one sbatch per array."""
    run = Run(Path(launch(experiment, "--prepare", runs=runs)["dir"]))
    counts: dict[str, int] = {}
    for key in run.elements:
        counts[key.stage] = counts.get(key.stage, 0) + 1
    for stage in PLAIN:
        text = SCRIPT.format(python=sys.executable, run=run.folder, stage=stage)
        (run.folder / f"{stage}.sh").write_text(text, encoding="utf-8")
        (run.folder / "logs" / stage).mkdir()
    ids: dict[str, str] = {}
    start = time.perf_counter()
    for stage, dependency in PLAIN.items():
        words = ["sbatch", "--parsable", "--mem=3G", "--cpus-per-task=1", "--time=30", f"--chdir={run.folder}/code"]
        words += [f"--array=0-{counts[stage] - 1}", f"--output={run.folder}/logs/{stage}/%A_%a.host.log"]
        words += [f"--dependency={dependency.format(**ids)}"] if dependency else []
        answer = subprocess.run([*words, str(run.folder / f"{stage}.sh")], capture_output=True, text=True, check=True)
        ids[stage] = answer.stdout.strip()
    return run, time.perf_counter() - start


def finish(run: Run) -> list[float]:
    """Wait for the end; seconds from each parent's end to its child's start."""
    deadline = time.monotonic() + 600
    while len(run.sealed()) < len(run.elements):
        if any(line.get("exit") for key in run.elements for line in run.attempts(key)):
            raise SystemExit(f"{run.id}: a stage failed; see `bridge-rl status {run.folder}`")
        if time.monotonic() > deadline:
            raise SystemExit(f"{run.folder}: not done after 600 s")
        time.sleep(0.5)
    idle = []
    for parent, child in PAIRS:
        for index in range(sum(key.stage == child for key in run.elements)):
            ended = run.attempts(Edge(parent, index))[-1]["time"]
            idle.append(run.attempts(Edge(child, index))[0]["time"] - ended)
    return idle


def status_calls(folder: Path) -> dict:
    """Launch 1,002 elements on hold of a dependency that stays, count the Slurm commands of one status, cancel."""
    experiment = folder / "many.yaml"
    experiment.write_text(EXPERIMENT.format(seeds=list(range(250))), encoding="utf-8")
    run = Run(Path(launch(experiment, runs=folder)["dir"]))
    tools = folder / "tools"
    tools.mkdir()
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        script = f'#!/bin/sh\necho {name} >> {folder}/calls\nexec {shutil.which(name)} "$@"\n'
        (tools / name).write_text(script, encoding="utf-8")
        (tools / name).chmod(0o755)
    path, os.environ["PATH"] = os.environ["PATH"], f"{tools}:{os.environ['PATH']}"
    start = time.perf_counter()
    elements = len(bridge("status", run.id, runs=folder)["elements"])
    seconds = time.perf_counter() - start
    os.environ["PATH"] = path
    subprocess.run([sys.executable, "-m", "bridge", "cancel", run.folder], capture_output=True, check=True)
    calls = (folder / "calls").read_text(encoding="utf-8").split()
    return {"elements": elements, "calls": calls, "seconds": round(seconds, 2)}


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # by hand it would reach the jobs, and they would compile each time
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    queued: dict[str, list[float]] = {"ours": [], "by_hand": []}
    idle: dict[str, list[float]] = {"ours": [], "by_hand": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "profile.yaml").write_text(PROFILE.format(conf=os.environ["SLURM_CONF"]), encoding="utf-8")
        experiment = folder / "bench.yaml"
        experiment.write_text(EXPERIMENT.format(seeds=[0, 1, 2]), encoding="utf-8")
        for number in range(rounds):
            for who, start in (("ours", ours), ("by_hand", by_hand)):
                run, seconds = start(experiment, folder / f"{who}{number}")
                queued[who].append(seconds)
                idle[who] += finish(run)
        result = {
            "rounds": rounds,
            "until_all_queued": {who: round(median(values), 3) for who, values in queued.items()},
            "idle_between_stages": {who: round(median(values), 2) for who, values in idle.items()},
            "idle_ratio": round(median(idle["ours"]) / median(idle["by_hand"]), 3),
            "status": status_calls(folder),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
