"""What lies at a path: recognised by what it holds, never by a flag."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.convert.archive import MAGIC
from bridge.convert.plain import LEGACY_MAGIC, open_file, open_index
from bridge.convert.source import Source, SourceFile
from bridge.errors import UserError

INDEX = "pytorch_model.bin.index.json"

_FOLDERS = (
    (r"\.metadata|__\d+_\d+\.distcp", "torch distributed checkpoint (DCP)"),
    (r"model_world_size_\d+_rank_\d+\.pt", "FSDP shards in verl's layout"),
    (
        r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_.*_states\.pt|mp_rank_\d+_model_states\.pt|zero_to_fp32\.py|global_step\d+",
        "DeepSpeed ZeRO",
    ),
    (r"adapter_model\.(bin|safetensors)|adapter_config\.json", "LoRA adapter (PEFT)"),
    (r"pytorch_model_fsdp(_\d+)?_rank_?\d+\.bin|pytorch_model_fsdp_\d+", "FSDP shards of accelerate"),
    (r"ckpt_contents\.json|mp_rank_\d+(_\d+)*|latest_checkpointed_iteration\.txt", "Megatron or verl run folder"),
    (r"latest_universal", "DeepSpeed universal checkpoint"),
    (r".*\.safetensors(\.index\.json)?", "safetensors (already converted)"),
)
"""(pattern of a name in the folder, format): recognised so that the message can name it, and not converted yet."""

_NO_WEIGHTS = re.compile(
    r"(optim|optimizer|scheduler|scaler|sampler|rng|rng_state|random_states|extra_state|training_args|data)(\W|_).*"
)
"""Files beside the weights. They hold arbitrary objects and are never opened."""


def open_source(path: Path) -> Source:
    """The checkpoint at `path`, a file or a folder that holds one, opened for reading.

    UserError if there is none, more than one, one of a format that is not supported yet, or a damaged or unsafe one.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return open_index(path, inside)
    _check_file(path)
    return open_file(path)


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` in `folder`, if that is where it really lies.

    The name may come from an index, so it must be a bare file name; a link must not lead out of the folder, except
    from a snapshot of the Hugging Face cache to the blobs beside it. UserError otherwise.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{folder}: the file name {name[:120]!a} leads out of the folder; refused as unsafe")
    path = folder / name
    if path.is_symlink():
        home = folder.resolve()
        homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        if path.resolve().parent not in homes:
            raise UserError(f"{path}: is a link that leads out of the folder; copy the file instead")
    return path


def _open_folder(folder: Path) -> Source:
    names = sorted(entry.name for entry in folder.iterdir())
    index = INDEX in names
    candidates = [
        name
        for name in names
        if name.endswith((".pt", ".pth", ".bin", ".ckpt")) and not _NO_WEIGHTS.match(name) and (folder / name).is_file()
    ]
    for pattern, what in _FOLDERS:
        found = next((name for name in names if re.fullmatch(pattern, name)), None)
        if found is not None:
            raise UserError(f"{folder}: holds {what} ({found}), a format that is not supported yet")
    if index:
        candidates = [name for name in candidates if not re.fullmatch(r"pytorch_model-\d+-of-\d+\.bin", name)]
        if not candidates:
            return open_index(folder / INDEX, inside)
    if len(candidates) != 1 or index:
        listed = ", ".join([*candidates[:6], *([INDEX] if index else [])])
        what = f"holds several checkpoints ({listed}); name one of them" if listed else "holds no checkpoint file"
        raise UserError(f"{folder}: {what}" + ("" if listed else " (.pt, .pth, .bin or .ckpt); give its path"))
    path = inside(folder, candidates[0])
    _check_file(path)
    return open_file(path)


def _check_file(path: Path) -> None:
    """UserError with the reason if the file is no torch.save file."""
    file = SourceFile(path)
    try:
        head = file.read(0, min(file.size, 512))
    finally:
        file.close()
    if head[:4] == MAGIC or head.startswith(LEGACY_MAGIC):
        return
    if not head:
        raise UserError(f"{path}: is empty; copy it again or take an earlier checkpoint")
    raise UserError(f"{path}: is {_guess(head)}, not a torch.save checkpoint; give a checkpoint file or folder")


def _guess(head: bytes) -> str:
    if head[257:262] == b"ustar":
        return "a tar file of torch before 0.4 or something else in tar, a format that is not supported"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer whose content was not downloaded (run git lfs pull)"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return "a safetensors file, a format that is not supported yet"
    if head[:1] == b"\x80":
        return "a bare pickle"
    return "an unknown kind of file"
