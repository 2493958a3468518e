"""Checkpoints made for the tests of conversion, and independent readers for what came out."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def folder(path: Path, content: Any, name: str = "checkpoint.pt", **config: Any) -> Path:
    """A folder with `content` saved by torch and a config; returns the checkpoint file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    torch.save(content, path / name)
    return path / name


def raw_archive(path: Path, pickle: bytes, records: dict[str, bytes] | None = None) -> Path:
    """An archive like torch's around a hand-written pickle, with a config beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", "little")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/{name}", data)
    return path


def loaded(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, read by the safetensors library."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def config_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text(encoding="utf-8"))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
