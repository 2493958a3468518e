"""Strided reading against torch.as_strided, with limits so small that every path is taken."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.convert import source
from bridge.convert.source import SourceFile, StridedTensor, blocks
from bridge.errors import UserError

FILE = torch.randint(0, 2**15, (4096,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def file(tmp_path: Path) -> SourceFile:
    (tmp_path / "x").write_bytes(b"head" + FILE.numpy().tobytes())
    return SourceFile(tmp_path / "x")


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    stride = tuple(draw(st.integers(0, 60)) for _ in shape)
    if draw(st.booleans()):  # what transpose and permute give
        stride = (
            torch.empty([max(size, 1) for size in shape]).permute(draw(st.permutations(range(len(shape))))).stride()
        )
    reach = sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    return shape, stride, draw(st.integers(0, 4095 - min(reach, 4095)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(view=views(), block=st.integers(1, 40), span=st.sampled_from([2, 64, 1 << 20]), short=st.sampled_from([0, 16]))
def test_blocks_are_the_elements_in_row_major_order(
    file: SourceFile, view: tuple[tuple[int, ...], tuple[int, ...], int], block: int, span: int, short: int
) -> None:
    shape, stride, offset = view
    if sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + offset > 4095:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK", 2 * block)
        patch.setattr(source, "_SPAN", span)
        patch.setattr(source, "_SHORT", short)
        got = [bytes(part) for part in blocks(StridedTensor(file, 4 + 2 * offset, "int16", shape, stride))]
    assert b"".join(got) == torch.as_strided(FILE, shape, stride, offset).contiguous().numpy().tobytes()
    assert all(len(part) <= 2 * block for part in got)


def test_a_contiguous_tensor_is_read_in_whole_blocks(file: SourceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: reads.append(at) or preadv(fd, to, at))
    monkeypatch.setattr(source, "BLOCK", 2048)
    list(blocks(StridedTensor(file, 4, "int16", (16, 1, 8, 32), (256, 999, 32, 1))))
    assert reads == [4, 4 + 2048, 4 + 4096, 4 + 6144]


def test_a_file_that_shrinks_or_changes_is_named(file: SourceFile) -> None:
    tensor = StridedTensor(file, 4, "int16", (4096,), (1,))
    file.check_unchanged()
    os.truncate(file.path, 100)
    with pytest.raises(UserError, match="too early"):
        list(blocks(tensor))
    with pytest.raises(UserError, match="was changed"):
        file.check_unchanged()


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        SourceFile(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be opened"):
        SourceFile(tmp_path / "absent")
