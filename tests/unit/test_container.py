"""How a stage is started inside an image: golden command lines, the environment that gets in, the check of the file."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

import bridge
from bridge.config.profile import Allocation, Profile, Runtime
from bridge.graph import Array
from bridge.launch.container import KEPT, RUN, SET, Image, contained, shell
from bridge.launch.script import sbatch_script

SCRIPTS = Path(bridge.__file__).parent / "launch"
ARRAY = Array("sft", "sft", (0,), (0,), ())
SHA = "0123456789abcdef" * 4
IMAGE = Image(
    "train", "/images/my train.sif", "/images/my train.sif", SHA, {"/data/model a": "/data/model a", "/y": "/real y"}
)
PYTHON = ["/opt/venv/bin/python", "-u"]
INSIDE = (
    "/usr/bin/env PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "
    + " ".join(f"{name}={value}" for name, value in SET.items() if name != "HF_HUB_OFFLINE")
    + " /opt/venv/bin/python -u"
)
ENTER = f"bash bridge/launch/contain.sh {','.join(KEPT)},HF_HUB_OFFLINE,WANDB_API_KEY"
MOUNTS = (
    "--bind=\"$TMPDIR\":/tmp '--bind=/real y:/y:ro' --bind=/hf:/hf '--bind=/data/model a:/data/model a:ro' "
    '\'--bind=/x/{run}:/y/z:ro\' --bind="$run":"$run"'
)
GOLDEN = {
    **{
        runtime: (
            "",
            f"{ENTER} {runtime} exec --cleanenv --no-eval --no-home --no-mount=tmp,cwd --pwd=\"$run\"/code "
            f'{MOUNTS} --nv "$image" {INSIDE}',
        )
        for runtime in ("apptainer", "singularity")
    },
    "charliecloud": (
        "",
        f"{ENTER} ch-run --write-fake --cd=\"$run\"/code {MOUNTS.replace(':ro', '')} \"$image\" -- {INSIDE}",
    ),
    "pyxis": (
        "--container-image=\"$image\" --container-mounts=\"$TMPDIR\"':/tmp,/real y:/y:ro,/hf:/hf,"
        "/data/model a:/data/model a:ro,/x/{run}:/y/z:ro,'\"$run\":\"$run\" "
        "--container-workdir=\"$run\"/code --no-container-mount-home "
        "--no-container-remap-root --no-container-entrypoint",
        f"{ENTER} {INSIDE}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("runtime", GOLDEN)
def test_golden(runtime: Runtime) -> None:
    made = contained(runtime, IMAGE, ["/hf", "/x/{run}:/y/z:ro"], ["HF_HUB_OFFLINE", "WANDB_API_KEY"], 2, PYTHON)
    assert (shell(made.srun), shell(made.command)) == GOLDEN[runtime]


def test_places_inside_are_not_those_of_the_host() -> None:
    words = contained("apptainer", IMAGE, [], ["HOME", "TMPDIR", "HF_HUB_OFFLINE"], 0, PYTHON).command
    assert {"HOME=/tmp/home", "TMPDIR=/tmp"} <= set(words) and "HF_HUB_OFFLINE=1" not in words
    assert not {"HOME", "TMPDIR"} & set(words[2].split(","))


def test_no_gpu_no_nv() -> None:
    assert "--nv" not in contained("apptainer", IMAGE, [], [], 0, PYTHON).command


def test_words_reach_the_program_whatever_is_in_them() -> None:
    evil = ["a b", "'; echo evil; '", "$(echo evil)", f"{RUN}/x y", "{run} {tmp}", "ü\n%j"]
    line = f"run=\"/r u'n\"; printf '%s\\0' {shell(evil)}"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split("\0")
    assert shown[:-1] == ["a b", "'; echo evil; '", "$(echo evil)", "/r u'n/x y", "{run} {tmp}", "ü\n%j"]


# ---- the script


def script(profile: Profile | None = None, need: Allocation | None = None) -> str:
    need = need or Allocation(runtime="apptainer")
    return sbatch_script("r-1", ARRAY, need, profile or Profile(cluster="slurm"), PYTHON[0], "sft", IMAGE)


def test_the_script_checks_the_image_and_enters_it() -> None:
    text = script()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0
    assert "\nimage='/images/my train.sif'\n" in text
    check = f"bash bridge/launch/check_image.sh '/images/my train.sif' {SHA} \"${{TMPDIR%/*}}/bridge-images-$UID\" ||"
    assert f"\n{check} exit 1\n" in text
    assert "--kill-on-bad-exit=1 bash bridge/launch/contain.sh " in text
    assert '"$image" /usr/bin/env ' in text and "-m submitit.core._submit /proc/self/cwd/../scripts/sft\n" in text


def test_a_staged_image_is_the_one_that_is_used() -> None:
    text = script(Profile(cluster="slurm", stage_image=True), Allocation(runtime="apptainer", scratch="/local disk"))
    copy = f'"${{TMPDIR%/*}}/bridge-images-$UID"/{SHA}'
    assert f"\nimage={copy}\n" in text and f"{copy} || exit 1\n" in text
    assert "mktemp -d -- '/local disk'/bridge.XXXXXX" in text


def test_on_several_nodes_each_gets_the_folder_and_the_check() -> None:
    text = script(need=Allocation(runtime="apptainer", nodes=2))
    lines = [line for line in text.splitlines() if "check_image" in line or "TMPDIR/home" in line or "rm -rf" in line]
    assert len(lines) == 4 and all("srun --export=ALL --ntasks-per-node=1 " in line for line in lines)
    steps = re.findall(r"^.*\bsrun .*$", text, re.MULTILINE)
    assert len(steps) == 6 and all("srun --export=ALL " in step for step in steps), "else a step has no PATH"
    assert text.index("trap - EXIT") < text.index("scontrol requeue"), "once it is requeued the job has no nodes"


def test_names_of_secrets_are_known_but_no_value(tmp_path: Path) -> None:
    secrets = tmp_path / "my secrets"
    secrets.write_text("A=one\nexport B_2='two'\n# C=three\n", encoding="utf-8")
    text = script(Profile(cluster="slurm", secrets_file=str(secrets), secrets=["HF_TOKEN"], env={"X": "y"}))
    part = text[text.index("set -a") : text.index("TMPDIR=$(mktemp")]
    shown = subprocess.run(["bash", "-c", f'{part}echo "$BRIDGE_SECRETS"'], capture_output=True, text=True, check=True)
    assert shown.stdout == "A,B_2\n"
    assert f"contain.sh {','.join(KEPT)},X,HF_TOKEN " in text


# ---- contain.sh: what gets in


def enter(names: str, *words: str, program: Path | None = None, **env: str) -> dict[str, str]:
    path, scratch = (f"{program.parent}:", str(program.parent)) if program else ("", "/tmp")
    done = subprocess.run(
        ["bash", SCRIPTS / "contain.sh", names, *words],
        env={"PATH": f"{path}/usr/bin:/bin", "TMPDIR": scratch, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)


def test_only_what_is_named_gets_in() -> None:
    found = enter(
        "A,SECRET", "env", "-0", A="1", AA="2", SLURM_JOB_ID="7", SLURMX="3", BRIDGE_CPUS="2", HOME="/root",
        BRIDGE_SECRETS="B", **{"BASH_FUNC_ml%%": "() { :; }"}, B="two\nlines", SECRET="s", C="x", APPTAINER_BIND="/",
    )  # fmt: skip
    assert {name: found[name] for name in ("A", "B", "SECRET", "SLURM_JOB_ID", "BRIDGE_CPUS")} == {
        "A": "1", "B": "two\nlines", "SECRET": "s", "SLURM_JOB_ID": "7", "BRIDGE_CPUS": "2",
    }  # fmt: skip
    assert not {"AA", "SLURMX", "HOME", "C", "APPTAINER_BIND", "PATH", "BASH_FUNC_ml%%"} & set(found)


def test_apptainer_gets_them_by_its_own_name_and_no_bind_of_the_site(tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text('#!/bin/sh\nexec env -0 "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    found = enter(
        "A,NO_PROXY", "apptainer", program=program, A="1 2", HOME="/h", SLURM_PROCID="0", APPTAINER_BINDPATH="/etc",
        https_proxy="http://me:sesame@host", ALL_PROXY="x", NO_PROXY="y", TERM="z",
    )  # fmt: skip
    assert found["APPTAINERENV_NO_PROXY"] == "y" and not {"https_proxy", "ALL_PROXY", "TERM"} & set(found)
    assert found["APPTAINERENV_A"] == "1 2" and found["APPTAINERENV_SLURM_PROCID"] == "0"
    assert "APPTAINERENV_HOME" not in found and "APPTAINER_BINDPATH" not in found and found["HOME"] == "/h"


def test_the_process_becomes_the_program() -> None:
    process = subprocess.Popen(["bash", SCRIPTS / "contain.sh", "A", "sleep", "60"], env={"PATH": "/usr/bin:/bin"})
    try:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8") != "sleep\n":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def test_a_missing_runtime_is_named() -> None:
    done = subprocess.run(
        ["bash", SCRIPTS / "contain.sh", "A", "no-such-runtime", "exec"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "no-such-runtime: there is no such program on" in done.stderr


# ---- check_image.sh


def check(*words: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / "check_image.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def sif(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "an image\\ü.sif"
    path.write_bytes(b"abc" * 1000)
    return path, hashlib.sha256(b"abc" * 1000).hexdigest()


def flip(path: Path) -> None:
    """Change one byte and give the file its old times back, as far as anybody can."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[1500] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_right_image_passes_and_a_flipped_byte_does_not(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    for _ in range(2):
        done = check(path, digest, tmp_path / "seen")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    time.sleep(0.02)  # more than the clock of a file system's times ticks
    flip(path)
    done = check(path, digest, tmp_path / "seen")
    assert done.returncode == 1 and f"not {digest}" in done.stderr and "--force" in done.stderr
    assert stat.S_IMODE((tmp_path / "seen").stat().st_mode) == 0o700


def test_it_is_read_once_for_each_node(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    assert check(path, digest, tmp_path / "seen").returncode == 0
    marks = [p.name for p in (tmp_path / "seen").iterdir()]
    assert len(marks) == 1 and marks[0].startswith(digest)
    assert check(path, digest, tmp_path / "seen").returncode == 0
    assert [p.name for p in (tmp_path / "seen").iterdir()] == marks


def test_the_copy_is_made_once_and_checked(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    seen = tmp_path / "scratch" / "seen"
    seen.parent.mkdir()
    running = [
        subprocess.Popen(["bash", SCRIPTS / "check_image.sh", path, digest, seen, seen / digest]) for _ in range(4)
    ]
    assert [process.wait() for process in running] == [0] * 4
    copy = seen / digest
    assert copy.read_bytes() == path.read_bytes()
    before = copy.stat().st_ino
    assert check(path, digest, seen, copy).returncode == 0 and copy.stat().st_ino == before


def test_a_wrong_copy_is_made_again(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    seen, copy = tmp_path / "seen", tmp_path / "seen" / digest
    good = path.read_bytes()
    path.write_bytes(b"another one")
    done = check(path, digest, seen, copy)
    assert done.returncode == 1 and "is another image than at the launch" in done.stderr
    assert not copy.exists(), "no copy of another image stays in the way"
    path.write_bytes(good)
    assert check(path, digest, seen, copy).returncode == 0 and copy.read_bytes() == good
    time.sleep(0.02)
    flip(copy)
    assert check(path, digest, seen, copy).returncode == 0 and copy.read_bytes() == good


def test_a_copy_that_finds_no_room_leaves_nothing(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    copy = tmp_path / "seen" / digest
    words = [
        "bash",
        "-c",
        'ulimit -f 1; exec bash "$@"',
        "",
        SCRIPTS / "check_image.sh",
        path,
        digest,
        copy.parent,
        copy,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=ignore_file_limit)
    assert done.returncode == 1 and "cannot be copied" in done.stderr, done.stderr
    assert [p.name for p in copy.parent.iterdir()] == [f"{digest}.lock"]


def ignore_file_limit() -> None:
    """A file that grows too large is an error of the write, as on a full disk, and no signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_missing_image_and_a_foreign_folder_are_named(sif: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = sif
    done = check(tmp_path / "none.sif", digest, tmp_path / "seen")
    assert done.returncode == 1 and "none.sif on " in done.stderr and "no such file" in done.stderr
    done = check(path, digest, tmp_path / "no" / "seen")
    assert done.returncode == 1 and "cannot be made" in done.stderr


def test_shlex_agrees_on_plain_words() -> None:
    assert shell(["a b", "c", ""]) == shlex.join(["a b", "c", ""])


def test_what_keeps_the_image_mounted_outlives_the_signals(tmp_path: Path) -> None:
    tools = tmp_path / "it's tools"
    tools.mkdir()
    (tools / "apptainer").write_text("#!/bin/sh\nexec squashfuse_ll 60\n", encoding="utf-8")
    (tools / "squashfuse_ll").write_text('#!/bin/sh\nexec sleep "$@"\n', encoding="utf-8")
    for file in tools.iterdir():
        file.chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(["bash", SCRIPTS / "contain.sh", "A", "apptainer"], env=env)
    try:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8") != "sleep\n":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    finally:
        process.kill()
        process.wait()
