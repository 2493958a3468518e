"""ZIP archives: real ones are read, and every way to lie about a record ends in one sentence."""

import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import folder, loaded, raw_archive
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.convert import convert, inspect
from bridge.convert.archive import read_archive
from bridge.convert.source import SourceFile
from bridge.errors import UserError

EMPTY = b"\x80\x02}."


@pytest.fixture
def real(tmp_path: Path) -> Path:
    return folder(tmp_path / "src", {"a": torch.arange(40.0), "b": torch.arange(7)})


def test_records_are_those_of_the_zip_library(real: Path) -> None:
    records = read_archive(SourceFile(real))
    with zipfile.ZipFile(real) as archive:
        names = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    whole = real.read_bytes()
    assert {name: whole[r.offset : r.offset + r.size] for name, r in records.items()} == names


def test_64_bit_directories_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = raw_archive(tmp_path / "x.pt", EMPTY, {"data/0": b"12345"})
    assert b"PK\x06\x06" in path.read_bytes()
    records = read_archive(SourceFile(path))
    assert records["data/0"].size == 5
    assert path.read_bytes()[records["data/0"].offset :][:5] == b"12345"


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.99, 0.9999])
def test_a_cut_file_is_refused(real: Path, share: float) -> None:
    real.write_bytes(real.read_bytes()[: int(real.stat().st_size * share)])
    assert "cut off" in inspect(real)["missing"]
    with pytest.raises(UserError, match="cut off"):
        convert(real, real.parent / "out")


def edited(path: Path, central: int, local: int | None, value: bytes, name: bytes = b"archive/data/0") -> Path:
    """The archive with a field of one record changed in the directory, and in the record's own header."""
    raw = bytearray(path.read_bytes())
    at = raw.rindex(name) - 46
    header = struct.unpack_from("<L", raw, at + 42)[0]
    raw[at + central : at + central + len(value)] = value
    if local is not None:
        raw[header + local : header + local + len(value)] = value
    path.write_bytes(raw)
    return path


def test_lies_about_records_are_refused(tmp_path: Path) -> None:
    def make() -> Path:
        return raw_archive(tmp_path / "x.pt", EMPTY, {"data/0": b"x" * 64})

    for central, local, value, message in [
        (10, 8, struct.pack("<H", 8), "is compressed"),
        (24, None, struct.pack("<L", 10**6), "is compressed"),
        (8, 6, struct.pack("<H", 1), "is encrypted"),
        (20, 18, struct.pack("<LL", 10**6, 10**6), "outside the file"),
        (20, 18, struct.pack("<LL", 2**32 - 1, 2**32 - 1), "size is missing"),
        (42, None, struct.pack("<L", 10**6), "outside the file"),
        (42, None, struct.pack("<L", 0), "another name"),
        (42, None, struct.pack("<L", 2), "no header"),
        (46, None, b"archive/data/1", "another name"),
        (46, None, b"archive/data/\xff", "not UTF-8"),
    ]:
        with pytest.raises(UserError, match=message):
            read_archive(SourceFile(edited(make(), central, local, value)))


def test_records_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = raw_archive(tmp_path / "x.pt", EMPTY, {"data/0": b"x" * 300, "data/1": b"y" * 10})
    raw = bytearray(path.read_bytes())
    # The second record's header is hidden inside the first record's data.
    inner = raw.index(b"PK\x03\x04", raw.index(b"archive/data/0"))
    record = bytes(raw[inner : raw.index(b"y" * 10) + 10])
    first = raw.index(b"x" * 300)
    raw[first + 20 : first + 20 + len(record)] = record
    raw[raw.rindex(b"archive/data/1") - 4 : raw.rindex(b"archive/data/1")] = struct.pack("<L", first + 20)
    path.write_bytes(raw)
    with pytest.raises(UserError, match="share bytes"):
        read_archive(SourceFile(path))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    path = raw_archive(tmp_path / "x.pt", EMPTY, {"data/0": b"a"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/0", b"b")
    with pytest.raises(UserError, match="two records named"):
        read_archive(SourceFile(path))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({}, "an unknown kind of file"),
        ({"notes.txt": b""}, "not one of torch.save"),
        ({"a/data.pkl": EMPTY, "b/data.pkl": EMPTY}, "not one of torch.save"),
        ({"a/data.pkl": EMPTY, "a/constants.pkl": b""}, "TorchScript"),
        ({"a/data.pkl": EMPTY, "a/byteorder": b"big"}, "big-endian"),
    ],
)
def test_other_zip_files_are_named(tmp_path: Path, records: dict[str, bytes], message: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    with pytest.raises(UserError, match=message):
        inspect(tmp_path / "x.pt")


def test_an_end_record_that_lies_is_refused(tmp_path: Path) -> None:
    for at, value in [(12, 2**31), (16, 2**31), (12, 10), (8, 0xFFFE0001)]:
        path = raw_archive(tmp_path / "x.pt", EMPTY)
        raw = bytearray(path.read_bytes())
        struct.pack_into("<L", raw, len(raw) - 22 + at, value)
        path.write_bytes(raw)
        with pytest.raises(UserError):
            read_archive(SourceFile(path))


def test_a_directory_of_nothing_is_refused(tmp_path: Path) -> None:
    raw = bytearray(raw_archive(tmp_path / "x.pt", EMPTY).read_bytes())
    raw[-14:-10] = bytes(4)  # both counts of entries
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(UserError, match="no single data"):
        read_archive(SourceFile(tmp_path / "x.pt"))


def test_bytes_after_the_end_record_are_refused(tmp_path: Path) -> None:
    path = raw_archive(tmp_path / "x.pt", EMPTY)
    with path.open("ab") as out:
        out.write(b"x")
    with pytest.raises(UserError, match="does not end"):
        read_archive(SourceFile(path))


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 8))
def test_mutated_archives_convert_or_are_refused(
    seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes of the index (everything but the tensors' data) are changed at random.

    What the pickle's checksum covers comes out right or not at all; half of the archives have none.
    """
    place = tmp_path_factory.mktemp("fuzz")
    content: Any = {"model": {"w": torch.arange(64.0), "v": torch.arange(6).reshape(2, 3).t()}, "step": 3}
    path = folder(place / "src", content)
    raw = bytearray(path.read_bytes())
    data = [(r.offset, r.offset + r.size) for n, r in read_archive(SourceFile(path)).items() if n.startswith("data/")]
    index = [at for at in range(len(raw)) if not any(start <= at < stop for start, stop in data)]
    sealed = seed % 2 == 0
    if not sealed:
        checksum = raw.rindex(b"checkpoint/data.pkl") - 46 + 16
        raw[checksum : checksum + 4] = bytes(4)
    dice = random.Random(seed)
    for _ in range(count):
        raw[dice.choice(index)] = dice.choice([0, 1, 255, dice.randrange(256)])
    path.write_bytes(raw)
    try:
        convert(path, place / "out")
    except UserError:
        assert [entry.name for entry in place.iterdir()] == ["src"]
    else:
        got = loaded(place / "out")
        assert sum(tensor.numel() for tensor in got.values()) <= 2**20
        if sealed:
            assert got.keys() == content["model"].keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in content["model"].items())
