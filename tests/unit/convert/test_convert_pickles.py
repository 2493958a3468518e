"""The pickle reader: equal to pickle.loads on plain data, and it runs nothing whatever it is given."""

import io
import os
import pickle
import pickletools
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridge.convert import pickles
from bridge.convert.pickles import Global, Object, StorageRef, TensorRef, read_pickle
from bridge.errors import UserError

HERE = Path("x.pt")

scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.text() | st.integers(-(2**60), 2**60) | st.booleans() | st.tuples(st.text(), st.integers(0, 9))
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


@given(value=plain, protocol=st.integers(0, 5))
def test_plain_data_reads_as_pickle_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assume(protocol > 2 or (b"_codecs" not in data and b"bytes" not in data))  # bytes were calls once
    read = read_pickle(data + b"rest", HERE)
    assert read.end == len(data)
    assert read.value == value


def test_sets_are_built_by_opcodes_and_named_by_calls() -> None:
    assert read_pickle(pickle.dumps([{1, "a"}, frozenset({2})], 4), HERE).value == [{1, "a"}, frozenset({2})]
    called = read_pickle(pickle.dumps({1}, 2), HERE).value
    assert (called.kind, called.arguments) == (Global("builtins.set"), ([1],))


def test_shared_and_cyclic_containers_stay_so() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    read = read_pickle(pickle.dumps([shared, shared], 2), HERE).value
    assert read[0] is read[1] and read[0][1] is read[0]


def tensor_pickle(
    shape: bytes = b"K\x02K\x03\x86", stride: bytes = b"K\x03K\x01\x86", numel: bytes = b"K\x06"
) -> bytes:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + numel + b"tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + stride + b"\x89Nt" + b"R."


def test_a_tensor_is_a_reference() -> None:
    read = read_pickle(tensor_pickle(), HERE)
    storage = StorageRef("0", "float32", 6)
    assert read.value == TensorRef(storage, "float32", 0, (2, 3), (3, 1))
    assert read.storages == {"0": storage}


class Runs:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch hostile",), r"(posix|nt)\.system"),
        (eval, ("open('hostile', 'w')",), r"builtins\.eval"),
        (getattr, (os, "system"), r"builtins\.getattr"),
        (open, ("hostile", "w"), r"\w+\.open"),
        (__import__, ("os",), r"builtins\.__import__"),
    ],
)
def test_a_call_is_refused_by_name(
    function: Any, arguments: Any, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = tuple(argument if isinstance(argument, str) else "os" for argument in arguments)
    data = pickle.dumps({"model": {"weight": Runs(function, *arguments)}}, protocol)
    with pytest.raises(UserError, match=name):
        read_pickle(data, HERE)
    assert list(tmp_path.iterdir()) == []


HOSTILE = {
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "stack global from the memo": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94h\x00h\x01\x93)R.",
    "dotted attribute of an allowed module": b"\x80\x04\x8c\x05torch\x8c\x0dhub.load_file\x93)R.",
    "attribute of an allowed class": b"\x80\x04\x8c\x0bcollections\x8c\x1bOrderedDict.__init_subclass\x93)R.",
    "global name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "newobj": b"\x80\x02csubprocess\nPopen\nX\x02\x00\x00\x00id\x85\x81.",
    "newobj_ex": b"\x80\x04csubprocess\nPopen\n)}\x92.",
    "inst": b"(iposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'id'\no.",
    "extension registry": b"\x80\x02\x82\x01.",
    "textual persistent id": b"Pid\n.",
    "persistent id that is no storage": b"\x80\x02X\x02\x00\x00\x00idQ.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "call of a string": b"\x80\x02X\x02\x00\x00\x00id)R.",
    "call of a result": b"\x80\x02cbuiltins\nset\n)R)R.",
    "arguments that are no tuple": b"\x80\x02cbuiltins\nset\n]R.",
    "state on a list": b"\x80\x02]}b.",
    "items on a string": b"\x80\x02X\x01\x00\x00\x00aK\x01K\x02s.",
    "items on a tensor": tensor_pickle()[:-1] + b"K\x01K\x02s.",
    "append to a dict": b"\x80\x02}K\x01a.",
    "underflow": b"\x80\x02K\x01\x86.",
    "mark that is not there": b"\x80\x02K\x01u.",
    "memo entry that is not there": b"\x80\x02h\x09.",
    "no end": b"\x80\x02K\x01",
    "empty": b"",
    "unknown opcode": b"\x80\x02\xff.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "odd number of items": b"\x80\x02(K\x01d.",
    "string longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "negative string length": b"T\xff\xff\xff\xffa.",
    "integer of a megabyte": b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".",
    "decimal integer of a megabyte": b"L" + b"9" * (1 << 20) + b"L\n.",
    "protocol of the future": b"\x80\x63.",
    "negative size": tensor_pickle(shape=b"J\xff\xff\xff\xffK\x03\x86"),
    "size that is no number": tensor_pickle(shape=b"G" + bytes(8) + b"K\x03\x86"),
    "size as bytes": tensor_pickle(shape=b"C\x02ab"),
    "boolean size": tensor_pickle(shape=b"\x88\x88\x86"),
    "size and stride of different length": tensor_pickle(stride=b"K\x01\x85"),
    "rank 40": tensor_pickle(shape=b"(" + b"K\x01" * 40 + b"t", stride=b"(" + b"K\x01" * 40 + b"t"),
    "negative storage": tensor_pickle(numel=b"J\xff\xff\xff\xff"),
    "tensor of something else": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00))\x89Nt" + b"R.",
    "typed tensor in itself": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x00h\x00)h\x00)t" + b"R.",
    "too few arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "ordered dict with items": b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_torch_never_writes_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match=r"x\.pt"):
        read_pickle(data, HERE)


def test_a_pickle_without_an_end_is_told_of() -> None:
    for data in (b"", b"\x80\x02", b"\x80\x02]q\x00K\x01a"):
        with pytest.raises(UserError, match="has no end"):
            read_pickle(data, HERE)


def test_a_hostile_name_reaches_no_terminal() -> None:
    with pytest.raises(UserError) as caught:
        read_pickle(b"\x80\x04\x8c\x04\x1b[2J\x8c\x06system\x93.", HERE)
    assert "\x1b" not in str(caught.value)


BOMBS = {
    # Each level holds the one before it twice: 2^100,000 leaves for a walker.
    "doubling lists": b"\x80\x02]q\x00" + b"(h\x00h\x00lq\x00" * 100_000 + b".",
    "doubling keys": b"\x80\x02}K\x01q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00K\x01s.",
    "deep tuple": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "deep tuple as key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "deep lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "opcodes": b"\x80\x02" + b"K\x010" * 2_000_000 + b"K\x01.",
    "copies of a long size": b"\x80\x02("
    + b"K\x01" * 100_000
    + b"lq\x00"
    + b"ctorch\nSize\nh\x00\x85R0" * 50_000
    + b".",
    "long tuple as many keys": b"\x80\x02(" + b"K\x01" * 100_000 + b"tq\x000}" + b"h\x00K\x01s" * 100_000 + b".",
    "colliding integers": b"\x80\x02}("
    + b"".join(b"\x8a\x40" + (i * (2**61 - 1) << 8).to_bytes(64, "little") + b"N" for i in range(1, 20_000))
    + b"u.",
}


@pytest.mark.timeout(60)  # the alternative is hours
@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_end(data: bytes) -> None:
    with suppress(UserError):
        read_pickle(data, HERE)


def test_every_listed_global_stays_a_name() -> None:
    for name in sorted(pickles.INERT - {"collections.OrderedDict"}):
        module, _, attribute = name.rpartition(".")
        data = b"\x80\x02c" + module.encode() + b"\n" + attribute.encode() + b"\n."
        assert read_pickle(data, HERE).value == Global(name)


def test_calls_of_listed_globals_stay_objects() -> None:
    built = read_pickle(b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R}b.", HERE).value
    assert isinstance(built, Object)
    assert (built.kind, built.arguments, built.state) == (Global("numpy.dtype"), ("f4",), {})


@settings(max_examples=400)
@given(form=st.sampled_from(sorted(pickles._READERS)), data=st.binary(max_size=24), before=st.integers(0, 3))
def test_arguments_are_those_of_pickletools(form: str, data: bytes, before: int) -> None:
    descriptor = next(o.arg for o in pickletools.opcodes if o.arg is not None and o.arg.name == form)
    stream = io.BytesIO(data[before:])
    try:
        expected = descriptor.reader(stream)
    except ValueError:
        with pytest.raises((ValueError, IndexError, struct.error)):
            pickles._READERS[form](data, before)
    else:
        value, end = pickles._READERS[form](data, before)
        assert repr(value) == repr(expected) and type(value) is type(expected)  # repr: a NaN is no NaN's equal
        assert end == before + stream.tell()


SEED = pickle.dumps({"model": {"a": [1, 2.5, None, ("x", b"y")], "b": {1: {2: "z" * 20}}}}, 2) + tensor_pickle()


@settings(max_examples=800, deadline=None)
@given(data=st.data())
def test_mutated_pickles_are_read_or_refused(data: st.DataObject) -> None:
    base = bytearray(data.draw(st.sampled_from([SEED, tensor_pickle(), pickle.dumps([{"k": (1, [2])}] * 3, 4)])))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(base) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                base[at] = data.draw(st.integers(0, 255))
            case "cut":
                del base[at : at + data.draw(st.integers(1, 8))]
            case _:
                base[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        if not base:
            return
    with suppress(UserError):
        read_pickle(bytes(base), HERE)


def attribute(of: str, *names: bytes) -> bytes:
    """getattr of a global and, one after the other, of what comes out."""
    module, _, name = of.rpartition(".")
    value = f"c{module}\n{name}\n".encode()
    for attr in names:
        value = b"c__builtin__\ngetattr\n(" + value + b"S'" + attr + b"'\ntR"
    return b"\x80\x02" + value + b"."


@pytest.mark.parametrize(
    "enum",
    [
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
    ],
)
def test_a_member_of_an_enum_may_be_pickled_by_name(enum: str) -> None:
    # As Python 3.11.2 does, Debian 12's; releases before and after it write a call with the value.
    assert read_pickle(attribute(enum, b"FIRST"), HERE).value == Global(f"{enum}.FIRST")
    with pytest.raises(UserError, match=r"builtins\.getattr"):
        read_pickle(attribute(enum, b"__init__", b"__globals__"), HERE)


def test_getattr_of_other_classes_is_refused() -> None:
    sharded = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
    read_pickle(attribute(sharded, b"ProcessGroupState"), HERE)
    for of, name in ((sharded, b"__init__"), ("torch.device", b"type"), ("collections.OrderedDict", b"FIRST")):
        with pytest.raises(UserError, match=r"builtins\.getattr"):
            read_pickle(attribute(of, name), HERE)
