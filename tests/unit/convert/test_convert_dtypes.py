"""Casts against torch, which is the definition here."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert.dtypes import CASTABLE, ITEMSIZE, SAFETENSORS, STORAGES, TARGETS, cast, infinities

EDGES32 = [
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F80FFFF, 0xFFFFFFFF,
    0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001,
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000,
    0x387FFFFF, 0x3FFFF000, 0x3FFFEFFF,
]  # fmt: skip


def through_torch(raw: np.ndarray, source: str, target: str) -> torch.Tensor:
    return torch.from_numpy(raw.copy()).view(getattr(torch, source)).to(getattr(torch, target))


def check(raw: np.ndarray, source: str, target: str) -> None:
    got = torch.from_numpy(cast(raw, source, target).copy()).view(getattr(torch, target))
    want = through_torch(raw, source, target)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    width = {2: torch.int16, 4: torch.int32}[ITEMSIZE[target]]
    assert torch.equal(got.view(width)[~nan], want.view(width)[~nan])
    # What a NaN carries is not defined, but its sign is kept.
    original = torch.from_numpy(raw.copy()).view(getattr(torch, source))
    assert torch.equal(torch.signbit(got)[nan], torch.signbit(original)[nan])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_value(source: str, target: str) -> None:
    check(np.arange(65536, dtype=np.uint16).view(np.uint8), source, target)


@pytest.mark.parametrize("target", TARGETS)
def test_edges_of_float32(target: str) -> None:
    check(np.array(EDGES32, np.uint32).view(np.uint8), "float32", target)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.sampled_from(TARGETS))
def test_any_float32(bits: list[int], target: str) -> None:
    check(np.array(bits, np.uint32).view(np.uint8), "float32", target)


@given(st.lists(st.floats(width=64) | st.floats(-1e5, 1e5), min_size=1, max_size=200), st.sampled_from(TARGETS))
def test_any_float64(values: list[float], target: str) -> None:
    check(np.array(values, np.float64).view(np.uint8), "float64", target)


def test_blocks_longer_than_the_cache_chunk() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (1 << 19) + 3, dtype=np.uint64).astype(np.uint32)
    check(bits.view(np.uint8), "float32", "bfloat16")


@pytest.mark.parametrize("dtype", CASTABLE)
def test_infinities_are_counted(dtype: str) -> None:
    values = torch.tensor([1.0, float("inf"), float("-inf"), float("nan")], dtype=getattr(torch, dtype))
    assert infinities(values.view(torch.uint8).numpy(), dtype) == 2


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tables_agree_with_torch() -> None:
    for dtype, size in ITEMSIZE.items():
        assert getattr(torch, dtype).itemsize == size
    for storage, dtype in STORAGES.items():
        assert getattr(torch, storage).dtype == getattr(torch, dtype)
    assert set(SAFETENSORS) <= set(ITEMSIZE)
