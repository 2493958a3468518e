"""Which image a run uses, where this cluster has it, and when another one is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from chain import TINY, bridge, bridge_json

from bridge.config.profile import Allocation, Profile, Runtime
from bridge.errors import UserError
from bridge.launch.container import Image
from bridge.launch.doctor import image_checks
from bridge.launch.prepare import make_run, prepare
from bridge.launch.runtime import (
    answer,
    as_recorded,
    find,
    known_digest,
    last_image,
    require_fit,
    require_same,
    require_same_lock,
)
from bridge.record import create, places


def profile(folder: Path, **settings: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"cluster": "slurm", **settings}), encoding="utf-8")
    return str(path)


def experiment(folder: Path, image: str = "train") -> Path:
    path = folder / "tiny.yaml"
    path.write_text(f"image: {image}\n{TINY}", encoding="utf-8")
    return path


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    path = tmp_path / "train.sif"
    path.write_bytes(b"an image")
    return path


SHA = hashlib.sha256(b"an image").hexdigest()


# ---- plan


@pytest.mark.parametrize(
    ("image", "settings", "said"),
    [
        ("trian", {"defaults": {"runtime": "apptainer"}}, "has no image 'trian'; did you mean 'train'?"),
        ("train", {}, "the profile does not say what starts it; write `defaults: {runtime: apptainer}`"),
        ("train", {"defaults": {"runtime": "docker"}}, "defaults.runtime"),
        ("train", {"cluster": "local", "defaults": {"runtime": "apptainer"}}, "a local profile starts no images"),
        ("train", {"defaults": {"runtime": "apptainer", "binds": ["data"]}}, "like /data, or /data:/mnt:ro"),
    ],
)
def test_what_plan_refuses(tmp_path: Path, image: str, settings: dict[str, object], said: str) -> None:
    done = bridge(
        "plan", experiment(tmp_path, image), "--profile", profile(tmp_path, **settings), runs=tmp_path, check=2
    )
    assert said in done.stderr


def test_plan_shows_the_image_and_needs_no_file_for_it(
    tmp_path: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_IMAGES", str(tmp_path / "images"))
    name = profile(tmp_path, defaults={"runtime": "apptainer"})
    assert bridge_json("plan", experiment(tmp_path), "--profile", name, runs=tmp_path)["image"] == "train"
    done = bridge("plan", experiment(tmp_path), "--profile", name, "--scripts", runs=tmp_path, check=2)
    assert "there is no image 'train' here; `bridge-rl image build train` makes it" in done.stderr
    name = profile(tmp_path, defaults={"runtime": "apptainer"}, images={"train": str(sif)})
    shown = bridge("plan", experiment(tmp_path), "--profile", name, "--scripts", runs=tmp_path).stdout
    assert f"check_image.sh {sif} {SHA} " in shown


def test_the_image_is_part_of_the_run_but_not_where_none_is_used(tmp_path: Path) -> None:
    def run_id(image: str, **settings: object) -> str:
        return prepare(experiment(tmp_path, image), [], profile(tmp_path, **settings)).request.run_id

    inside, other = ({"defaults": {"runtime": "apptainer"}}, {"defaults": {"runtime": "none"}})
    assert len({run_id("train", **inside), run_id("train-next", **inside), run_id("train", **other)}) == 3
    assert run_id("train", **other) == run_id("train-next", **other)
    part = {"defaults": {"runtime": "none"}, "stages": {"eval": {"runtime": "apptainer"}}}
    request = prepare(experiment(tmp_path), [], profile(tmp_path, **part)).request
    plain = prepare(experiment(tmp_path), [], profile(tmp_path, **other)).request
    changed = {key for key, mark in request.fingerprints().items() if plain.fingerprints()[key] != mark}
    assert {stage for stage, _ in changed} == {"eval"}


# ---- where it is


def test_a_file_is_known_by_its_content_or_by_what_stands_beside_it(sif: Path) -> None:
    mine = Profile(cluster="slurm", images={"train": str(sif)})
    assert find("train", mine, {}) == Image("train", str(sif), str(sif), SHA)
    Path(f"{sif}.json").write_text(json.dumps({"sha256": "ab" * 32}), encoding="utf-8")
    assert find("train", mine, {}).sha256 == known_digest(sif) == "ab" * 32


def test_a_folder_is_known_by_what_was_installed(tmp_path: Path) -> None:
    listed = tmp_path / "root/opt/bridge/installed.txt"
    listed.parent.mkdir(parents=True)
    listed.write_bytes(b"an image")
    found = find("train", Profile(cluster="slurm", images={"train": str(tmp_path / "root")}), {})
    assert (found.checked, found.sha256) == (str(listed), SHA)


@pytest.mark.parametrize("place", ["docker://host/name:latest", "host#name:1"])
def test_a_tag_is_refused(place: str) -> None:
    with pytest.raises(UserError, match="a tag can move"):
        find("train", Profile(cluster="slurm", images={"train": place}), {})


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; `bridge-rl image build train`"):
        find("train", Profile(cluster="slurm", images={"train": str(tmp_path / "no.sif")}), {})


def test_no_digest_is_taken_that_is_none(sif: Path) -> None:
    # It stands in a script of bash.
    Path(f"{sif}.json").write_text(json.dumps({"sha256": f"{SHA}; touch /tmp/x"}), encoding="utf-8")
    assert known_digest(sif) is None
    assert find("train", Profile(cluster="slurm", images={"train": str(sif)}), {}).sha256 == SHA


def test_an_image_that_cannot_be_read_is_refused(sif: Path) -> None:
    place = str(sif.with_name("a" * 300))  # root reads what others cannot, but not this
    with pytest.raises(UserError, match=r"images\.train: .*File name too long; whoever launches"):
        find("train", Profile(cluster="slurm", images={"train": place}), {})


@pytest.mark.parametrize(
    ("runtime", "place", "said"),
    [
        ("apptainer", "docker://host/name@sha256:1", "apptainer takes a SIF file"),
        ("apptainer", "folder", "apptainer takes a SIF file"),
        ("charliecloud", "train.sif", "charliecloud takes a folder"),
        ("pyxis", "folder", "pyxis takes a file or an address"),
        ("pyxis", "docker://host/name@sha256:1", None),
        ("charliecloud", "folder", None),
        ("singularity", "train.sif", None),
    ],
)
def test_each_runtime_gets_what_it_can_start(tmp_path: Path, runtime: Runtime, place: str, said: str | None) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.sif").write_bytes(b"an image")
    path = place if "://" in place else str(tmp_path / place)
    image = Image("train", path, path, None if "://" in place else SHA)
    with pytest.raises(UserError, match=said) if said else nullcontext():
        require_fit(image, {"sft": runtime})


@pytest.mark.parametrize("where", ["runs", "scratch"])
def test_a_colon_is_refused_before_a_run_is_made(tmp_path: Path, sif: Path, where: str) -> None:
    scratch = "/local:disk" if where == "scratch" else "/tmp"
    runs = tmp_path / ("a:b" if where == "runs" else "runs")
    name = profile(
        tmp_path, defaults={"runtime": "singularity", "scratch": scratch}, images={"train": str(sif)}, python="/x"
    )
    with pytest.raises(UserError, match="without colon and comma"):
        make_run(prepare(experiment(tmp_path), [], name), runs)
    assert not runs.exists()


def test_stages_outside_the_image_are_known(tmp_path: Path) -> None:
    mixed = {"defaults": {"runtime": "apptainer"}, "stages": {"eval": {"runtime": "none"}}}
    assert not prepare(experiment(tmp_path), [], profile(tmp_path, **mixed)).all_in_image
    assert prepare(experiment(tmp_path), [], profile(tmp_path, defaults={"runtime": "apptainer"})).all_in_image


def test_links_out_of_an_input_are_followed(tmp_path: Path) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "snapshots/1"
    blobs.mkdir()
    model.mkdir(parents=True)
    (blobs / "abc").write_text("{}", encoding="utf-8")
    (model / "config.json").symlink_to(blobs / "abc")
    (model / "inside.json").symlink_to(model / "config.json")
    (model / "gone.json").symlink_to("nowhere")
    (model / "loop.json").symlink_to("loop.json")
    same = {str(model): str(model), str(blobs): str(blobs)}
    assert places(model) == same
    assert places(model / "config.json") == {str(model / "config.json"): str(model / "config.json")}, (
        "one file is bound"
    )


def test_links_are_followed_as_they_will_be_inside(tmp_path: Path) -> None:
    # The cache of a hub, reached by a link to the snapshot: there `..` is the folder of the link.
    hub, mine = tmp_path / "hub/model", tmp_path / "mine"
    for folder in (hub / "blobs", hub / "snapshots/1/deep", mine, tmp_path / "store"):
        folder.mkdir(parents=True)
    (tmp_path / "store/abc").write_text("{}", encoding="utf-8")
    (hub / "blobs/abc").symlink_to("../../../store/abc")  # and the blob is a link too
    (hub / "snapshots/1/config.json").symlink_to("../../blobs/abc")
    (hub / "snapshots/1/deep/x.json").symlink_to("../../../blobs/abc")
    (hub / "snapshots/1/folder").symlink_to("../../../../store")
    (mine / "a").mkdir()
    (mine / "a/model").symlink_to(hub / "snapshots/1")
    found = places(mine / "a/model")
    assert inside(found, tmp_path / "root", mine / "a/model/config.json") == "{}"
    assert inside(found, tmp_path / "root", mine / "a/model/deep/x.json") == "{}"
    assert inside(found, tmp_path / "root", mine / "a/model/folder/abc") == "{}"


def inside(found: dict[str, str], root: Path, path: Path) -> str:
    """What is read at `path` where only `found` is bound: copies stand for mounts, links in them stay links."""
    for target, source in sorted(found.items()):
        place = root / target[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copytree(source, place, symlinks=True)
    return (root / path.relative_to("/")).read_text(encoding="utf-8")


# ---- the same one as before


def test_another_image_than_at_the_launch_is_refused(tmp_path: Path, sif: Path) -> None:
    name = profile(tmp_path, defaults={"runtime": "apptainer"}, images={"train": str(sif)})
    plan = prepare(experiment(tmp_path), [], name)
    image = find("train", plan.profile, {})
    run = create(plan.request, tmp_path / "runs", {"place": image.place, "sha256": image.sha256})
    require_same(run, image)
    shutil.copyfile(sif, tmp_path / "moved.sif")
    require_same(run, Image("train", str(tmp_path / "moved.sif"), "", SHA))  # the same image at another place
    other = Image("train", str(sif), str(sif), "0" * 64)
    with pytest.raises(UserError, match=r"another image \(SHA-256 .*--force"):
        require_same(run, other)
    run.note_submission({"event": "launch", "time": 0, "image": {"place": other.place, "sha256": other.sha256}})
    require_same(run, other)  # forced once, it is the run's image
    shown = last_image(run)
    assert shown and shown["sha256"] == other.sha256 and shown["lock"] == run.record["image"]["lock"]
    done = bridge("resume", run.id, runs=tmp_path / "runs", check=2)
    assert "was launched with another image" in done.stderr


def test_force_goes_on_with_another_file_but_not_with_other_packages(
    tmp_path: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text(f'#!/bin/sh\ncat "{tmp_path}/inside.json"\n', encoding="utf-8")
    (tools / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    plan = prepare(
        experiment(tmp_path), [], profile(tmp_path, defaults={"runtime": "apptainer"}, images={"train": str(sif)})
    )
    lock = plan.request.image["lock"]["sha256"] if plan.request.image else ""

    def holds(torch: str, installed: str) -> None:
        value = {"python": "3.11.2", "packages": {"torch": torch}, "installed": installed, "locked": {}}
        (tmp_path / "inside.json").write_text(json.dumps(value), encoding="utf-8")

    holds("2.6.0", lock)
    run, image = make_run(plan, tmp_path / "runs")
    assert image and image.sha256 == SHA
    require_same_lock(run, image)
    holds("2.7.0", "ab" * 32)
    with pytest.raises(UserError, match=r"holds other packages \(torch 2\.7\.0, not 2\.6\.0\); launch .* as a new run"):
        require_same_lock(run, image)
    holds("2.6.0", "ab" * 32)
    with pytest.raises(UserError, match="the same versions from another lock"):
        require_same_lock(run, image)


def test_an_image_on_another_base_is_refused_unless_it_says_so(tmp_path: Path, sif: Path) -> None:
    image = Image("train", str(sif), str(sif), SHA)
    declared = {"base": {"digest": "sha256:" + "1" * 64}}

    def recorded(**beside: object) -> object:
        Path(f"{sif}.json").write_text(json.dumps(beside), encoding="utf-8")
        return as_recorded(image, "pyxis", declared, [])["built_on"]

    assert recorded(base_digest="sha256:" + "1" * 64) == "sha256:" + "1" * 64
    assert recorded(base_digest="sha256:" + "2" * 64, stand_in=True) == "sha256:" + "2" * 64
    assert recorded() is None
    with pytest.raises(UserError, match=r"was built on another base: expected sha256:1.*found sha256:2"):
        recorded(base_digest="sha256:" + "2" * 64)


def test_a_run_that_is_there_gets_the_input_that_is_on_its_record(tmp_path: Path, sif: Path) -> None:
    name = profile(tmp_path, defaults={"runtime": "singularity"}, images={"train": str(sif)})
    rows = json.dumps({"prompt": "1+1", "response": "2"})
    text = experiment(tmp_path).read_text("utf-8").replace("data: train_data", "data: FILE")
    found = []
    for file in ("first.jsonl", "second.jsonl"):
        (tmp_path / file).write_text(f"{rows}\n", encoding="utf-8")
        (tmp_path / "tiny.yaml").write_text(text.replace("FILE", str(tmp_path / file)), encoding="utf-8")
        found.append(make_run(prepare(tmp_path / "tiny.yaml", [], name), tmp_path / "runs"))
    (run, image), (again, image_again) = found
    assert run.id == again.id and image and image_again
    assert image_again.binds == image.binds == {str(tmp_path / "first.jsonl"): str(tmp_path / "first.jsonl")}


# ---- what is inside


def test_the_answer_is_found_among_other_lines() -> None:
    assert answer('noise\n{"x": 1}\n\n{"python": "3.11.2"}\nbye') == {"python": "3.11.2"}
    assert answer("noise") is None


def test_what_doctor_says_of_an_image() -> None:
    good = {
        "python": "3.11.2",
        "packages": {"torch": "2.6.0", "pip": "23"},
        "locked": {"torch": "2.6.0"},
        "imports": {"torch": [True, "CUDA 12.4"]},
    }
    checks = list(image_checks("train", good))
    assert all(check.ok for check in checks) and checks[-1].found == "left out"
    bad = {**good, "packages": {"torch": "2.7.0", "extra": "1"}, "locked": {"torch": "2.6.0", "vllm": "0.8.1"}}
    found = next(iter(image_checks("train", bad)))
    assert not found.ok
    assert found.found == "torch 2.7.0, not 2.6.0; vllm missing, not 0.8.1; extra 1, not in the lock"
    assert not next(iter(image_checks("train", None))).ok
    failed = [*image_checks("train", {**good, "imports": {"vllm": [False, "ImportError: no"]}})]
    assert [check.ok for check in failed] == [True, False, True]


def test_allocation_keeps_binds_of_all_levels() -> None:
    from bridge.config.profile import allocation
    from bridge.config.stages import Resources

    mine = Profile(cluster="slurm", defaults=Allocation(binds=["/a"]), stages={"rl": Allocation(binds=["/b:ro"])})
    assert allocation(mine, "rl", Resources()).binds == ["/a", "/b:ro"]
