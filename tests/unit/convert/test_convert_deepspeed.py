"""DeepSpeed ZeRO checkpoints, laid out here by hand as DeepSpeed's own writer lays them out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIG, loaded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.convert import convert, inspect
from bridge.convert.source import IncompleteError
from bridge.errors import UserError

SHAPES = [{"embed_tokens.weight": (7, 3), "norm": (5,)}, {"up": (2, 3, 2), "scalar": (), "bias": (1,)}]


def masters(shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for group in shapes for name, shape in group.items()}


def write_zero(
    folder: Path, stage: int, world: int, shapes: list[dict[str, tuple[int, ...]]] = SHAPES, sub_groups: int = 1
) -> dict[str, torch.Tensor]:
    """A tag's folder under `folder`; returns the fp32 masters."""
    tag = folder / "global_step9"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step9", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    whole = masters(shapes)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()}
    buffers = {"steps": torch.tensor(12), "mask": torch.tensor([True, False])}
    frozen = {"frozen.weight": torch.arange(10, dtype=torch.bfloat16).reshape(5, 2)}
    state: dict[str, Any] = {
        "module": {**half, **buffers, **frozen},
        "buffer_names": list(buffers),
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
        "shared_params": {"lm_head.weight": "embed_tokens.weight"} if "embed_tokens.weight" in whole else {},
        "dp_world_size": world,
        "global_steps": 9,
    }
    flat: list[list[torch.Tensor]] = [[] for _ in range(world)]
    if stage < 3:
        if state["shared_params"]:
            state["module"]["lm_head.weight"] = half["embed_tokens.weight"]
        torch.save(state, tag / "mp_rank_00_model_states.pt")
        for group in shapes:
            line = torch.cat([torch.empty(0), *(whole[name].reshape(-1) for name in group)])
            line = torch.cat([line, torch.zeros(-len(line) % (2 * world))])
            for rank, part in enumerate(line.chunk(world)):
                flat[rank].append(part.clone())
    else:
        parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for tensor in whole.values():
            size = -(-tensor.numel() // world)
            padded = torch.cat([tensor.reshape(-1), torch.full((size * world - tensor.numel(),), torch.nan)])
            for rank in range(world):
                parts[rank].append(padded[rank * size : (rank + 1) * size])
        for rank in range(world):
            line = torch.cat(parts[rank])
            flat[rank] = [part.clone() for part in line.tensor_split(sub_groups)]
        empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in [*whole, *frozen]}
        for rank in range(world):
            size = -(-10 // world)
            padded = torch.cat([frozen["frozen.weight"].reshape(-1), torch.zeros(size * world - 10).bfloat16()])
            mine = {
                **state,
                "module": {**empty, **buffers},
                "frozen_param_shapes": {"frozen.weight": torch.Size((5, 2))},
                "frozen_param_fragments": {"frozen.weight": padded[rank * size : (rank + 1) * size].clone()},
            }
            torch.save(mine, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    count: Any = world if stage == 3 else [world] * len(shapes)
    for rank in range(world):
        optimizer = {"zero_stage": stage, key: flat[rank], "partition_count": count, "loss_scaler": None}
        torch.save({"optimizer_state_dict": optimizer}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return {**whole, **buffers, **frozen}


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, tuple[int, ...]]]:
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=7))
    cut = draw(st.integers(0, len(shapes)))
    named = {f"w{number}": shape for number, shape in enumerate(shapes)}
    names = list(named)
    return [{name: named[name] for name in part} for part in (names[:cut], names[cut:]) if part]


@settings(max_examples=40, deadline=None)
@given(shapes=groups(), stage=st.sampled_from([1, 2, 3]), world=st.integers(1, 5), sub_groups=st.integers(1, 4))
def test_masters_are_put_together_exactly(
    tmp_path_factory: pytest.TempPathFactory, shapes: Any, stage: int, world: int, sub_groups: int
) -> None:
    home = tmp_path_factory.mktemp("zero")
    want = write_zero(home / "src", stage, world, shapes, sub_groups)
    convert(home / "src", home / "out", dtype="float32")
    got = loaded(home / "out")
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor.float() if tensor.is_floating_point() else tensor), name


@pytest.mark.parametrize(
    ("stage", "dtype", "format"),
    [
        (2, "auto", "deepspeed-module"),
        (2, "bfloat16", "deepspeed-module"),
        (2, "float32", "deepspeed-zero-masters"),
        (1, "float16", "deepspeed-zero-masters"),
        (3, "auto", "deepspeed-zero3"),
        (3, "bfloat16", "deepspeed-zero3"),
    ],
)
def test_the_16_bit_module_serves_unless_more_is_asked_for(tmp_path: Path, stage: int, dtype: str, format: str) -> None:
    want = write_zero(tmp_path / "src", stage, 2)
    report = convert(tmp_path / "src", tmp_path / "out", dtype=dtype)
    assert report.format == format
    assert report.tied == ["lm_head.weight"]
    got = loaded(tmp_path / "out")
    wide = {"auto": torch.float32 if stage == 3 else torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    for name in masters(SHAPES):
        assert same_bits(got[name], want[name].to(wide)), name
    assert same_bits(got["steps"], want["steps"]) and same_bits(got["mask"], want["mask"])


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    write_zero(tmp_path / "z3", 3, 3)
    tag = tmp_path / "z3" / "global_step9"
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt"):
        convert(tmp_path / "z3", tmp_path / "out")
    (tag / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    assert "zero_pp_rank_2_mp_rank_00_model_states.pt" in inspect(tmp_path / "z3")["missing"]
    write_zero(tmp_path / "z2", 2, 3)
    (tmp_path / "z2" / "global_step9" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="optim_states"):
        convert(tmp_path / "z2", tmp_path / "out", dtype="float32")
    report = convert(tmp_path / "z2", tmp_path / "out")  # the module alone is the whole 16-bit model
    assert any("ranks [1] are missing" in warning for warning in report.warnings)


def test_a_tag_that_is_not_there_gives_way_to_the_newest_whole_step(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", 2, 2)
    (tmp_path / "src" / "latest").write_text("global_step10", encoding="utf-8")
    report = convert(tmp_path / "src", tmp_path / "out")
    assert any("global_step10" in warning and "newest whole step" in warning for warning in report.warnings)
    for text, message in [("../other", "leads out"), ("", "is empty")]:
        (tmp_path / "src" / "latest").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            convert(tmp_path / "src", tmp_path / "again")


def edit(path: Path, **changes: Any) -> None:
    state = torch.load(path, weights_only=False)
    inner = state.get("optimizer_state_dict", state)
    inner.update(changes)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", {"partition_count": [3, 3]}, "one of 3 ranks"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", {"single_partition_of_fp32_groups": []}, "parameter groups"),
        (
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            {"single_partition_of_fp32_groups": [torch.ones(14), torch.ones(400)]},
            "belong to no parameter",
        ),
        (
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            {"single_partition_of_fp32_groups": [torch.ones(2), torch.ones(7)]},
            "do not fill",
        ),
        (
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            {"single_partition_of_fp32_groups": [torch.ones(7, 2), torch.ones(7)]},
            "no flat tensors",
        ),
        ("mp_rank_00_model_states.pt", {"shared_params": {"lm_head.weight": "absent"}}, "shares a parameter"),
        ("mp_rank_00_model_states.pt", {"param_shapes": [{"norm": "5"}]}, "param_shapes"),
        (
            "mp_rank_00_model_states.pt",
            {"param_shapes": [{f"w{number}": torch.Size([0]) for number in range(20_000)}] * 100_000},
            "'w0' is in two of its groups",
        ),
    ],
)
def test_checkpoints_that_do_not_add_up_are_refused(tmp_path: Path, file: str, changes: Any, message: str) -> None:
    write_zero(tmp_path / "src", 2, 2)
    edit(tmp_path / "src" / "global_step9" / file, **changes)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "src", tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("told", "message"),
    [({"mp_world_size": 2}, "one of 2 tensor or pipeline"), ({"num_experts": [4]}, "without its experts")],
)
def test_a_part_of_a_model_is_no_model_although_its_other_files_are_not_there(
    tmp_path: Path, told: dict[str, Any], message: str, alone: bool, stage: int
) -> None:
    """Named alone, or copied without the rest: half of each tensor, or no experts, would be written in silence."""
    write_zero(tmp_path / "src", stage, 2)
    model = next((tmp_path / "src" / "global_step9").glob("*mp_rank_00_model_states.pt"))
    for file in model.parent.glob("*model_states.pt"):
        edit(file, **{"mp_world_size": 1, "num_experts": [], **told})
    with pytest.raises(UserError, match=message):
        convert(model if alone else tmp_path / "src", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["layer_00-model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
)
def test_the_file_of_one_stage_expert_or_rank_is_no_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / name)
    with pytest.raises(UserError, match="is one part of a model that DeepSpeed split"):
        convert(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_universal_checkpoint_beside_the_zero_checkpoint_is_passed_by(tmp_path: Path) -> None:
    """ds_to_universal writes into the folder of the training, and `latest_universal` beside `latest`."""
    want = write_zero(tmp_path / "src", 2, 2)
    (tmp_path / "src" / "global_step9_universal" / "zero").mkdir(parents=True)
    (tmp_path / "src" / "latest_universal").write_text("global_step9_universal", encoding="utf-8")
    convert(tmp_path / "src", tmp_path / "out", dtype="float32")
    assert same_bits(loaded(tmp_path / "out")["up"], want["up"])
    (tmp_path / "src" / "latest").unlink()
    with pytest.raises(UserError, match="universal"):
        convert(tmp_path / "src", tmp_path / "again")
