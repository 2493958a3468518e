"""Real checkpoints of torch 2.6 and 2.13, DeepSpeed and PEFT with their true tensors, where they lie nearby."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, loaded, same_bits
from safetensors.torch import load_file

from bridge.convert import convert, inspect
from bridge.errors import UserError

ROOTS = [folder / "shared" / "cases" / "checkpoints" for folder in Path(__file__).resolve().parents[4:6]]
CASES = next((folder for folder in ROOTS if folder.is_dir()), ROOTS[0])
NAMES = sorted(path.parent.name for path in CASES.glob("*/case.json"))


def test_the_cases_are_there() -> None:
    if not CASES.is_dir():
        pytest.skip("../shared/cases is not beside this checkout")
    assert len(NAMES) == 36


def described(name: str) -> dict[str, Any]:
    return json.loads((CASES / name / "case.json").read_text(encoding="utf-8"))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None) -> bool:
    return same_bits(got, want) or (tolerance is not None and torch.allclose(got, want, rtol=0, atol=tolerance))


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, info = CASES / name, described(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT_MARKER", str(tmp_path / "marker"))
    source, out = case / "src" / info["entry"], tmp_path / "out"
    if info["kind"] == "refuse":
        with pytest.raises(UserError):
            convert(source, out)
        assert list(tmp_path.iterdir()) == []
        return
    base = case / info["base"] if "base" in info else None
    report = convert(source, out, dtype=info.get("dtype", "auto"), base=base)
    want, got = load_file(case / "expected.safetensors"), loaded(out)
    assert set(got) == set(want)
    tolerance = info.get("tolerance", {}).get("abs")
    assert all(close(got[key], want[key], tolerance) for key in want)
    assert info["dtype_default"] == report.dtype
    assert set(report.tied) <= set(info.get("tied_aliases", {}))
    config = config_of(out)
    assert {key: config[key] for key in info.get("config_expect", {})} == info.get("config_expect", {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", [name for name in NAMES if (CASES / name / "expected_fp32.safetensors").exists()])
def test_masters_are_read_where_float32_is_asked_for(name: str, tmp_path: Path) -> None:
    convert(CASES / name / "src", tmp_path / "out", dtype="float32")
    want, got = load_file(CASES / name / "expected_fp32.safetensors"), loaded(tmp_path / "out")
    assert set(got) == set(want)
    for key, tensor in want.items():  # the files keep some buffers narrow; a request for float32 widens every float
        assert same_bits(got[key], tensor.float() if tensor.is_floating_point() else tensor), key


@pytest.mark.parametrize("name", [name for name in NAMES if described(name).get("also_inputs")])
def test_a_parent_folder_gives_its_newest_step(name: str, tmp_path: Path) -> None:
    for number, entry in enumerate(described(name)["also_inputs"]):
        convert(CASES / name / entry, tmp_path / str(number))
        want, got = load_file(CASES / name / "expected.safetensors"), loaded(tmp_path / str(number))
        assert all(same_bits(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", [name for name in NAMES if described(name)["kind"] == "ok"])
def test_inspect_finds_what_is_converted(name: str) -> None:
    info = described(name)
    if "base" not in info:
        facts = inspect(CASES / name / "src" / info["entry"])
        held = {tensor["name"] for tensor in facts["tensors"]}
        want = set(load_file(CASES / name / "expected.safetensors"))
        assert want <= {name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in held}
