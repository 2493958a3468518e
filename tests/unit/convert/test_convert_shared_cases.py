"""Real checkpoints of torch 2.6 and 2.13 with their true tensors, where their folder lies beside the project."""

import json
from pathlib import Path

import pytest
from checkpoints import config_of, loaded, same_bits
from safetensors.torch import load_file

from bridge.convert import convert
from bridge.errors import UserError

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases" / "checkpoints"
NAMES = sorted(
    path.parent.name
    for pattern in ("plain_*", "bin_*", "tie_flag_*", "mal_*", "zip_*", "index_*", "empty_*", "tensor_outside_*")
    for path in CASES.glob(f"{pattern}/case.json")
)
OTHERS = sorted(
    path.parent.name
    for pattern in ("dcp_*", "ds_*", "fsdp*", "peft_*", "missing_rank", "mixed_world*")
    for path in CASES.glob(f"{pattern}/case.json")
)


def test_the_cases_are_there() -> None:
    if not CASES.is_dir():
        pytest.skip("../shared/cases is not beside this checkout")
    assert len(NAMES) >= 13


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES / name
    info = json.loads((case / "case.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT_MARKER", str(tmp_path / "marker"))
    source, out = case / "src" / info["entry"], tmp_path / "out"
    if info["kind"] == "refuse":
        with pytest.raises(UserError):
            convert(source, out)
        assert list(tmp_path.iterdir()) == []
        return
    report = convert(source, out)
    want, got = load_file(case / "expected.safetensors"), loaded(out)
    assert set(got) == set(want)
    assert all(same_bits(got[key], want[key]) for key in want)
    assert info["dtype_default"] == report.dtype
    assert set(report.tied) <= set(info.get("tied_aliases", {}))
    config = config_of(out)
    assert {key: config[key] for key in info.get("config_expect", {})} == info.get("config_expect", {})


@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_are_not_supported_are_named(name: str, tmp_path: Path) -> None:
    info = json.loads((CASES / name / "case.json").read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=r"DCP|FSDP|DeepSpeed|LoRA|Megatron|DTensor"):
        convert(CASES / name / "src" / info["entry"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
