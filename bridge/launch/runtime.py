"""The image that a run uses: whether this cluster has it, and what is inside.

The experiment names it, `containers/images.yaml` says what it is built from, and the profile where this cluster has it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.artifacts import file_digest
from bridge.config.profile import Profile, Runtime, allocation
from bridge.config.stages import Resources
from bridge.errors import UserError, WorkFailedError
from bridge.launch.container import PYTHON, SET, Image, path_inside

if TYPE_CHECKING:
    from bridge.graph import Graph
    from bridge.runs import Run

Json = dict[str, Any]

INSTALLED = "opt/bridge/installed.txt"
"""In an image, the list of what was installed: its lock, and that of flash-attn where it was not left out."""
PATIENCE = 600  # seconds; a SIF that no squashfuse can mount is unpacked at each start


def runtimes(graph: Graph, profile: Profile, image: str | None, name: str) -> dict[str, Runtime]:
    """Kind of a stage → what starts its image, for the kinds that run in one.

    Raises:
        UserError: the experiment wants an image, and the profile `name` does not say what starts it.
    """
    found: dict[str, Runtime] = {}
    for node in graph.stages if image else ():
        runtime = allocation(profile, node.kind, Resources()).runtime
        if runtime is None:
            what = f"the experiment wants the image {image!r}, and the profile does not say what starts it"
            remedy = "write `defaults: {runtime: apptainer}`, or `none` to run in the environment of `python`"
            raise UserError(f"profile {name}: {what}; {remedy}")
        if runtime != "none" and profile.cluster == "local":
            raise UserError(f"profile {name}: runtime: a local profile starts no images; write `none`, or use Slurm")
        if runtime != "none":
            found[node.kind] = runtime
    return found


def find(name: str, profile: Profile, externals: Mapping[str, Json]) -> Image:
    """The image as this cluster has it.

    Raises:
        UserError: it is not where the profile says.
    """
    place = profile.images.get(name) or built_here(name)
    if place is None:
        remedy = f"`bridge-rl image build {name}` makes it, or say in the profile where it is: `images: {{{name}: …}}`"
        raise UserError(f"there is no image {name!r} here; {remedy}")
    binds = binds_of(externals)
    if "://" in place or "#" in place:
        if "@sha256:" not in place:
            raise UserError(f"images.{name}: {place}: an address must end in a digest, @sha256:…: a tag can move")
        return Image(name, place, place, None, binds)
    path = Path(place).expanduser().absolute()
    try:
        checked = path / INSTALLED if path.is_dir() else path
        if not checked.is_file():
            remedy = f"`bridge-rl image build {name}` or `bridge-rl image pull {name}` makes it"
            raise UserError(f"images.{name}: {checked}: there is no such file; {remedy}")
        checked.open("rb").close()
        return Image(name, str(path), str(checked), known_digest(checked) or file_digest(checked), binds)
    except OSError as error:
        raise UserError(f"images.{name}: {path}: {error.strerror}; whoever launches must be able to read it") from None


def binds_of(externals: Mapping[str, Json]) -> dict[str, str]:
    """What a record's inputs need inside: the path there → the one outside."""
    return {inside: real for external in externals.values() for inside, real in external.get("binds", {}).items()}


def require_fit(image: Image, runtimes: Mapping[str, Runtime]) -> None:
    """UserError when a runtime cannot start what the profile names."""
    wants = {"charliecloud": "a folder", "pyxis": "a file or an address"}
    is_folder = Path(image.place).is_dir()
    for runtime in runtimes.values():
        fits = is_folder if runtime == "charliecloud" else not is_folder
        if not fits or (image.sha256 is None and runtime != "pyxis"):
            raise UserError(f"images.{image.name}: {image.place}: {runtime} takes {wants.get(runtime, 'a SIF file')}")


def built_here(name: str) -> str | None:
    """The newest SIF of an image that `bridge-rl image build` or `pull` made, if it is what images.yaml describes."""
    from bridge.launch.image import store

    source = store.open_source(None)
    folder = store.images_folder(source)
    image = source.images.get(name)
    for record in store.records(folder, name):
        if record.kind == "sif" and image and not store.differences(record, image):
            return str(folder / record.file)
    return None


def image_of(declared: Json | None, profile: Profile, externals: Mapping[str, Json]) -> Image | None:
    """The image of a request or of a run's record as this cluster has it; None where no stage runs in one."""
    return find(declared["name"], profile, externals) if declared else None


def record_beside(path: Path) -> Json:
    """What `bridge-rl image` wrote beside a SIF; nothing where it did not."""
    try:
        record = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def known_digest(path: Path) -> str | None:
    """The SHA-256 that stands beside a SIF. Jobs read the file itself, so a wrong one is found."""
    digest = record_beside(path).get("sha256")
    return digest if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) else None


def look_words(image: Image, runtime: Runtime, gpus: int, *arguments: str) -> list[str]:
    """The command that runs inside.py in an image, outside of any run. Pure but for the text of inside.py."""
    program = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    fixed = [f"{name}={SET[name]}" for name in ("HOME", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE")]
    python = ["/usr/bin/env", f"PATH={path_inside(PYTHON)}", *fixed, PYTHON, "-c", program, *arguments]
    if runtime == "charliecloud":
        return ["ch-run", image.place, "--", *python]
    return [runtime, "exec", "--cleanenv", "--no-home", *(["--nv"] if gpus else []), image.place, *python]


def look_inside(image: Image, runtime: Runtime) -> Json | None:
    """Python, packages and the list of what was installed, as seen inside; None where this machine has no runtime.

    Raises:
        WorkFailedError: the image does not start.
    """
    words = look_words(image, runtime, 0)
    if runtime == "pyxis" or shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, cwd="/", check=False)
    except subprocess.TimeoutExpired:
        raise WorkFailedError(f"{image.place}: did not start within {PATIENCE} s") from None
    found = answer(done.stdout)
    if found is None:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WorkFailedError(f"{image.place}: {runtime} cannot run {PYTHON} in it: {said}")
    return found


def answer(printed: str) -> Json | None:
    """What inside.py printed, among whatever else was printed."""
    for line in reversed(printed.splitlines()):
        if line.startswith('{"python"'):
            found: Json = json.loads(line)
            return found
    return None


def as_recorded(image: Image, runtime: Runtime, declared: Json, locks: Sequence[Path]) -> Json:
    """What a run's record says of its image, beside what it is built from.

    Args:
        image: as this cluster has it.
        runtime: what starts it here, to look inside.
        declared: what it is built from, as the record has it.
        locks: the lock's file, and that of flash-attn.

    Raises:
        UserError: what is inside was installed from another lock, or on another base.
        WorkFailedError: the image does not start.
    """
    inside = look_inside(image, runtime)
    if inside is not None:
        texts = [path.read_bytes() for path in locks]
        allowed = {hashlib.sha256(text).hexdigest() for text in (texts[0], b"".join(texts))}
        inside = {key: inside[key] for key in ("python", "packages", "installed")}
        if inside["installed"] not in allowed:
            raise UserError(
                f"{image.place}: was built from another lock than {declared['lock']['name']} is now "
                f"(SHA-256 {declared['lock']['sha256'][:12]}…): build it again"
            )
    record = record_beside(Path(image.checked))
    built_on = record.get("base_digest")
    if built_on is not None and built_on != declared["base"]["digest"] and not record.get("stand_in"):
        raise UserError(
            f"{image.place}: was built on another base: expected {declared['base']['digest']}, found {built_on}: "
            "build it again"
        )
    found = {"place": image.place, "sha256": image.sha256, "runtime": runtime}
    return {**found, "built_on": built_on, "inside": inside}


def last_image(run: Run) -> Json | None:
    """What the record says of a run's image, with the place and the digest of the last launch; None without one."""
    declared: Json | None = run.record.get("image")
    noted = [line["image"] for line in run.submissions() if line.get("image")]
    return declared and {**declared, **(noted[-1] if noted else {})}


def require_same_lock(run: Run, image: Image | None) -> None:
    """UserError when the image that is here now holds other packages than the run's, as far as this machine can look.

    Raises:
        UserError: it holds others.
        WorkFailedError: it does not start.
    """
    declared = run.record.get("image")
    if image is None or declared is None or declared.get("inside") is None:
        return
    inside = look_inside(image, declared["runtime"])
    if inside is not None and inside["installed"] not in (declared["lock"]["sha256"], declared["inside"]["installed"]):
        then, now = declared["inside"]["packages"], inside["packages"]
        other = [f"{p} {now.get(p)}, not {then.get(p)}" for p in sorted({*then, *now}) if then.get(p) != now.get(p)]
        what = ", ".join(other[:5]) or "the same versions from another lock"
        raise UserError(f"{run.id}: {image.place} holds other packages ({what}); launch the experiment as a new run")


def require_same(run: Run, image: Image | None) -> None:
    """UserError when a run was last launched with another image than the one that is here now."""
    then = last_image(run)
    if image is None or then is None:
        return
    if then.get("sha256") != image.sha256 or (image.sha256 is None and then["place"] != image.place):
        before, now = (
            f"SHA-256 {sha256[:12]}…" if sha256 else place
            for sha256, place in ((then.get("sha256"), then.get("place")), (image.sha256, image.place))
        )
        raise UserError(
            f"{run.id}: was launched with another image ({before}) than {image.place} is now ({now}); "
            f"put the old one back, or go on with this one: `bridge-rl resume {run.id} --force`"
        )
