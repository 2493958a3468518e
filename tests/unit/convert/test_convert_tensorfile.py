"""safetensors folders as sources: verified, re-sharded, re-typed, and refused if anything does not add up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIG, config_of, loaded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bridge.convert import convert, inspect
from bridge.errors import UserError

TENSORS = {
    "a": torch.arange(600.0).reshape(30, 20),
    "b": torch.arange(7),
    "c": torch.tensor(2.5, dtype=torch.bfloat16),
    "d": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "packed.weight": torch.arange(9, dtype=torch.uint8),
}


def model(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    save_file(TENSORS, path / "model.safetensors")
    return path


def handmade(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    path.mkdir()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def test_a_folder_is_cut_anew_and_cast(tmp_path: Path) -> None:
    source = model(tmp_path / "src", quantization_config={"quant_method": "bitsandbytes"})
    convert(source, tmp_path / "many", max_shard_size=1000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    report = convert(tmp_path / "many", tmp_path / "one", dtype="bfloat16")
    assert (report.format, report.files) == ("safetensors", 1)
    got = loaded(tmp_path / "one")
    assert set(got) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert same_bits(got[name], tensor.to(torch.bfloat16) if name == "a" else tensor), name
    assert config_of(tmp_path / "one")["quantization_config"] == {"quant_method": "bitsandbytes"}
    assert inspect(tmp_path / "many")["dtypes"]["float32"] == 2400


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(shape=(3,))}, "not what its shape needs"),
        ({"a": entry(offsets=(4, 12))}, "hole at byte 0"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "belong to no tensor"),
        ({"a": entry(shape=(4,), offsets=(0, 16))}, "cut off"),
        ({"a": entry(shape=(-2,))}, "not described"),
        ({"a": entry(shape=(2.0,))}, "not described"),
        ({"a": entry(shape=(1,) * 40)}, "not described"),
        ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0)), "b": entry()}, "overflows 64 bits"),
        ({"a": entry(shape=(2**62, 2**62))}, "not what its shape needs"),
        ({"a": entry("F4", (16,))}, "'F4', which is not known"),
        ({"a": 3}, "not described"),
        ([1], "no JSON object"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b"{" * 100_000, "no valid JSON"),
        (b"\xff\xfe", "no valid JSON"),
        (b'{"a": [' + b"[]," * 5_000_000 + b"[]]}", "more than 4,000,000 values"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    source = handmade(tmp_path / "src", header)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def drop_file(path: Path) -> None:
    next(path.glob("model-00002*")).unlink()


def leave_stale(path: Path) -> None:
    shutil.copy(next(path.glob("model-00001*")), path / "model.safetensors")
    (path / "model.safetensors.index.json").unlink()


def point(path: Path, to: str | None = None) -> None:
    """Change where the index says `a` is; None is another file that is there."""
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text(encoding="utf-8"))
    value["weight_map"]["a"] = to or next(
        file for file in value["weight_map"].values() if file != value["weight_map"]["a"]
    )
    index.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_file, "1 of its 3 files are missing"),
        (leave_stale, "no index that says which count"),
        (lambda path: point(path, "../secret"), "leads out of the folder"),
        (point, "do not agree about 'a'"),
    ],
)
def test_a_set_that_does_not_add_up_is_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    convert(model(tmp_path / "src"), tmp_path / "many", max_shard_size=1000)
    change(tmp_path / "many")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "many", tmp_path / "out")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 700), new=st.binary(min_size=1, max_size=3))
def test_a_mutated_file_converts_or_is_refused(tmp_path_factory: pytest.TempPathFactory, at: int, new: bytes) -> None:
    home = tmp_path_factory.mktemp("mutated")
    source = model(home / "src")
    raw = bytearray((source / "model.safetensors").read_bytes())
    raw[at : at + len(new)] = new
    (source / "model.safetensors").write_bytes(raw)
    try:
        convert(source, home / "out")
    except UserError as error:
        assert str(error)
    else:
        assert sum(tensor.nbytes for tensor in loaded(home / "out").values()) == sum(t.nbytes for t in TENSORS.values())
    shutil.rmtree(home)
