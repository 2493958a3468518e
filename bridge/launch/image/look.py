"""`image list`, `verify` and `sbom`, and how the commands show what they found."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from bridge.artifacts import write_json
from bridge.errors import UserError
from bridge.launch.image import inside, store
from bridge.launch.image.build import materials, pick_tool
from bridge.launch.image.locks import require_locks
from bridge.launch.prune import size_text
from bridge.launch.show import Json, console


def overview(source: store.Source, name: str | None) -> Json:
    """Every image of images.yaml with what lies here of it. Reads no image."""
    folder, recipes = store.images_folder(source), source.recipes()
    found = []
    for key, image in source.choose(name).items():
        here = [
            {
                **facts(record, folder),
                "wrong": _missing(record, folder) or store.differences(record, image),
                "notes": store.notes(record, image, recipes),
            }
            for record in store.records(folder, key)
        ]
        published = [built.reference or f"{built.format} {built.digest}" for built in image.built]
        locks: str | None = None
        try:
            require_locks(source.root, [image.lock, image.flash_attn], source.file)
        except UserError as error:
            locks = str(error)
        found.append(
            {
                "image": key,
                "base": f"{image.base.tag}@{image.base.digest}",
                "lock": image.lock.name,
                "lock_wrong": locks,
                "published": published,
                "here": here,
            }
        )
    return {"file": str(source.file), "folder": str(folder), "images": found}


def facts(record: store.Record, folder: Path) -> Json:
    """A record as the commands print it, with the image's path."""
    return {"path": str(folder / record.file), **record.model_dump(mode="json", exclude={"format", "recipes"})}


def _missing(record: store.Record, folder: Path) -> list[str]:
    return [] if (folder / record.file).is_file() else ["the file is missing"]


def verify(source: store.Source, name: str | None) -> list[Json]:
    """Read every image of that name, or all, from the first byte to the last, and compare it with what is recorded.

    Raises UserError when there is none.
    """
    folder, recipes = store.images_folder(source), source.recipes()
    images = source.choose(name)
    rows = []
    for record in _require(folder, name, [r for r in store.records(folder) if r.image in images]):
        image, path = images[record.image], folder / record.file
        wrong = store.differences(record, image)
        try:
            store.verify(folder, record)
        except UserError as error:
            wrong.insert(0, str(error))
        notes = store.notes(record, image, recipes)
        rows.append({"image": record.image, "path": str(path), "ok": not wrong, "wrong": wrong, "notes": notes})
    return rows


def _require(folder: Path, name: str | None, found: list[store.Record]) -> list[store.Record]:
    if not found:
        what = name or "NAME"
        raise UserError(
            f"{folder}: has no image{f' {name}' if name else ''}; make one with `bridge-rl image build {what}` or "
            f"`bridge-rl image pull {what}`"
        )
    return found


def sbom(source: store.Source, name: str) -> Json:
    """Write the bill of materials beside each image of that name anew, from what the image says of itself.

    Raises:
        UserError: there is no such image, or it has changed.
        WorkFailedError: it holds another lock than its record says.
    """
    folder = store.images_folder(source)
    source.image(name)
    written: Json = {}
    for record in _require(folder, name, store.records(folder, name)):
        path = folder / record.file
        store.verify(folder, record)
        if record.kind == "sif":
            contents = inside.read_sif(pick_tool(None, ["apptainer", "singularity"], "looking into a SIF"), path)
        else:
            contents = inside.read_oci(path)
        target = folder / (record.file + store.SBOM)
        written[str(target)] = materials(record, contents)
        write_json(target, written[str(target)])
    return written


# ---- for people


def print_overview(value: Json) -> None:
    table = Table()
    for column in ("image", "lock", "file", "size", "made", "what"):
        table.add_column(column, overflow="fold")
    for image in value["images"]:
        rows = image["here"] or [None]
        for place, item in enumerate(rows):
            key, lock = (image["image"], image["lock"]) if place == 0 else ("", "")
            if item is None:
                published = " ".join(image["published"])
                what = [f"can be pulled: {published}" if published else "neither built nor published"]
                table.add_row(key, lock, "", "", "", _cell([*_lock_wrong(image), *what]))
            else:
                what = [*_lock_wrong(image), *item["wrong"], *item["notes"]]
                made = f"{item['time']} {item['tool']}"
                table.add_row(key, lock, Path(item["path"]).name, size_text(item["size"]), made, _cell(what))
    console().print(table)
    console().print(f"images lie in {value['folder']}", markup=False)


def _lock_wrong(image: Json) -> list[str]:
    return [image["lock_wrong"]] if image["lock_wrong"] else []


def _cell(lines: list[str]) -> str:
    return escape("\n".join(lines))


def print_made(record: store.Record, folder: Path) -> None:
    """What was built or pulled; what was built can be listed in images.yaml once it is published."""
    sys.stdout.write(f"{folder / record.file}\n")
    if record.pulled_from or record.stand_in:
        return
    fields = {"format": record.kind, "digest": record.digest, "lock": record.lock, "base": record.base_digest}
    lines = "\n".join(f"          {key}: {value}" for key, value in fields.items())
    sys.stderr.write(
        f"to let others pull it, push it to a registry and list it in images.yaml under images.{record.image}.built:\n"
        f"        -\n{lines}\n          pull: …\n"
    )


def print_saved(value: Json) -> None:
    sys.stdout.write(f"{value['folder']}: {value['files']} package files, {size_text(value['bytes'])}\n")
    for address, base in value["bases"].items():
        sys.stdout.write(f"    {base['file']}: {address}\n")


def print_verified(rows: list[Json]) -> None:
    for row in rows:
        state = "ok" if row["ok"] else "WRONG"
        sys.stdout.write(f"{state}  {row['path']}\n")
        for line in [*row["wrong"], *row["notes"]]:
            sys.stdout.write(f"    {line}\n")


def print_check(value: Json) -> None:
    sys.stdout.write(f"{value['packages']} packages, {value['files']} locked files\n")
    for item in value["problems"]:
        can = "it can still be installed" if item["can_be_installed"] else "it can NOT be installed any more"
        if item["missing"] or not item["can_be_installed"]:
            sys.stdout.write(f"{item['package']}: {len(item['missing'])} locked files are gone; {can}\n")
            for digest in item["missing"][:10]:
                sys.stdout.write(f"    sha256:{digest}\n")
        for file in item["yanked"]:
            sys.stdout.write(f"{item['package']}: withdrawn by its authors, still there: {file}\n")
    for base in value["bases"]:
        sys.stdout.write(f"base {base['base']}: {base['digest']}: {base['state']} {base['reason']}".rstrip() + "\n")
        if base["tag_now"] and base["tag_now"] != base["digest"]:
            sys.stdout.write(f"    the tag was moved: expected {base['digest']}, found {base['tag_now']}\n")
