"""Doctor without a cluster: what it makes of sinfo's words, what it asks a node, and the checks of this machine."""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain import bridge, bridge_json, tree

from bridge.config.profile import Profile
from bridge.launch import nodes
from bridge.launch.doctor import probe_script
from bridge.launch.nodes import Nodes, Problem, Wish

# As sinfo prints it: a university cluster with two kinds of GPU nodes, a CPU partition and one that is closed.
SINFO = """\
cpu*|up|2-00:00:00|1:00:00|mixed|(null)|icelake,ib
cpu*|up|2-00:00:00|1:00:00|down*|(null)|skylake
gpu|up|1-00:00:00|n/a|allocated|gpu:a100:8(S:0-1),nvme:1|a100,nvlink
gpu|up|1-00:00:00|n/a|idle~|gpu:v100:4(S:0)|v100
old|up|infinite|n/a|idle|gpu:2|(null)
broken|up|30:00|n/a|drained|(null)|(null)
closed|inact|1:00:00|n/a|idle|(null)|(null)
"""


def wishes(**sft: object) -> list[Wish]:
    profile = {"cluster": "slurm", "defaults": {"time": "1h", "cpus": 2}, "stages": {"sft": sft}}
    return nodes.wishes(Profile.model_validate(profile))


def of_sft(
    problems: Callable[[Wish, list[Nodes]], Iterator[Problem]], text: str = SINFO, **sft: object
) -> list[Problem]:
    found = {wish.kinds: list(problems(wish, nodes.read_nodes(text))) for wish in wishes(**sft)}
    assert not [p for kinds, several in found.items() if "sft" not in kinds for p in several]
    return next(several for kinds, several in found.items() if "sft" in kinds)


def test_what_sinfo_prints_is_understood() -> None:
    found = nodes.read_nodes(SINFO)
    assert [n.alive for n in found] == [True, False, True, True, True, False, True]
    assert [n.default for n in found] == [True, True, False, False, False, False, False]
    assert found[0].limit == 2 * 86400 and found[0].usual == 3600
    assert found[2].gres == {("gpu", "a100"): 8, ("nvme", ""): 1} and found[2].usual == 86400
    assert found[4].gres == {("gpu", ""): 2} and found[4].features == frozenset() and found[4].limit == math.inf
    assert nodes.gpus(found) == "on the nodes: gpu:2, gpu:a100:8, gpu:v100:4, nvme:1"


@pytest.mark.parametrize("state", ["idle*", "mixed*", "down", "drained", "draining", "maint", "inval", "fail", "down~"])
def test_nodes_that_start_no_jobs(state: str) -> None:
    (node,) = nodes.read_nodes(f"cpu|up|1:00:00|n/a|{state}|(null)|(null)")
    assert not node.alive


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2:00", 120), ("1:30:00", 5400), ("7-00:00:00", 604800), ("1-12:00:30", 129630), ("infinite", math.inf),
     ("n/a", math.inf)],
)  # fmt: skip
def test_slurms_times(text: str, seconds: float) -> None:
    assert nodes.clock(text) == seconds


@pytest.mark.parametrize(
    ("option", "wanted"),
    [("--gres=gpu:{gpus}", ("gpu", "")), ("--gres=gpu:a100:{gpus}", ("gpu", "a100")),
     ("--gres=shard:{gpus}", ("shard", "")), ("--gres=nvme:1,gpu:h100:{gpus}", ("gpu", "h100")),
     ("--gpus-per-node={gpus}", ("gpu", "")), ("--gpus-per-node=a100:{gpus}", ("gpu", "a100")),
     ("--gpus={gpus}", ("gpu", ""))],
)  # fmt: skip
def test_what_a_gpu_option_asks_for(option: str, wanted: tuple[str, str]) -> None:
    assert nodes.wanted_gres(option) == wanted


def test_kinds_that_get_the_same_are_asked_for_once() -> None:
    assert [wish.kinds for wish in wishes(gpus=1)] == [("data", "init", "rl", "convert", "eval"), ("sft",)]
    assert len(wishes()) == 1
    (_, sft) = wishes(gpus=1)
    assert (sft.at("gpus"), sft.at("time")) == ("`stages.sft.gpus`", "`defaults.time`")


@pytest.mark.parametrize(
    ("sft", "said", "remedy"),
    [
        ({"partition": "gpuu"}, "there is no partition 'gpuu'; did you mean 'gpu'?", "`stages.sft.partition`"),
        ({"partition": "gpu,zz"}, "there is no partition 'zz'; known: broken, closed, cpu", "`stages.sft.partition`"),
        ({"partition": "closed"}, "the partition closed is inact", "wait, or change `stages.sft.partition`"),
        ({"partition": "broken"}, "no node of broken can run jobs now", "`sinfo -R`"),
    ],
)
def test_partitions_that_cannot_be_used(sft: dict[str, object], said: str, remedy: str) -> None:
    (problem,) = of_sft(nodes.partition_problems, **sft)
    assert problem.found.startswith("sft: ") and said in problem.found and remedy in problem.remedy


def test_no_partition_and_no_default() -> None:
    (problem,) = of_sft(nodes.partition_problems, SINFO.replace("*|up", "|up"))
    assert "no partition is named, and the cluster has no default" in problem.found
    assert problem.remedy == "write `defaults.partition`: one of broken, closed, cpu, gpu, old"


@pytest.mark.parametrize(
    ("sft", "said"),
    [
        ({"partition": "gpu", "time": "2d"}, "2d is longer than 24h00m"),
        ({"partition": "broken", "time": "31m"}, "31m is longer than 30m00s"),
        ({"partition": "cpu", "time": "5m"}, "the limit is 5m00s, and a stage is told to stop 300 s before it"),
        ({"partition": "cpu,gpu", "time": "2d"}, None),  # one of the two is enough
        ({"partition": "old", "time": "90d"}, None),
        ({"partition": "gpu", "time": "1d"}, None),
        ({"partition": "nowhere", "time": "90d"}, None),  # told by another check
    ],
)
def test_times(sft: dict[str, object], said: str | None) -> None:
    found = of_sft(lambda wish, there: nodes.time_problems(wish, there, 300), **sft)
    assert [said in problem.found for problem in found] == ([True] if said else []), found


def test_a_default_time_below_the_warning() -> None:
    """No time in the profile: what the partition gives by itself may be over before the stage has begun."""
    profile = Profile.model_validate({"cluster": "slurm", "defaults": {"partition": "quick"}})
    there = nodes.read_nodes("quick|up|1-00:00:00|2:00|idle|(null)|(null)")
    (problem,) = nodes.time_problems(nodes.wishes(profile)[0], there, 120)
    assert problem.remedy == "raise `defaults.time`, or lower `warn`"


@pytest.mark.parametrize(
    ("sft", "said"),
    [
        ({"partition": "cpu", "gpus": 1}, "no node of its partition has gpu:1; there is no gpu at all"),
        ({"partition": "gpu", "gpus": 9}, "has gpu:9; there is gpu:a100:8, gpu:v100:4"),
        (
            {"partition": "gpu", "gpus": 8, "gpu_option": "--gres=gpu:v100:{gpus}"},
            "has gpu:v100:8; there is gpu:a100:8",
        ),
        ({"partition": "gpu", "gpus": 1, "gpu_option": "--gres=gpu:h100:{gpus}"}, "has gpu:h100:1"),
        ({"partition": "gpu", "gpus": 1, "gpu_option": "--gres=shard:{gpus}"}, "there is no shard at all"),
        ({"partition": "gpu", "gpus": 8}, None),
        ({"partition": "gpu", "gpus": 8, "gpu_option": "--gpus-per-node=a100:{gpus}"}, None),
        ({"partition": "old", "gpus": 2}, None),
        ({"partition": "cpu", "gpus": 0}, None),
    ],
)
def test_gpus(sft: dict[str, object], said: str | None) -> None:
    found = of_sft(nodes.gpu_problems, **sft)
    assert [said in problem.found for problem in found] == ([True] if said else []), found


@pytest.mark.parametrize(
    ("constraint", "unknown"),
    [("a100", []), ("a100&nvlink", []), ("[a100|v100]", []), ("(a100&nvlink)|v100", []), ("a100*2&v100*4", []),
     ("a100&nvlnk", ["nvlnk"]), ("h100|b200", ["h100", "b200"]), ("icelake", ["icelake"])],
)  # fmt: skip
def test_features(constraint: str, unknown: list[str]) -> None:
    found = of_sft(nodes.feature_problems, partition="gpu", constraint=constraint)
    assert [p.found.partition("feature '")[2].partition("'")[0] for p in found] == unknown


# ---- what a node is asked


@pytest.mark.parametrize("name", ["plain", "a b", "it's", "$(touch evil)", "; touch evil;", "{x}%", "ümlaut", "-rf"])
def test_the_script_for_a_node(tmp_path: Path, name: str) -> None:
    """Run here by the real bash, with hostile names of the folder, of values and of the scratch folder."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "from-login").write_text("w0rd", encoding="utf-8")
    profile = Profile.model_validate(
        {
            "cluster": "slurm", "python": sys.executable, "env": {"VALUE": name},
            "secrets_file": str(folder / "from-login"), "defaults": {"scratch": str(folder)},
            "setup": ["echo noise", 'printf "@value %s\\n" "$VALUE"'],
        }
    )  # fmt: skip
    script = probe_script(profile, nodes.wishes(profile)[0], folder, "w0rd")
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    for line in ("@reads yes", "@writes yes", "@scratch yes", "@secrets yes", f"@value {name}", "@lock seen"):
        assert line in seen.stdout.splitlines(), seen.stdout
    assert (folder / "from-node").read_text(encoding="utf-8") == "w0rd"
    assert not (tmp_path / "evil").exists()
    free = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "@lock unseen" in free.stdout


def test_a_node_that_has_nothing(tmp_path: Path) -> None:
    profile = Profile.model_validate(
        {"cluster": "slurm", "python": "/no/python", "defaults": {"scratch": "/no/scratch"}}
    )
    script = probe_script(profile, nodes.wishes(profile)[0], tmp_path / "not-there", "w0rd")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("@")][1:] == []
    assert "/no/python: No such file or directory" in done.stdout.splitlines()[-1]


# ---- this machine, and bad input


def test_this_machine(tmp_path: Path) -> None:
    before = tree(tmp_path)
    checks = {check["name"]: check for check in bridge_json("doctor", runs=tmp_path / "runs")}
    assert all(check["ok"] and not check["remedy"] for check in checks.values()), checks
    assert {"python", "runs folder", "file locks", "disk", "cores", "python of the jobs", "torch"} <= set(checks)
    assert tree(tmp_path) == before


def test_a_python_of_the_jobs_without_anything(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (tmp_path / "mine.yaml").write_text(f"cluster: local\npython: {tmp_path}/bare/bin/python\n", encoding="utf-8")
    done = bridge("doctor", "--profile", "./mine.yaml", runs=tmp_path, cwd=tmp_path, check=1)
    assert "FAIL  torch: not installed\n      → install bridge-rl with its extra `train`" in done.stdout
    (tmp_path / "mine.yaml").write_text("cluster: local\npython: /no/python\n", encoding="utf-8")
    done = bridge("doctor", "--profile", "./mine.yaml", runs=tmp_path, cwd=tmp_path, check=1)
    assert "FAIL  python of the jobs: /no/python" in done.stdout and "→ set `python`" in done.stdout


def test_a_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    found = {c["name"]: c for c in json.loads(bridge("doctor", "--json", runs=tmp_path / "runs", check=1).stdout)}
    assert not found["runs folder"]["ok"] and "--runs" in found["runs folder"]["remedy"]


def test_slurm_commands_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {c["name"]: c for c in bridge_json("doctor", "--profile", "devcluster", runs=tmp_path, check=1)}
    assert "sbatch" in found["slurm commands"]["found"] and found["slurm commands"]["remedy"] == "run on a login node"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--profile", "devclustr"), "no profile 'devclustr'; did you mean 'devcluster'?"),
        (("--profile", "./missing.yaml"), "missing.yaml: cannot be read"),
        (("--profile", "./wrong.yaml"), "wrong.yaml: defaults.partiton: unknown key; did you mean 'partition'?"),
        (("--profile", "./twice.yaml"), "give only one of mem and mem_per_cpu"),
        (("--profil",), "No such option: --profil"),
        (("extra",), "unexpected extra argument"),
    ],
)
def test_requests_that_cannot_be_served(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "wrong.yaml").write_text("cluster: slurm\ndefaults: {partiton: gpu}\n", encoding="utf-8")
    (tmp_path / "twice.yaml").write_text("cluster: slurm\ndefaults: {mem: 1G, mem_per_cpu: 1G}\n", encoding="utf-8")
    done = bridge("doctor", *words, runs=tmp_path, cwd=tmp_path, check=2)
    assert message in done.stderr and done.stdout == "" and "Traceback" not in done.stderr
