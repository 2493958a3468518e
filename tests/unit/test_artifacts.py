"""Sealed or absent: what a seal promises, and what a kill can do to it."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.artifacts import SEAL, is_sealed, open_artifact, publish, read_seal, seal
from bridge.errors import UserError


def make(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one", encoding="utf-8")
    (folder / "sub" / "b.bin").write_bytes(b"\0" * 10)
    return folder


def test_a_seal_lists_every_file_with_size_and_digest(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    seal(folder, "dataset", "f" * 64, "run/data/0", {"rows": 3})
    value = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    assert value["files"] == {
        "a.txt": {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()},
        "sub/b.bin": {"size": 10, "sha256": hashlib.sha256(b"\0" * 10).hexdigest()},
    }
    assert (value["kind"], value["fingerprint"], value["summary"]) == ("dataset", "f" * 64, {"rows": 3})
    assert open_artifact(folder, "dataset").made_by == "run/data/0"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / SEAL).unlink(), "no valid SEAL.json"),
        (lambda f: (f / SEAL).write_text("{", encoding="utf-8"), "no valid SEAL.json"),
        (lambda f: (f / SEAL).write_text('{"format": 99}', encoding="utf-8"), "no valid SEAL.json"),
        (lambda f: (f / "a.txt").unlink(), "the file a.txt is missing"),
        (lambda f: (f / "a.txt").write_text("two", encoding="utf-8"), "the file a.txt was changed"),
        (lambda f: (f / "a.txt").write_text("long", encoding="utf-8"), "the file a.txt was changed"),
    ],
)
def test_a_damaged_artifact_is_refused(tmp_path: Path, harm: object, message: str) -> None:
    folder = make(tmp_path / "x")
    seal(folder, "dataset", "f", "r", {})
    harm(folder)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        open_artifact(folder, "dataset")


def test_the_kind_must_fit(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    seal(folder, "dataset", "f", "r", {})
    with pytest.raises(UserError, match="is a dataset, but a model is wanted"):
        open_artifact(folder, "model")


def test_a_link_is_no_part_of_an_artifact(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    (folder / "link").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="plain files only"):
        seal(folder, "dataset", "f", "r", {})


def test_publish_never_replaces_what_is_there(tmp_path: Path) -> None:
    first, second, target = make(tmp_path / "1"), make(tmp_path / "2"), tmp_path / "out"
    seal(first, "dataset", "1", "r", {})
    seal(second, "dataset", "2", "r", {})
    publish(first, target)
    with pytest.raises(FileExistsError):
        publish(second, target)
    assert is_sealed(target, "1")


def test_what_is_not_sealed_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not sealed"):
        publish(make(tmp_path / "x"), tmp_path / "out")


def test_a_kill_at_any_moment_leaves_a_whole_artifact_or_none(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from bridge.artifacts import seal, publish\n"
        "work, out = Path(sys.argv[1]), Path(sys.argv[2]); work.mkdir()\n"
        "print('go', flush=True)\n"
        "[(work / f'{n}.bin').write_bytes(bytes(200_000)) for n in range(60)]\n"
        "seal(work, 'dataset', 'f', 'r', {}); publish(work, out)\n"
    )
    outcomes = set()
    for number in range(12):
        work, out = tmp_path / f"w{number}", tmp_path / f"o{number}"
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(work), str(out)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if out.exists():
            assert len(open_artifact(out, "dataset").files) == 60
        else:
            assert read_seal(work) is None or len(open_artifact(work, "dataset").files) == 60
        outcomes.add(out.exists())
    assert False in outcomes
