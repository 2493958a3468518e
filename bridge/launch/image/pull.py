"""`image pull`: by digest only, and checked when it is here."""

from __future__ import annotations

from pathlib import Path

from bridge.config.images import Built, Image, Lock
from bridge.errors import UserError, WorkFailedError
from bridge.launch.image import inside, store
from bridge.launch.image.build import keep, kind_of, pick_tool, read, require_installed, run, version
from bridge.launch.image.locks import lock_file, require_locks

TOOLS = ["apptainer", "singularity", "skopeo"]


def command(tool: str, built: Built, output: Path) -> list[str]:
    """What brings a published image. skopeo keeps digests; Apptainer makes a SIF of whatever it is given."""
    assert built.reference is not None
    if tool == "skopeo":
        return ["skopeo", "copy", "--preserve-digests", built.reference, f"oci-archive:{output}"]
    return [tool, "pull", str(output), built.reference]


def choose(source: store.Source, name: str, image: Image, tool: str) -> Built:
    """The published image that a tool can bring, a SIF before an OCI image.

    Raises UserError when there is none, or when it was built from something else than images.yaml now says.
    """
    formats = ["sif", "oci"] if kind_of(tool) == "sif" else ["oci"]
    found = [built for kind in formats for built in image.built if built.format == kind and built.pull]
    if not found:
        listed = [built.reference for built in image.built if built.reference]
        raise UserError(
            f"{source.file}: images.{name}.built: lists nothing that {tool} can pull "
            f"({', '.join(listed) or 'nothing'}); build it: bridge-rl image build {name}"
        )
    built = found[0]
    for what, expected, actual in (
        ("lock", image.lock.sha256, built.lock),
        ("base", image.base.digest, built.base),
    ):
        if expected != actual:
            raise UserError(
                f"{source.file}: images.{name}.built: {built.digest} was built from another {what}: expected "
                f"{expected}, found {actual}; build it again, publish it, and list what was built"
            )
    return built


def pull(source: store.Source, name: str, wanted: str | None) -> store.Record:
    """Bring a published image into the images' folder. Nothing appears there unless it is what images.yaml says.

    Raises:
        UserError: nothing can be pulled, or a lock here is not the recorded one.
        WorkFailedError: the registry does not have it, or what came is something else.
    """
    image = source.image(name)
    tool = pick_tool(wanted, TOOLS, f"pulling {name}")
    built = choose(source, name, image, tool)
    require_locks(source.root, [image.lock, image.flash_attn], source.file)
    folder = store.images_folder(source)
    kind = kind_of(tool)
    with store.work_folder(folder, name) as work:
        output = work / f"image{store.SUFFIX[kind]}"
        try:
            run(command(tool, built, output), work, {}, folder / f"{name}.log")
        except WorkFailedError as error:
            raise WorkFailedError(f"{name}: {built.reference} was not pulled: {error}") from None
        if kind == "oci" or built.format == "sif":
            found = inside.read_manifest(output).digest if kind == "oci" else f"sha256:{_digest(output, name)}"
            if found != built.digest:
                raise WorkFailedError(f"{built.reference}: expected {built.digest}, found {found}; nothing was kept")
        contents = read(tool, output)
        expected = _expected(source, image, contents)
        require_installed(contents, expected, str(built.reference))
        return keep(
            folder,
            output,
            contents,
            {
                "image": name,
                "kind": kind,
                "lock": built.lock,
                "base": image.base.address,
                "base_digest": built.base,
                "arguments": {},
                "recipes": {},
                "stand_in": False,
                "pulled_from": built.reference,
                "tool": version(tool),
            },
        )


def _digest(path: Path, name: str) -> str:
    return store.digest_shown(path, f"reading {name}")


def _expected(source: store.Source, image: Image, contents: dict[str, bytes]) -> bytes:
    """What the image has to have installed: the lock, and flash-attn's if it has that."""

    def data(lock: Lock) -> bytes:
        return lock_file(source.root, lock.name).read_bytes()

    both = data(image.lock) + data(image.flash_attn)
    return both if contents.get(inside.INSTALLED) == both else data(image.lock)
