"""The sbatch script: golden text, valid bash, and values that no shell may read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bridge.config.profile import Allocation, Profile, allocation
from bridge.config.stages import Resources
from bridge.graph import After, Array
from bridge.launch.script import minutes, sbatch_options, sbatch_script, site_environment
from bridge.launch.submit import dependency

GOLDEN = Path(__file__).with_name("golden.sbatch")
ARRAY = Array("sft", "sft", (0, 1, 2), (0, 1, 2), (After("aftercorr", "base"), After("afterok", "train")))


def script(profile: Profile | None = None, need: Allocation | None = None, python: str = "/opt/venv/bin/python") -> str:
    profile = profile or Profile(cluster="slurm", slurm_conf="/etc/slurm/slurm.conf", throttle=8)
    return sbatch_script(
        "demo-0123abcd", ARRAY, need or Allocation(cpus=2, mem="3G", time="30m"), profile, python, "sft"
    )


def test_golden() -> None:
    """To accept a wanted change, write the new text into tests/unit/golden.sbatch."""
    assert script().splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_bash_accepts_it() -> None:
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True)


@pytest.mark.parametrize(
    "evil", ["a b", "'; echo evil; '", '"$(echo evil)"', "`echo evil`", "\\", "ü%j", "$HOME", "a\nb"]
)
def test_hostile_values_stay_values(evil: str) -> None:
    text = script(Profile(cluster="slurm", env={"VALUE": evil}), python="/bin/echo")
    line = text[text.index("export VALUE=") : text.index("export PYTHONPATH")]
    shown = subprocess.run(["bash", "-c", line + 'printf %s "$VALUE"'], capture_output=True, check=True)
    assert shown.stdout.decode() == evil


def test_a_python_in_a_folder_with_a_space() -> None:
    assert "'/my venv/bin/python' -u -m submitit.core._submit" in script(python="/my venv/bin/python")


@pytest.mark.parametrize(
    ("text", "whole"), [("12h", 720), ("90m", 90), ("1h30m", 90), ("61s", 2), ("1s", 1), ("2d1h", 2940)]
)
def test_limits_in_minutes_are_rounded_up(text: str, whole: int) -> None:
    assert minutes(text) == whole


def test_the_experiments_resources_win_over_the_profile() -> None:
    profile = Profile(
        cluster="slurm",
        defaults=Allocation(cpus=1, partition="short", time="1h"),
        stages={"sft": Allocation(partition="gpu", gpus=1)},
    )
    found = allocation(profile, "sft", Resources(gpus=2))
    assert (found.cpus, found.partition, found.time, found.gpus) == (1, "gpu", "1h", 2)
    assert allocation(profile, "eval", Resources()).gpus is None


def test_dependencies_as_sbatch_wants_them() -> None:
    submitted = {"base": "12", "train": "7"}
    assert dependency(ARRAY.after, submitted) == "aftercorr:12,afterok:7"
    assert dependency([After("afterok", job="3", tasks=(1, 2))], {}) == "afterok:3_1:3_2"
    assert dependency([After("afterok", array="train", tasks=(0,))], submitted) == "afterok:7_0"
    assert dependency([After("aftercorr", job="3")], {}) == "aftercorr:3"
    assert dependency([], {}) is None


def options_of(need: Allocation, kind: str = "sft") -> list[str]:
    text = sbatch_script("r", ARRAY, need, Profile(cluster="slurm"), "python", kind)
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_every_resource_has_its_option() -> None:
    need = Allocation(
        cpus=8, gpus=4, nodes=2, mem_per_gpu="60G", time="1d", partition="gpu", account="a b", qos="high",
        constraint="a100&nvlink", exclusive=True, gpu_option="--gpus-per-node=a100:{gpus}", sbatch=["--mail-type=FAIL"],
    )  # fmt: skip
    assert options_of(need)[-13:] == [
        "--signal=USR2@120", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--gpus-per-node=a100:4",
        "--mem-per-gpu=60G", "--time=1440", "--partition=gpu", "--account='a b'", "--qos=high",
        "--constraint='a100&nvlink'", "--exclusive", "--mail-type=FAIL",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["mem", "mem_per_cpu", "mem_per_gpu"])
def test_of_the_memory_forms_the_most_specific_level_wins_alone(form: str) -> None:
    profile = Profile(cluster="slurm", defaults=Allocation(mem="1G"), stages={"sft": Allocation(mem_per_cpu="2G")})
    found = options_of(allocation(profile, "sft", Resources(**{form: "3G"})))
    assert [word for word in found if word.startswith("--mem")] == [f"--{form.replace('_', '-')}=3G"]
    with pytest.raises(ValueError, match="only one of mem and mem_per_gpu"):
        Resources(mem="1G", mem_per_gpu="1G")


def test_processes_are_started_by_torchrun_where_there_are_several() -> None:
    text = sbatch_script("r", ARRAY, Allocation(gpus=4, nodes=2), Profile(cluster="slurm"), "python", "sft")
    assert "export BRIDGE_NODES=2\nexport BRIDGE_PROCESSES=4\n" in text
    assert "BRIDGE_PROCESSES" not in sbatch_script("r", ARRAY, Allocation(gpus=4), Profile(cluster="slurm"), "p", "rl")


def test_secrets_are_named_and_never_shown() -> None:
    profile = Profile(cluster="slurm", secrets=["HF_TOKEN", "WANDB_API_KEY"], secrets_file="/home/me/my secrets")
    text = sbatch_script("r", ARRAY, Allocation(), profile, "python", "sft")
    assert "; declare -px HF_TOKEN WANDB_API_KEY) path=" in text
    assert "\nset -a && . '/home/me/my secrets' && set +a || exit 1\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_sites_profile_counts_and_what_the_launch_gives_wins(tmp_path: Path) -> None:
    """With a profile as awkward as they come: it replaces PATH, the umask and a secret, and reads what is not set."""
    site = tmp_path / "profile"
    site.write_text(
        'echo "welcome $NOT_SET"; umask 0; export PATH=/site/bin SECRET=site NCCL_SOCKET_IFNAME=ib0\n'
        'module() { echo "module $*"; }\n',
        encoding="utf-8",
    )
    show = 'module load cuda; umask; printf "%s\\0" "$PATH" "$NCCL_SOCKET_IFNAME" "$SECRET" "$OTHER"'
    secrets = {"SECRET": "a'b $x `id`\n\"c\\", "OTHER": "ü"}
    script = "umask 77\n" + site_environment(list(secrets)).replace("/etc/profile", str(site)) + f"set -u; {show}"
    done = subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": "/launch/bin", **secrets}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    path, *values, rest = done.stdout.removeprefix("welcome \nmodule load cuda\n0077\n").split("\0")
    assert path == "/site/bin:/launch/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert values == ["ib0", *secrets.values()] and rest == ""


def test_without_a_profile_of_the_site_there_is_still_a_path() -> None:
    script = site_environment().replace("/etc/profile", "/no/profile") + 'set -u; umask -p; echo "$PATH"'
    done = subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": "/launch/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("/usr/bin:/bin:/launch/bin:/usr/local/sbin:")


def test_a_folder_of_the_nodes_own_disk_is_used_and_removed(tmp_path: Path) -> None:
    """The lines of the script, run by bash up to the stage: TMPDIR is a new folder there, and gone at the end."""
    scratch = tmp_path / "a 'b'"
    scratch.mkdir()
    text = sbatch_script("r", ARRAY, Allocation(scratch=str(scratch)), Profile(cluster="slurm"), "python", "sft")
    before = text[: text.index("# TERM comes")]
    done = subprocess.run(["bash", "-c", before + 'ls -d "$TMPDIR"'], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{scratch}/bridge.")
    assert list(scratch.iterdir()) == []


def test_paths_of_the_run_are_words_for_sbatch_and_roots_are_held() -> None:
    root = Array("sft", "sft", (0,), (0,), (After("afterok", job="3", tasks=(1,)),))
    folder = "/runs/50% 'off'; echo/r"
    assert sbatch_options(folder, root, "afterok:3_1") == [
        "--parsable", f"--chdir={folder}/code", "--output=/runs/50%% 'off'; echo/r/logs/sft/%A_%a.host.log",
        "--dependency=afterok:3_1", "--hold",
    ]  # fmt: skip
    assert "--hold" not in sbatch_options(folder, ARRAY, "aftercorr:1,afterok:2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"defaults": {"sbatch": ["--array=0-3"]}}, "bridge-rl sets this itself"),
        ({"defaults": {"sbatch": ["-J x"]}}, "bridge-rl sets this itself"),
        ({"defaults": {"sbatch": ["mail-type=FAIL"]}}, "must be one sbatch option"),
        ({"defaults": {"sbatch": ["--comment=a\n#SBATCH --array=0-9"]}}, "must be one line"),
        ({"defaults": {"gpu_option": "--gres=gpu:1"}}, "an option with {gpus} in it"),
        ({"defaults": {"mem": "1G", "mem_per_cpu": "1G"}}, "give only one of mem and mem_per_cpu"),
        ({"secrets": ["A B"]}, "must be a variable's name"),
        ({"secrets": ["T"], "env": {"T": "x"}}, "env gives T, one of the secrets"),
        ({"secrets": ["T"], "stages": {"sft": {"env": {"T": "x"}}}}, "stages.sft.env gives T, one of the secrets"),
        ({"secrets_file": "mine.env"}, "must be an absolute path"),
        ({"python": ""}, "must be one line"),
    ],
)
def test_a_profile_that_could_not_work_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Profile.model_validate({"cluster": "slurm", **settings})
