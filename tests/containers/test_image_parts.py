"""What `bridge-rl image` decides: locks, wheels, indexes, command lines, records, digests."""

from __future__ import annotations

import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given
from hypothesis import strategies as st
from imaging import NOTHING, ROOT, Project, entries, sha256
from packaging.tags import compatible_tags, cpython_tags

from bridge.config.images import Image, read_images
from bridge.errors import UserError, WorkFailedError
from bridge.launch.image import inside, store
from bridge.launch.image.build import Base, Job, choose_base, commands, parse_arguments, require_installed
from bridge.launch.image.index import File, Index, download, from_html, from_json, request
from bridge.launch.image.locks import Entry, changes, parse_lock, preference, read_lock, wheel_ranks
from bridge.launch.image.mirror import compare
from bridge.launch.image.sbom import cyclonedx

A, B, C = ("a" * 64, "b" * 64, "c" * 64)

# ---- locks


def test_the_real_lock_is_read_whole() -> None:
    found = read_lock(ROOT, "train-cu124-py311")
    text = (ROOT / "containers/locks/train-cu124-py311.txt").read_text(encoding="utf-8")
    assert sum(len(entry.hashes) for entry in found) == text.count("--hash=sha256:")
    assert {e.name: e.version for e in found}["torch"] == "2.6.0"


@pytest.mark.parametrize(
    "line", ["six", "six>=1.0", "six==1.0", f"six==1.0 --hash=md5:{A}", f"six==1.0 --hash=sha256:{A} --index-url x"]
)
def test_an_entry_that_is_not_exact_and_hashed_is_refused(line: str) -> None:
    with pytest.raises(UserError, match=r"^x\.txt: not `package==version"):
        parse_lock(f"# a comment\n{line}\n", "x.txt")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True),
        st.tuples(st.from_regex(r"[0-9]\.[0-9]", fullmatch=True), st.sets(st.sampled_from([A, B, C]), min_size=1)),
    )
)
def test_a_lock_that_is_written_is_read_again(packages: dict[str, tuple[str, set[str]]]) -> None:
    lines = [
        f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{h}" for h in sorted(hashes)) + "\n    # via x\n"
        for name, (version, hashes) in packages.items()
    ]
    expected = [Entry(name, version, frozenset(hashes)) for name, (version, hashes) in packages.items()]
    assert parse_lock("# head\n" + "".join(lines), "x") == expected


def test_changes_say_what_differs() -> None:
    def lock(**packages: str) -> list[Entry]:
        return [Entry(name, text[:3], frozenset([text[3:]])) for name, text in packages.items()]

    old, new = (
        lock(a="1.0" + A, b="1.0" + A, c="1.0" + A, d="1.0" + A),
        lock(a="1.0" + A, b="2.0" + A, d="1.0" + B, e="3.0"),
    )
    assert changes(old, new) == ["b 1.0 → 2.0", "- c 1.0", "d 1.0: hashes", "+ e 3.0"]
    assert changes(old, old) == []


# ---- wheels


def test_wheels_are_ranked_as_packaging_ranks_them() -> None:
    aliases = {17: ["manylinux2014_x86_64"], 12: ["manylinux2010_x86_64"], 5: ["manylinux1_x86_64"]}
    glibc = ([f"manylinux_2_{m}_x86_64", *aliases.get(m, [])] for m in range(28, 4, -1))
    platforms = [*chain.from_iterable(glibc), "linux_x86_64"]
    tags = [
        *cpython_tags((3, 11), ["cp311"], platforms),
        *compatible_tags((3, 11), "cp311", platforms),
    ]
    assert list(wheel_ranks()) == list(dict.fromkeys(map(str, tags)))


def test_the_image_takes_the_best_file_that_the_lock_allows() -> None:
    names = {
        "x-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": A,
        "x-1.0-py3-none-any.whl": B,
        "x-1.0-cp311-cp311-macosx_11_0_arm64.whl": C,
        "x-1.0-cp312-cp312-manylinux_2_17_x86_64.whl": "d" * 64,
        "x-1.0-cp311-cp311-manylinux_2_35_x86_64.whl": "f" * 64,
        "x-1.0.tar.gz": "e" * 64,
    }
    files = [File(name, f"https://x/{name}", digest, False, 1) for name, digest in names.items()]
    order = [A, B, "e" * 64]
    for left, best in enumerate(order):
        found = compare(Entry("x", "1.0", frozenset([*order[left:], C, "d" * 64, "f" * 64])), files)
        assert found.chosen is not None and found.chosen.sha256 == best
        assert not found.missing
    assert compare(Entry("x", "1.0", frozenset([C])), files).chosen is None
    assert preference("x-1.0.exe") is None


def test_missing_and_withdrawn_files_are_told_apart() -> None:
    files = [File("x-1.0.tar.gz", "u", A, True, 1), File("x-1.0-py3-none-any.whl", "u", C, False, 1)]
    found = compare(Entry("x", "1.0", frozenset([A, B])), files)
    assert (found.missing, found.yanked) == (frozenset([B]), frozenset(["x-1.0.tar.gz"]))
    assert found.chosen == files[0]


# ---- the index


PAGE = f"""<!DOCTYPE html><html><body><h1>Links</h1>
<a href="../../f/x-1.0.tar.gz#sha256={A}" data-requires-python="&gt;=3.8">x-1.0.tar.gz</a>
<a href="https://other/f/x-2.0%2Bcpu.zip#sha256={B}" data-yanked="broken">x</a><a href="https://other/f/plain.zip">p</a>
<a>no link</a></body></html>"""


def test_both_kinds_of_pages_are_read() -> None:
    expected = [
        File("x-1.0.tar.gz", "https://i/f/x-1.0.tar.gz", A, False, 0),
        File("x-2.0+cpu.zip", "https://other/f/x-2.0%2Bcpu.zip", B, True, 0),
        File("plain.zip", "https://other/f/plain.zip", "", False, 0),
    ]
    assert from_html(PAGE, "https://i/simple/x/") == expected
    items: list[dict[str, Any]] = [
        {"filename": "x-1.0.tar.gz", "url": "../../f/x-1.0.tar.gz", "hashes": {"sha256": A}},
        {"filename": "x-2.0+cpu.zip", "url": expected[1].url, "hashes": {"sha256": B}, "yanked": "broken"},
        {"filename": "plain.zip", "url": expected[2].url, "hashes": {}, "yanked": False},
    ]
    assert from_json(json.dumps({"files": items}), "https://i/simple/x/") == expected


def test_a_password_is_sent_and_not_shown() -> None:
    made = request("https://me:p%40ss@host:8/simple/x/")
    assert made.full_url == "https://host:8/simple/x/"
    assert made.get_header("Authorization") == "Basic bWU6cEBzcw=="  # me:p@ss


def test_an_index_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/index.html").write_text(f'<a href="x-1.0.tar.gz#sha256={A}">x</a>', encoding="utf-8")
    index = Index(tmp_path.as_uri())
    assert [(file.name, file.url) for file in index.files("x")] == [
        ("x-1.0.tar.gz", (tmp_path / "x/x-1.0.tar.gz").as_uri())
    ]
    assert index.files("y") == []


class Server(http.server.ThreadingHTTPServer):
    """One file, with ranges; `cut` answers end after so many bytes."""

    data = bytes(range(256)) * 20000
    cut: list[int]
    ranges: list[str | None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.ranges.append(asked)
        begin = int(asked[6:-1]) if asked else 0
        body = self.server.data[begin:]
        if begin and not body:
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut.pop(0)] if self.server.cut else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as serving:
        serving.cut, serving.ranges = [], []
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def file_of(server: Server, digest: str = "") -> File:
    url = f"http://127.0.0.1:{server.server_port}/f/x-1.0.tar.gz"
    return File("x-1.0.tar.gz", url, digest or sha256(server.data), False, len(server.data))


def test_a_download_goes_on_where_it_was_cut(server: Server, tmp_path: Path) -> None:
    server.cut = [3_000_000, 1_000_000]
    came: list[int] = []
    path = download(file_of(server), tmp_path, came.append)
    assert path.read_bytes() == server.data
    assert server.ranges == [None, "bytes=3000000-", "bytes=4000000-"]
    assert sum(came) == len(server.data)
    assert [p.name for p in tmp_path.iterdir()] == ["x-1.0.tar.gz"]
    download(file_of(server), tmp_path, came.append)
    assert len(server.ranges) == 3, "what is there and right was fetched again"


def test_a_download_that_a_killed_process_left_goes_on(server: Server, tmp_path: Path) -> None:
    for size in (1000, len(server.data)):
        (tmp_path / ".x-1.0.tar.gz.part").write_bytes(server.data[:size])
        (tmp_path / "x-1.0.tar.gz").unlink(missing_ok=True)
        path = download(file_of(server), tmp_path, lambda _: None)
        assert path.read_bytes() == server.data
    assert server.ranges == ["bytes=1000-", f"bytes={len(server.data)}-"]


def test_a_file_that_is_not_the_locked_one_is_not_kept(server: Server, tmp_path: Path) -> None:
    with pytest.raises(WorkFailedError, match=f"expected sha256 {A} .*, found {sha256(server.data)}"):
        download(file_of(server, A), tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x.whl", "a/b.whl", ".hidden.whl", ""])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be a file here"):
        download(File(name, "http://127.0.0.1:1/", A, False, 1), tmp_path, lambda _: None)


# ---- what is run


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "train",
        "base": Base("host/base@" + NOTHING, "docker", NOTHING, False),
        "arguments": {"LOCK": "l", "FLASH_ATTN": "80;90", "SOURCE_DATE_EPOCH": "7"},
        "site": Path("/s"),
        "site_files": frozenset(["env", "ca.pem"]),
        "wheels": None,
        "output": Path("/o/image"),
    }
    return Job(**{**values, **changes})


def lines(tool: str, made: Job) -> list[str]:
    return [" ".join(command) for command in commands(tool, made)]


def test_the_command_lines_of_every_builder() -> None:
    arguments = "--build-arg LOCK=l --build-arg FLASH_ATTN=80;90 --build-arg SOURCE_DATE_EPOCH=7"
    base = f"--build-arg BASE=host/base@{NOTHING}"
    for tool in ("apptainer", "singularity"):
        assert lines(tool, job()) == [
            f"{tool} build --bind /s:/mnt --build-arg BOOTSTRAP=docker {base} {arguments} /o/image Apptainer.def"
        ]
    tag = "localhost/bridge-rl-build:train"
    common = f"--file Dockerfile --no-cache {base} {arguments} ."
    for tool in ("buildah", "podman"):
        assert lines(tool, job()) == [
            f"{tool} build --format oci --timestamp 7 --tag {tag} --volume /s:/mnt:ro {common}",
            f"{tool} push {tag} oci-archive:/o/image",
            f"{tool} rmi {tag}",
        ]
    output = "type=oci,dest=/o/image,rewrite-timestamp=true"
    secrets = "--secret id=ca,src=/s/ca.pem --secret id=env,src=/s/env"
    assert lines("docker", job()) == [
        f"docker buildx build --provenance=false --sbom=false --output {output} {secrets} {common}"
    ]


def test_an_archive_as_base_and_a_mirror_reach_the_builder() -> None:
    made = job(base=Base("/b.tar", "oci-archive", NOTHING, True), wheels=Path("/m"))
    apptainer, buildah = commands("apptainer", made)[0], commands("buildah", made)[0]
    assert "BOOTSTRAP=oci-archive" in apptainer and "BASE=/b.tar" in apptainer
    assert apptainer[apptainer.index("/m:/mnt/wheels:ro") - 1] == "--bind"
    assert "BASE=oci-archive:/b.tar" in buildah
    assert buildah[buildah.index("/m:/mnt/wheels:ro") - 1] == "--volume"


@pytest.mark.parametrize("word", ["FLASH_ATTN=yes", "FLASH_ATTN=", "MAX_JOBS=0", "LOCK=x", "flash_attn=0", "MAX_JOBS"])
def test_a_wrong_argument_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="must be"):
        parse_arguments([word])
    assert parse_arguments(["FLASH_ATTN=80;90", "MAX_JOBS=2"]) == {"FLASH_ATTN": "80;90", "MAX_JOBS": "2"}


def the_image() -> Image:
    return read_images(ROOT / "containers/images.yaml")["train"]


def test_a_base_without_a_digest_is_refused() -> None:
    for given_base in ("docker.io/nvidia/cuda:12.4.1", "ubuntu", "x@sha256:12"):
        with pytest.raises(UserError, match="a tag can be moved"):
            choose_base(the_image(), given_base, None)
    other = choose_base(the_image(), f"docker://host/x@{NOTHING}", None)
    assert other == Base(f"host/x@{NOTHING}", "docker", NOTHING, stand_in=True)
    own = choose_base(the_image(), None, None)
    assert own == choose_base(the_image(), the_image().base.address, None)
    assert own.where == f"docker.io/nvidia/cuda@{the_image().base.digest}" and not own.stand_in


# ---- records


def record(**changes: Any) -> store.Record:
    image = the_image()
    values: dict[str, Any] = {
        "image": "train",
        "kind": "sif",
        "digest": f"sha256:{A}",
        "sha256": A,
        "size": 3,
        "lock": image.lock.sha256,
        "installed": B,
        "base": image.base.address,
        "base_digest": image.base.digest,
        "arguments": {},
        "recipes": {"Dockerfile": B},
        "tool": "apptainer 1.4.5",
        "time": "2026-01-01T00:00:00Z",
    }
    return store.Record.model_validate({**values, **changes})


def test_what_images_yaml_no_longer_says_is_named() -> None:
    image = the_image()
    assert store.differences(record(), image) == []
    assert store.differences(record(lock=B), image) == [
        f"was built from another lock: expected sha256 {image.lock.sha256}, found {B}"
    ]
    assert store.differences(record(base_digest=NOTHING), image) == [
        f"was built on another base: expected {image.base.digest}, found {NOTHING}"
    ]
    assert store.differences(record(base_digest=NOTHING, stand_in=True), image) == []
    [gone] = store.differences(record(pulled_from=f"docker://h/x@{NOTHING}"), image)
    assert gone == f"was pulled as {NOTHING}, which images.yaml no longer lists: nothing"


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    good = record().model_dump_json()
    path = tmp_path / (record().file + ".json")
    for text, said in (("{", "invalid JSON"), (good.replace(A, "x"), "digest: must be a digest"), ("[]", "object")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            store.records(tmp_path)
        assert str(path) in str(caught.value) and said in str(caught.value)
    path.write_text(good, encoding="utf-8")
    assert store.records(tmp_path) == [record()]
    path.rename(tmp_path / "other.sif.json")
    with pytest.raises(UserError, match=r"is the record of train-a{16}\.sif"):
        store.records(tmp_path)


def test_a_changed_and_a_missing_image_are_refused(tmp_path: Path) -> None:
    data = bytes(3_000_000)
    kept = record(digest=f"sha256:{sha256(data)}", sha256=sha256(data), size=len(data))
    path = tmp_path / kept.file
    path.write_bytes(data)
    store.verify(tmp_path, kept)
    with path.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"1")
    with pytest.raises(UserError, match=f"expected {kept.digest}, found sha256:{sha256(path.read_bytes())}; remove it"):
        store.verify(tmp_path, kept)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file or directory; build or pull it again"):
        store.verify(tmp_path, kept)


def test_two_processes_do_not_make_one_image_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    left = tmp_path / ".train.work/rootfs"
    left.mkdir(parents=True)
    (left / "file").touch()
    left.chmod(0o500)
    with store.work_folder(tmp_path, "train") as work:
        assert list(work.iterdir()) == []
        with pytest.raises(UserError, match="another process"), store.work_folder(tmp_path, "train"):
            pass
        with store.work_folder(tmp_path, "other"):
            pass
    assert not work.exists()


# ---- inside


def archive(path: Path, layers: list[dict[str, bytes]]) -> str:
    """An OCI archive by hand: the index, a manifest, layers. Its digest."""
    blobs: dict[str, bytes] = {}
    digests = []
    for layer in layers:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as tar:
            for name, data in layer.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        digests.append(sha256(raw.getvalue()))
        blobs[digests[-1]] = raw.getvalue()
    manifest = json.dumps({"layers": [{"digest": f"sha256:{d}"} for d in digests]}).encode()
    blobs[sha256(manifest)] = manifest
    index = json.dumps({"manifests": [{"digest": f"sha256:{sha256(manifest)}"}]}).encode()
    files = {"oci-layout": b"{}", "index.json": index, **{f"blobs/sha256/{d}": data for d, data in blobs.items()}}
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return "sha256:" + sha256(manifest)


def test_the_topmost_layer_decides(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    layers = [
        {"./a": b"1", "d/b": b"1", "e/c": b"1", "f/g": b"1"},
        {"a": b"2", "d/.wh.b": b"", ".wh.f": b""},
        {"e/.wh..wh..opq": b"", "other": b""},
    ]
    digest = archive(path, layers)
    assert inside.read_manifest(path).digest == digest
    assert inside.read_oci(path, ["a", "d/b", "e/c", "f/g", "none"]) == {"a": b"2"}
    assert inside.archive_kind(path) == "oci-archive"
    for wrong in (b"no archive", b""):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match="archive of"):
            inside.read_manifest(path)
        with pytest.raises(UserError, match="archive"):
            inside.archive_kind(path)


def test_an_image_with_another_lock_is_refused_with_what_differs() -> None:
    expected = entries("six", "idna").encode()
    other = expected.replace(b"six==1.17.0", b"six==1.16.0")
    require_installed({inside.INSTALLED: expected}, expected, "x")
    with pytest.raises(WorkFailedError) as caught:
        require_installed({inside.INSTALLED: other}, expected, "x")
    assert f"expected sha256 {sha256(expected)}, found {sha256(other)}" in str(caught.value)
    assert "six 1.17.0 → 1.16.0" in str(caught.value)
    with pytest.raises(WorkFailedError, match=r"not made by containers/install\.sh"):
        require_installed({}, expected, "x")


DPKG = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2:2.36-9+deb12u1~x
Description: some
 words: more

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def test_the_bill_of_materials_is_valid_and_complete() -> None:
    python = read_lock(ROOT, "train-cu124-py311")
    debian = inside.debian_packages(DPKG)
    facts = {"name": "train", "digest": f"sha256:{A}", "time": "2026-01-01T00:00:00Z", "base": "h/x@" + NOTHING}
    bill = cyclonedx(**facts, base_digest=NOTHING, python=python, debian=debian, distribution="debian")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    broken = json.dumps(bill | {"components": [{"name": "x"}]})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken) is not None, (
        "the validator says yes to anything"
    )
    purls = [part.get("purl") for part in bill["components"]]
    assert "pkg:pypi/vllm@0.8.1" in purls and "pkg:pypi/flash-attn@2.7.4.post1" not in purls
    assert "pkg:deb/debian/libc6@2:2.36-9%2Bdeb12u1~x?arch=amd64" in purls
    assert len(purls) == 1 + len(python) + 1, "base, Python packages, one Debian package"
    again = cyclonedx(**facts, base_digest=NOTHING, python=python, debian=debian, distribution="debian")
    assert again == bill


# ---- the commands, without a tool


def test_a_changed_lock_is_refused_with_both_hashes(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", entries("six"))
    before = sha256(project.lock.read_bytes())
    project.lock.write_text(entries("six", "idna"), encoding="utf-8")
    done = project.run("build", "small", "FLASH_ATTN=0", "--with", "buildah")
    assert done.returncode == 2
    for word in (str(project.lock), f"expected sha256 {before}", f"found {sha256(project.lock.read_bytes())}"):
        assert word in done.stderr
    assert not project.images.exists()
    listed = project.ok("list")["images"][0]
    assert before in listed["lock_wrong"] and listed["here"] == []


def test_what_cannot_be_served_is_said_before_anything_is_done(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", entries("six"))
    for words, said in (
        (("build", "smal"), "there is no image 'smal'; did you mean 'small'?"),
        (("build", "small", "--with", "bildah"), "did you mean 'buildah'?"),
        (("pull", "small", "--with", "buildah"), "pulling small needs apptainer or singularity or skopeo"),
        (("build", "small", "--mirror", tmp_path), "is no mirror"),
        (("pull", "small", "--with", "skopeo"), "lists nothing that skopeo can pull"),
        (("verify",), "has no image"),
        (("sbom", "small"), "has no image small"),
        (("list", "--file", tmp_path / "none.yaml"), "cannot be read"),
    ):
        done = project.run(*words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
    assert not project.images.exists()


def test_images_lie_where_the_environment_says(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", entries("six"))
    assert project.ok("list")["folder"] == str(project.images)
    assert project.ok("list", environment={"BRIDGE_IMAGES": str(tmp_path / "x")})["folder"] == str(tmp_path / "x")
