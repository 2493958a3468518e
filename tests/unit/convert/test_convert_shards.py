"""FSDP shards and DCP folders that torch itself saved in four processes, and what is wrong with damaged ones."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import loaded, raw_archive, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from save_shards import SHAPES, truth

from bridge.convert import convert, inspect, shards
from bridge.convert.source import IncompleteError, Piece, StridedTensor, boxes, joined
from bridge.errors import UserError


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "src")


@pytest.mark.parametrize("kind", ["actor", "dcp"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_every_placement_gives_the_whole_tensor(saved: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    report = convert(saved / kind, tmp_path / "out", dtype=dtype)
    assert report.format == {"actor": "fsdp", "dcp": "dcp"}[kind]
    want, got = truth(), loaded(tmp_path / "out")
    kinds = {name.split(".")[0] for name in got} - {"a", "module"}
    assert kinds >= {"shard0", "shard1", "copied", "hybrid", "tiles", "twice"}
    assert len(kinds) == (8 if kind == "actor" else 6)
    for name, tensor in got.items():
        _, _, short = name.partition(".")
        if short in SHAPES:
            whole = want[short] if dtype == "auto" else want[short].to(torch.bfloat16)
            assert same_bits(tensor, whole), name
    assert same_bits(got["a.buffer"], torch.tensor(7)) and same_bits(got["module"], torch.ones(3, dtype=torch.bool))


def test_inspect_tells_what_is_there_and_what_is_missing(copy: Path) -> None:
    facts = inspect(copy / "actor")
    assert (facts["format"], facts["ranks"], facts["missing"]) == ("fsdp", 4, None)
    assert facts["dtypes"] == {"float32": facts["bytes"] - 11, "int64": 8, "bool": 3}
    (copy / "actor" / "model_world_size_4_rank_2.pt").unlink()
    assert "model_world_size_4_rank_2.pt" in inspect(copy / "actor")["missing"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank is missing": (lambda p: (p / "model_world_size_4_rank_3.pt").unlink(), "1 of its 4 files are missing"),
    "a rank was cut off": (lambda p: cut(p / "model_world_size_4_rank_1.pt"), "cut off"),
    "a rank is empty": (lambda p: (p / "model_world_size_4_rank_1.pt").write_bytes(b""), "empty"),
    "two worlds": (
        lambda p: torch.save({"w": torch.ones(1)}, p / "model_world_size_1_rank_0.pt"),
        "whole checkpoints of 1, 4 ranks",
    ),
    "a rank of another save": (
        lambda p: torch.save({"w": torch.ones(1)}, p / "model_world_size_4_rank_1.pt"),
        "not in every rank's file",
    ),
    "a rank twice": (
        lambda p: shutil.copy(p / "model_world_size_4_rank_0.pt", p / "model_world_size_4_rank_1.pt"),
        "do not fill its shape",
    ),
    "another code to run": (
        lambda p: raw_archive(p / "model_world_size_4_rank_2.pt", b"cposix\nsystem\n(S'id'\ntR."),
        r"posix\.system",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_with_a_fault_are_refused(copy: Path, tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    change(copy / "actor")
    with pytest.raises(UserError, match=message):
        convert(copy / "actor", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_fsdp_config_says_which_world_counts(copy: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, copy / "actor" / "model_world_size_1_rank_0.pt")
    (copy / "actor" / "fsdp_config.json").write_text('{"world_size": 1}', encoding="utf-8")
    convert(copy / "actor", tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["w"]


def test_a_mesh_whose_ranks_do_not_ascend_is_refused(saved: Path, tmp_path: Path) -> None:
    """torch's own full_tensor gives other values there than were cut; one that ascends along each axis is read."""
    with pytest.raises(UserError, match="ranks do not ascend"):
        convert(saved / "odd", tmp_path / "out")
    convert(saved / "crossed", tmp_path / "out")
    assert all(same_bits(tensor, truth()[name]) for name, tensor in loaded(tmp_path / "out").items())


@pytest.mark.parametrize(
    ("ranks", "axes", "in_order"),
    [
        ((3, 1, 2, 0), [((4,), (1,))], False),
        ((0, 2, 1, 3), [((2,), (2,)), ((2,), (1,))], True),  # rows 0 2 and 1 3, columns 0 1 and 2 3
        ((0, 2, 1, 3), [((2,), (1,)), ((2,), (2,))], True),
        ((0, 2, 1, 3), [((2, 2), (2, 1))], False),  # the same, flattened into one axis
        ((0, 2, 1, 3), [((2, 2), (1, 2))], True),
        ((1, 0), [((1,), (1 << 80,))], True),  # one rank: nothing to be out of order
        ((1, 0), [((0,), (1,))], False),
        ((1, 0), [((3,), (1,))], False),
        ((1, 0), [((2,), (1 << 80,))], False),
        ((1 << 80, 0), [((2,), (1,))], False),
        ((1, 0), [((1,) * 99, (1,) * 99)], False),
    ],
)
def test_ranks_ascend_along_each_axis(ranks: tuple[int, ...], axes: list[Any], in_order: bool) -> None:
    assert shards._in_order(ranks, tuple(axes)) is in_order


def test_parts_that_do_not_tell_the_whole_shape_are_refused(saved: Path, tmp_path: Path) -> None:
    """Without this one rank's part would pass for the whole tensor."""
    one = min((saved / "parts").glob("*.safetensors"))
    for path in (saved / "parts", one):
        with pytest.raises(UserError, match="enable_consolidation"):
            convert(path, tmp_path / "out")


def test_an_optimizer_whose_names_were_joined_is_left_out(saved: Path, tmp_path: Path) -> None:
    report = convert(saved / "flat", tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["model.w"]
    assert report.dropped == ["optimizer.state.model.w.exp_avg"]


def test_optimizer_and_other_state_is_never_opened(copy: Path, tmp_path: Path) -> None:
    for name in ("optim_world_size_4_rank_0.pt", "extra_state_world_size_4_rank_0.pt", "rng_state.pth"):
        (copy / "actor" / name).write_bytes(b"\x80\x02cposix\nsystem\n.")
    opened = inspect(copy / "actor")["files"]
    assert [Path(file).name for file in opened] == [f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]
    assert convert(copy / "actor", tmp_path / "out").tensors == len(loaded(tmp_path / "out"))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "a\\b", "nul\0"])
def test_dcp_paths_stay_in_the_folder(copy: Path, tmp_path: Path, name: str) -> None:
    path = copy / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="leads out of the folder"):
        convert(copy / "dcp", tmp_path / "out")


def test_two_items_of_a_dcp_folder_in_one_place_are_refused(copy: Path, tmp_path: Path) -> None:
    """The later one would be written and the other lost in silence."""
    path = copy / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    first, second = list(metadata.planner_data)[:2]
    metadata.planner_data[second] = metadata.planner_data[first]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="in the place of another item"):
        convert(copy / "dcp", tmp_path / "out")


def test_one_list_of_parts_under_many_names_ends(copy: Path, tmp_path: Path) -> None:
    path = copy / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    one = next(value for value in metadata.state_dict_metadata.values() if hasattr(value, "chunks"))
    one.chunks = one.chunks[:1] * 20_000
    metadata.state_dict_metadata |= {f"w{number}": one for number in range(20_000)}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="more than 1,000,000 parts"):
        convert(copy / "dcp", tmp_path / "out")


def test_a_link_out_of_the_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    for kind, name in (("dcp", "__0_0.distcp"), ("actor", "model_world_size_4_rank_0.pt"), ("dcp", ".metadata")):
        (copy / kind / name).rename(tmp_path / "elsewhere")
        (copy / kind / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="link that leads out"):
            convert(copy / kind, tmp_path / "out")
        (tmp_path / "elsewhere").replace(copy / kind / name)


def test_an_unfinished_dcp_folder_is_incomplete(copy: Path, tmp_path: Path) -> None:
    cut(copy / "dcp" / "__1_0.distcp")
    with pytest.raises(IncompleteError, match="cut off"):
        convert(copy / "dcp", tmp_path / "out")
    (copy / "dcp" / "__2_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__2_0\.distcp"):
        convert(copy / "dcp", tmp_path / "out")
    (copy / "dcp" / ".metadata").unlink()
    with pytest.raises(IncompleteError, match=r"lacks \.metadata"):
        convert(copy / "dcp", tmp_path / "out")


@pytest.mark.parametrize("kind", ["actor", "dcp"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mutated_shards_convert_or_are_refused(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """One damaged file among whole ones: a reason or, where only weights were hit, tensors of the right shapes."""
    home = tmp_path_factory.mktemp("mutated")
    copy = shutil.copytree(saved, home / "src")
    files = sorted(path.name for path in (copy / kind).iterdir())
    path = copy / kind / data.draw(st.sampled_from(files))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(raw)
    try:
        convert(copy / kind, home / "out")
    except UserError as error:
        assert str(error)
        assert not (home / "out").exists()
    else:
        got = loaded(home / "out")
        for name, tensor in got.items():
            if name.partition(".")[2] in SHAPES and tensor.dtype == torch.float32:
                assert tensor.shape == SHAPES[name.partition(".")[2]], name
    finally:
        shutil.rmtree(home)


def test_local_flat_parameters_are_explained(tmp_path: Path) -> None:
    torch.save({"layer._flat_param": torch.ones(3)}, tmp_path / "pytorch_model_fsdp_rank0.bin")
    with pytest.raises(UserError, match="flattened FSDP parameters"):
        convert(tmp_path, tmp_path / "out")


@given(shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), limit=st.integers(1, 40))
def test_boxes_are_consecutive_runs(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    parts = []
    for origin, sizes in boxes(shape, limit):
        part = whole[tuple(slice(at, at + size) for at, size in zip(origin, sizes, strict=True))]
        assert 1 <= part.numel() <= limit
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat([*parts, whole.new_empty(0)]), whole.reshape(-1))


@given(st.data())
def test_pieces_fill_exactly_or_are_refused(data: st.DataObject) -> None:
    """Cuts along both dimensions make a grid; without, or with a moved, piece it is none."""
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    cuts = [sorted({0, *data.draw(st.sets(st.integers(1, size), max_size=3))} - {size}) for size in shape]
    rows, columns = ([*zip(cut, [*cut[1:], size], strict=True)] for cut, size in zip(cuts, shape, strict=True))
    grid = [((a, c), (b - a, d - c)) for a, b in rows for c, d in columns]

    def join(parts: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        pieces = [Piece(at, StridedTensor(None, 0, "int8", size, (size[1], 1))) for at, size in parts]  # type: ignore[arg-type]
        joined("here", "w", "int8", shape, pieces)

    join([*data.draw(st.permutations(grid)), grid[0]])  # a replica does no harm
    with pytest.raises(UserError, match="do not fill"):
        join(grid[1:])
    (at, size), *rest = grid
    with pytest.raises(UserError, match=r"do not fill|differ in size"):
        join([((at[0] + 1, at[1]), size), *rest])
