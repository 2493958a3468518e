"""`image build`: the command lines of each builder, as pure functions, and what runs them."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.config.images import Image
from bridge.config.words import nearest
from bridge.errors import UserError, WorkFailedError
from bridge.launch.image import inside, store
from bridge.launch.image.locks import UV, changes, installed_locks, lock_file, parse_lock, require_locks
from bridge.launch.image.mirror import Mirror, open_mirror
from bridge.launch.image.sbom import cyclonedx

# In the order in which they are looked for.
RECIPE_OF = {
    "apptainer": "Apptainer.def",
    "singularity": "Apptainer.def",
    "buildah": "Dockerfile",
    "podman": "Dockerfile",
    "docker": "Dockerfile",
}
SETTABLE = ("FLASH_ATTN", "MAX_JOBS")


@dataclass(frozen=True)
class Base:
    """What an image is built on."""

    where: str
    """`host/name@sha256:…`, or the path of an archive."""
    transport: str
    """`docker`, `oci-archive` or `docker-archive`."""
    digest: str
    """`sha256:…` of the image, or of the archive's file."""
    stand_in: bool


@dataclass(frozen=True)
class Job:
    """Everything that a builder's command line depends on."""

    name: str
    base: Base
    arguments: Mapping[str, str]
    """LOCK, FLASH_ATTN, MAX_JOBS, SOURCE_DATE_EPOCH."""
    site: Path
    """Becomes /mnt: `env`, and perhaps `ca.pem`."""
    site_files: frozenset[str]
    wheels: Path | None
    """Becomes /mnt/wheels."""
    output: Path


def commands(tool: str, job: Job) -> list[list[str]]:
    """What is run, one after the other, in the folder of the recipes, to make the file `job.output`."""
    if RECIPE_OF[tool] == "Apptainer.def":
        arguments = {"BOOTSTRAP": job.base.transport, "BASE": job.base.where, **job.arguments}
        command = [tool, "build", "--bind", f"{job.site}:/mnt"]
        command += ["--bind", f"{job.wheels}:/mnt/wheels:ro"] if job.wheels else []
        return [[*command, *_build_args(arguments), str(job.output), "Apptainer.def"]]

    transport = "" if job.base.transport == "docker" else f"{job.base.transport}:"
    arguments = {"BASE": transport + job.base.where, **job.arguments}
    common = ["--file", "Dockerfile", "--no-cache", *_build_args(arguments), "."]
    if tool == "docker":
        secrets = [f"id={file.partition('.')[0]},src={job.site / file}" for file in sorted(job.site_files)]
        output = f"type=oci,dest={job.output},rewrite-timestamp=true"
        # Attestations hold the time of the build.
        command = ["docker", "buildx", "build", "--provenance=false", "--sbom=false", "--output", output]
        return [[*command, *(word for secret in secrets for word in ("--secret", secret)), *common]]
    tag = f"localhost/bridge-rl-build:{job.name}"
    command = [tool, "build", "--format", "oci", "--timestamp", job.arguments["SOURCE_DATE_EPOCH"], "--tag", tag]
    command += ["--volume", f"{job.site}:/mnt:ro"]
    command += ["--volume", f"{job.wheels}:/mnt/wheels:ro"] if job.wheels else []
    return [[*command, *common], [tool, "push", tag, f"oci-archive:{job.output}"], [tool, "rmi", tag]]


def _build_args(arguments: Mapping[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]


def pick_tool(wanted: str | None, tools: Sequence[str], what: str) -> str:
    """The tool that was asked for, or the first of `tools` that is installed.

    Raises UserError when there is none.
    """
    if wanted is not None and wanted not in tools:
        raise UserError(f"--with {wanted}: {what} needs {' or '.join(tools)}{nearest(wanted, tools)}")
    for tool in [wanted] if wanted else tools:
        if shutil.which(tool):
            return tool
    raise UserError(f"{what} needs {wanted or ' or '.join(tools)}, and it is not installed here")


def recipe_arguments(dockerfile: str) -> dict[str, str]:
    """The parameters of the recipe with their defaults."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", dockerfile, re.MULTILINE))


def parse_arguments(words: Sequence[str]) -> dict[str, str]:
    """`FLASH_ATTN=0 MAX_JOBS=8` as a mapping. Raises UserError for another name or a value that cannot be one."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in SETTABLE:
            raise UserError(f"{word}: must be NAME=VALUE with one of {', '.join(SETTABLE)}{nearest(name, SETTABLE)}")
        pattern = r"0|\d+(;\d+)*" if name == "FLASH_ATTN" else r"[1-9]\d*"
        if not re.fullmatch(pattern, value):
            example = "0, or GPU architectures such as 80;90" if name == "FLASH_ATTN" else "a number of at least 1"
            raise UserError(f"{word}: must be {example}")
        found[name] = value
    return found


def choose_base(image: Image, given: str | None, mirror: Mirror | None) -> Base:
    """The image's own base (of the mirror, if there is one), or the stand-in that was given.

    Raises UserError when what was given is neither an archive nor an address with a digest, or is not what is recorded.
    """
    if given is None:
        if mirror is None:
            return Base(image.base.address, "docker", image.base.digest, stand_in=False)
        return Base(str(mirror.base(image.base.address)), "oci-archive", image.base.digest, stand_in=False)
    path = Path(given)
    if path.is_file():
        transport = inside.archive_kind(path)
        digest = "sha256:" + store.digest_shown(path, "reading the base")
        return Base(str(path.absolute()), transport, digest, stand_in=True)
    address = given.removeprefix("docker://")
    if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", address):
        raise UserError(
            f"--base {given}: is neither a file nor an address that ends in @sha256:DIGEST; a tag can be moved"
        )
    digest = address.rpartition("@")[2]
    return Base(address, "docker", digest, stand_in=digest != image.base.digest)


def site_settings(source: store.Source, folder: Path) -> None:
    """Fill `folder` with what this machine needs to reach its package index."""
    # python3 of this process: it is the one whose pip is set up for the project.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        ["sh", source.root / "containers" / "site.sh", folder],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise UserError(done.stderr.strip() or "containers/site.sh failed")


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
    """Run a tool; what it says goes to standard error and into the log as it comes.

    Raises WorkFailedError, with its last line, when it fails.
    """
    last = ""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                text = line.decode(errors="replace")
                sys.stderr.write(text)
                last = text.strip() or last
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise WorkFailedError(f"{command[0]} failed with exit code {code}: {last}\n  all that it said: {log}")


def version(tool: str) -> str:
    """`buildah 1.28.2`: a tool and its version."""
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\d+(\.\d+)+\S*", said)
    return f"{tool} {match[0].rstrip(',')}" if match else tool


def build(
    source: store.Source,
    name: str,
    words: Sequence[str],
    wanted: str | None,
    base_given: str | None,
    mirror_folder: Path | None,
) -> store.Record:
    """Build one image into the images' folder. Nothing appears there unless it is whole and holds the lock.

    Raises:
        UserError: something that can be seen beforehand is wrong, such as a lock that is not the recorded one.
        WorkFailedError: the builder failed, or made something else.
    """
    image = source.image(name)
    tool = pick_tool(
        wanted, [tool for tool, recipe in RECIPE_OF.items() if recipe in image.recipes], f"building {name}"
    )
    given = parse_arguments(words)
    arguments = recipe_arguments((source.root / "Dockerfile").read_text(encoding="utf-8")) | given
    arguments["LOCK"] = image.lock.name
    locks = installed_locks(image, arguments)
    require_locks(source.root, locks, source.file)
    mirror = open_mirror(mirror_folder) if mirror_folder else None
    if mirror:
        mirror.require([UV, *(lock.name for lock in locks)], source.root)
        if {":", ","} & set(str(mirror.folder)):
            raise UserError(f"{mirror.folder}: no builder mounts a path with a colon or a comma in it; rename it")
        if tool == "docker":
            raise UserError("--mirror: `docker build` mounts no folder; use --with buildah, podman or apptainer")
    base = choose_base(image, base_given, mirror)
    if tool == "docker" and base.transport != "docker":
        raise UserError(f"{base.where}: `docker build` takes no archive; use --with buildah, podman or apptainer")
    arguments.pop("BASE")
    expected = b"".join(lock_file(source.root, lock.name).read_bytes() for lock in locks)

    folder = store.images_folder(source)
    log = folder / f"{name}.log"
    # The folder's own path may hold a colon, which --bind does not take.
    with store.work_folder(folder, name) as work, tempfile.TemporaryDirectory(prefix="bridge-rl-site.") as site_folder:
        site = Path(site_folder)
        _offline(site) if mirror else site_settings(source, site)
        files = frozenset(path.name for path in site.iterdir())
        output = work / f"image{store.SUFFIX[kind_of(tool)]}"
        job = Job(name, base, arguments, site, files, mirror.wheels if mirror else None, output)
        log.unlink(missing_ok=True)
        for command in commands(tool, job):
            run(command, source.root, {"SOURCE_DATE_EPOCH": arguments["SOURCE_DATE_EPOCH"]}, log)
        contents = read(tool, output)
        require_installed(contents, expected, str(output.name))
        return keep(
            folder,
            output,
            contents,
            {
                "image": name,
                "kind": kind_of(tool),
                "lock": image.lock.sha256,
                "base": base.where,
                "base_digest": base.digest,
                "arguments": dict(arguments),
                "recipes": source.recipes(),
                "stand_in": base.stand_in,
                "pulled_from": None,
                "tool": version(tool),
            },
        )


def _offline(site: Path) -> None:
    """Let pip and uv take files from /mnt/wheels and from nowhere else."""
    (site / "wheels").mkdir()
    lines = ("PIP_NO_INDEX=1", "PIP_FIND_LINKS=/mnt/wheels", "UV_OFFLINE=1", "UV_NO_INDEX=1")
    (site / "env").write_text("\n".join([*lines, "UV_FIND_LINKS=/mnt/wheels"]) + "\n", encoding="utf-8")


def kind_of(tool: str) -> str:
    """`sif` or `oci`: what a tool makes."""
    return "sif" if RECIPE_OF.get(tool) == "Apptainer.def" else "oci"


def read(tool: str, path: Path) -> dict[str, bytes]:
    """What an image says of itself: the installed lock, Debian's packages, the distribution."""
    return inside.read_sif(tool, path) if kind_of(tool) == "sif" else inside.read_oci(path)


def require_installed(contents: Mapping[str, bytes], expected: bytes, what: str) -> None:
    """Raises WorkFailedError, with what differs, when an image does not hold exactly the expected locks."""
    if inside.INSTALLED not in contents:
        raise WorkFailedError(f"{what}: holds no /{inside.INSTALLED}: it was not made by containers/install.sh")
    found = contents[inside.INSTALLED]
    if found == expected:
        return
    sums = (hashlib.sha256(data).hexdigest() for data in (expected, found))
    lines = changes(
        parse_lock(expected.decode(), "the lock"), parse_lock(found.decode(errors="replace"), f"{what} /installed.txt")
    )
    raise WorkFailedError(
        "{}: holds another lock: expected sha256 {}, found {}\n{}".format(
            what, *sums, "\n".join(f"  {line}" for line in lines[:40]) or "  they differ in comments only"
        )
    )


def keep(folder: Path, made: Path, contents: Mapping[str, bytes], facts: Mapping[str, object]) -> store.Record:
    """Record an image that was just made or pulled, and publish it with its bill of materials.

    Args:
        folder: where images lie.
        made: the file, in a work folder.
        contents: what was read out of it.
        facts: the fields of the record that the file does not tell.
    """
    sha256 = store.digest_shown(made, f"reading {facts['image']}")
    record = store.Record.model_validate(
        {
            **facts,
            "digest": f"sha256:{sha256}" if facts["kind"] == "sif" else inside.read_manifest(made).digest,
            "sha256": sha256,
            "size": made.stat().st_size,
            "installed": hashlib.sha256(contents[inside.INSTALLED]).hexdigest(),
            "time": store.now(),
        }
    )
    store.publish(folder, made, record, materials(record, contents))
    return record


def materials(record: store.Record, contents: Mapping[str, bytes]) -> dict[str, object]:
    """The bill of materials of an image, from what it says of itself."""
    return cyclonedx(
        name=record.image,
        digest=record.digest,
        time=record.time,
        base=record.base,
        base_digest=record.base_digest,
        python=parse_lock(contents[inside.INSTALLED].decode(), f"/{inside.INSTALLED} of {record.file}"),
        debian=inside.debian_packages(contents.get(inside.DPKG, b"").decode(errors="replace")),
        distribution=inside.os_id(contents.get(inside.OS_RELEASE, b"").decode(errors="replace")),
    )
