"""A pickle reader that runs nothing: opcodes are data, classes and functions are names, tensors are references.

`pickletools` of the standard library says what opcodes there are and what follows each; the small stack machine here
rebuilds plain containers from them. A global is never imported. If it is on the list below it becomes an inert `Object`
or is understood by name (an ordered dict, a tensor rebuild); any other global ends the reading with its name.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.convert.dtypes import ITEMSIZE, STORAGES
from bridge.errors import UserError

MAX_BYTES = 64 << 20
MAX_OPCODES = 4_000_000
MAX_MARKS = 1_000
MAX_RANK = 32
MAX_INT_BITS = 1_024
MAX_KEY_PARTS = 64


@dataclass(frozen=True)
class Global:
    """The name of a class or function in a pickle, as `module.name`."""

    name: str


@dataclass(eq=False, repr=False)
class Object:
    """Stands for an object that was not built: its class or function, arguments and state."""

    kind: Global
    arguments: Any
    state: Any = None


@dataclass(frozen=True)
class StorageRef:
    """A flat run of elements that lies beside the pickle."""

    key: str
    dtype: str
    """`uint8` for an untyped storage, whose size is in bytes."""
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A view of a storage; offset and strides in elements. Nothing in it has been checked against the storage."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: bool = False
    """True if torch would still conjugate or negate the elements when they are read."""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor of which a file holds parts. The format that wrote it understands `state`; nothing in it is checked."""

    kind: str
    """`DTensor` or `ShardedTensor` of torch, or `chunks` of a distributed checkpoint."""
    dtype: str
    shape: tuple[int, ...]
    state: Any


@dataclass(frozen=True)
class Pickle:
    """What one pickle holds."""

    value: Any
    end: int
    """The byte after it."""
    storages: Mapping[str, StorageRef]
    """Every storage that it mentions, by key."""


_DTENSOR = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
)
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_ENUMS = frozenset(
    {
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
    }
)

INERT = frozenset(
    {
        *_DTENSOR,
        *_ENUMS,
        _SHARDED,
        *(
            f"torch.distributed.{package}.{name}"
            for package in ("tensor", "_tensor")
            for name in (
                "_dtensor_spec.DTensorSpec",
                "_dtensor_spec.ShardOrderEntry",
                "_dtensor_spec.TensorMeta",
                "placement_types.DTensorSpec",
                "placement_types.Partial",
                "placement_types.Replicate",
                "placement_types.Shard",
                "placement_types.TensorMeta",
                "placement_types._Partial",
                "placement_types._StridedShard",
            )
        ),
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._shard.metadata.ShardMetadata",
        "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.shard.Shard",
        "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
        "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed.remote_device._remote_device",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            )
        ),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "_codecs.encode",
        "argparse.Namespace",
        "builtins.bytearray",
        "builtins.bytes",
        "builtins.complex",
        "builtins.dict",
        "builtins.float",
        "builtins.frozenset",
        "builtins.int",
        "builtins.list",
        "builtins.range",
        "builtins.set",
        "builtins.slice",
        "builtins.str",
        "builtins.tuple",
        "collections.Counter",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "torch.Generator",
        "torch.Size",
        "torch.Tensor",
        "torch._C.Generator",
        "torch._tensor._rebuild_from_type_v2",
        "torch.device",
        "torch.nn.parameter.Buffer",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        *(f"torch.{dtype}" for dtype in ITEMSIZE),
        *(f"torch.{storage}" for storage in STORAGES),
        *(f"torch.cuda.{storage}" for storage in STORAGES),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        *(f"numpy.random._pickle.__{name}_ctor" for name in ("bit_generator", "generator", "randomstate")),
        *(
            f"torch._utils._rebuild_{name}"
            for name in (
                "device_tensor_from_cpu_tensor",
                "device_tensor_from_numpy",
                "meta_tensor_no_storage",
                "parameter",
                "parameter_with_state",
                "qtensor",
                "sparse_tensor",
                "tensor",
                "tensor_v2",
                "tensor_v3",
                "wrapper_subclass",
            )
        ),
    }
)
"""Globals that training checkpoints hold beside weights. None of them is ever imported or called."""

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OLD_NAMES = {"builtins.xrange": "builtins.range", "builtins.long": "builtins.int", "builtins.unicode": "builtins.str"}

_HINTS = {
    "megatron.": "it is part of a Megatron checkpoint, which is not supported",
}

_DAMAGE = (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, struct.error)


def read_pickle(data: bytes, path: Path, start: int = 0) -> Pickle:
    """Read the pickle at byte `start` of `data`.

    Containers, numbers, strings and bytes come back as they are, tensors as TensorRef, everything else as Object.
    `path` is the file to name in errors. UserError for a global that is not listed, for a damaged pickle, and for one
    beyond the caps on opcodes, bytes and nesting.
    """
    machine, at = _Machine(path), start
    try:
        for _ in range(MAX_OPCODES):
            if at >= len(data):
                raise UserError(f"{path}: its pickle has no end; copy it again or take an earlier one")
            code = data[at]
            if code == _STOP:
                return Pickle(machine.pop(), at + 1, machine.storages)
            step = _STEPS[code]
            if step is None:
                raise UserError(f"{path}: its pickle uses {_name(code)}, which torch.save never writes")
            read, handle = step
            argument, at = read(data, at + 1) if read else (None, at + 1)
            handle(machine, argument)
    except _DAMAGE as error:
        raise UserError(
            f"{path}: its pickle is damaged ({str(error)[:100]}); copy it again or take an earlier one"
        ) from error
    raise UserError(f"{path}: its pickle has more than {MAX_OPCODES:,} opcodes; no state dict needs that")


@dataclass
class _Machine:
    """The stack, marks and memo of one pickle."""

    path: Path
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, StorageRef] = field(default_factory=dict)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def long(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise ValueError("an integer is too long")
        self.stack.append(value)

    def put(self, number: int) -> None:
        if not 0 <= number < MAX_OPCODES:  # pickle counts up from 0; chosen numbers could collide in the memo
            raise ValueError("a memo entry has too high a number")
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self, _: Any) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise UserError(f"{self.path}: its pickle is nested more than {MAX_MARKS:,} levels deep")
        self.marks.append(self.stack)
        self.stack = []

    def items(self) -> list[Any]:
        """Everything above the last mark, which is taken away."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("stack is too short")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items are added to something that is no list")
        target.extend(values)

    def add(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError("items are added to something that is no set")
        target.update(_hashable(value) for value in values)

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Object:  # a subclass of dict, such as Counter: none of our business
            return
        if type(target) is not dict:
            raise ValueError("items are set on something that is no dict")
        target.update(_pairs(flat))

    def global_(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global's name is no text")
        full = f"{_OLD_MODULES.get(module, module)}.{name}"
        full = _OLD_NAMES.get(full, full)
        # `call` holds getattr to what real files ask of it.
        if full not in INERT and full != "builtins.getattr":
            raise UserError(f"{self.path}: its pickle names {_shown(full)}; {_reason(full)}")
        self.stack.append(Global(full))

    def call(self, function: Any, arguments: Any) -> None:
        if type(function) is not Global:
            raise ValueError("something that is no global is called")
        if type(arguments) is not tuple:
            raise ValueError("a call's arguments are no tuple")
        if function.name == "builtins.getattr" and not _is_plain_attribute(*arguments):
            raise UserError(f"{self.path}: its pickle calls 'builtins.getattr'; {_reason(function.name)}")
        self.stack.append(_call(function, arguments))

    def reduce(self, _: Any) -> None:
        arguments = self.pop()
        self.call(self.pop(), arguments)

    def new_object_with_names(self, _: Any) -> None:
        names, arguments, kind = self.pop(), self.pop(), self.pop()
        if type(kind) is not Global or kind.name == "builtins.getattr":
            raise ValueError("something that is no class is called")
        self.stack.append(Object(kind, (arguments, names)))

    def build(self, _: Any) -> None:
        state = self.pop()
        target = self.stack[-1]
        if type(target) is Object:
            target.state = state
        elif type(target) not in (dict, TensorRef):
            raise ValueError("a state is set on a plain value")

    def persistent(self, _: Any) -> None:
        storage = _storage(self.pop())
        if self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError("a storage has two types or sizes")
        self.stack.append(storage)


def _is_plain_attribute(kind: Any = None, name: Any = None, *rest: Any) -> bool:
    """A sharded tensor's state class or, as early releases of Python 3.11 write it, a member of an enum."""
    if rest or type(kind) is not Global or type(name) is not str:
        return False
    return kind.name in _ENUMS or (kind.name, name) == (_SHARDED, "ProcessGroupState")


def _global_pair(machine: _Machine, argument: str) -> None:
    # pickletools joins module and name with a space; only the name can hold none.
    module, _, name = argument.rpartition(" ")
    machine.global_(module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    name = machine.pop()
    machine.global_(machine.pop(), name)


def _set_one(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _append_one(machine: _Machine, _: Any) -> None:
    value = machine.pop()
    machine.extend([value])


_Read = Callable[[bytes, int], tuple[Any, int]]
"""From the pickle and the byte after an opcode to the opcode's argument and the byte after that."""

_Handle = Callable[[_Machine, Any], object]


def _number(layout: str) -> _Read:
    struct_ = struct.Struct(layout)
    unpack, size = struct_.unpack_from, struct_.size
    return lambda data, at: (unpack(data, at)[0], at + size)


def _counted(layout: str, decode: Callable[[bytes], Any]) -> _Read:
    """Bytes after their number."""
    count = _number(layout)

    def read(data: bytes, at: int) -> tuple[Any, int]:
        size, at = count(data, at)
        end = at + size
        if not at <= end <= len(data):
            raise ValueError("a text or number reaches beyond the end")
        return decode(data[at:end]), end

    return read


def _as_pickletools(reader: Callable[[Any], Any]) -> _Read:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        stream = io.BytesIO(data)
        stream.seek(at)
        return reader(stream), stream.tell()

    return read


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


_READERS: Mapping[str, _Read] = {
    "uint1": lambda data, at: (data[at], at + 1),
    "uint2": _number("<H"),
    "uint4": _number("<I"),
    "uint8": _number("<Q"),
    "int4": _number("<i"),
    "float8": _number(">d"),
    "long1": _counted("<B", lambda raw: int.from_bytes(raw, "little", signed=True)),
    "unicodestring1": _counted("<B", _utf8),
    "unicodestring4": _counted("<I", _utf8),
    "unicodestring8": _counted("<Q", _utf8),
    "bytes1": _counted("<B", bytes),
    "bytes4": _counted("<I", bytes),
    "bytes8": _counted("<Q", bytes),
}
"""How the arguments of all that torch.save writes today are read, by pickletools' name of the argument's form.

pickletools' own readers, which serve for every other form, take several times longer; a test holds these to them.
"""

_HANDLERS: Mapping[str, _Handle] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _Machine.push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), _Machine.long),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "MEMOIZE": _Machine.memoize,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.pop() if machine.stack else machine.items(),
    "POP_MARK": lambda machine, _: machine.items(),
    "DUP": lambda machine, _: machine.push(machine.stack[-1]),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.items())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": lambda machine, _: machine.push(machine.items()),
    "DICT": lambda machine, _: machine.push(_pairs(machine.items())),
    "FROZENSET": lambda machine, _: machine.push(frozenset(_hashable(item) for item in machine.items())),
    "APPEND": _append_one,
    "APPENDS": lambda machine, _: machine.extend(machine.items()),
    "ADDITEMS": lambda machine, _: machine.add(machine.items()),
    "SETITEM": _set_one,
    "SETITEMS": lambda machine, _: machine.set_items(machine.items()),
    "GLOBAL": _global_pair,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "NEWOBJ_EX": _Machine.new_object_with_names,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def _steps() -> list[tuple[_Read | None, _Handle] | None]:
    """For each byte how its argument is read and what it does; None for what is refused."""
    steps: list[tuple[_Read | None, _Handle] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        if handle := _HANDLERS.get(opcode.name):
            form = opcode.arg
            read = (_READERS.get(form.name) or _as_pickletools(form.reader)) if form else None
            steps[ord(opcode.code)] = read, handle
    return steps


_STEPS = _steps()
_STOP = ord(".")


def _name(code: int) -> str:
    opcode = next((opcode for opcode in pickletools.opcodes if ord(opcode.code) == code), None)
    return f"the opcode {opcode.name}" if opcode else f"byte {code:#04x} as an opcode"


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    if len(flat) % 2:
        raise ValueError("a key without a value")
    return {_hashable(key): value for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _hashable(value: Any) -> Any:
    """The value, if it can be hashed in bounded time.

    hash() of a tuple recurses in C without a limit and visits shared parts again and again, so both are bounded first.
    Long integers are refused because keys that collide could be made of them.
    """
    if type(value) is str:  # nearly every key, so it need not take the long way
        return value
    todo, parts = [value], 0
    while todo:
        part = todo.pop()
        parts += 1
        if parts > MAX_KEY_PARTS:
            raise ValueError("a key is too large")
        if type(part) is tuple:
            todo.extend(part[: MAX_KEY_PARTS + 1])
        elif type(part) not in (str, int, float, bool, bytes, type(None), Global, Object):
            raise ValueError("a key is no plain value")
        elif type(part) is int and part.bit_length() > 64:
            raise ValueError("a key is too large")
    return value


def _storage(identifier: Any) -> StorageRef:
    """torch's persistent id: ("storage", class, key, location, elements), and in old files a view, which is None."""
    if type(identifier) is not tuple or len(identifier) not in (5, 6) or identifier[0] != "storage":
        raise ValueError("a persistent id is no storage")
    _, kind, key, _, numel, *view = identifier
    described = type(kind) is Global and type(key) is str and type(numel) is int and numel >= 0
    if not described or view not in ([], [None]):
        raise ValueError("a storage is not described as torch does it")
    if kind.name == "torch.storage.UntypedStorage":
        return StorageRef(key, "uint8", numel)
    return StorageRef(key, STORAGES[kind.name.rpartition(".")[2]], numel)


def _call(function: Global, arguments: tuple[Any, ...]) -> Any:
    name = function.name
    if name == "torch._tensor._rebuild_from_type_v2":
        inner, kind, inner_arguments, *state = arguments
        if type(inner) is not Global or inner == function or type(inner_arguments) is not tuple:
            raise ValueError("a typed tensor is not described as torch does it")
        if inner.name == "torch._utils._rebuild_wrapper_subclass":
            return _sharded(kind, inner_arguments, *state)
        return _call(inner, inner_arguments)
    builder = _BUILDERS.get(name)
    return builder(*arguments) if builder else Object(function, arguments)


def _empty_dict() -> dict[Any, Any]:
    # Items would be copied, and a pickle can ask for the same copy a million times; torch sets them one by one.
    return {}


def _size(items: Any = ()) -> tuple[Any, ...]:
    if type(items) not in (tuple, list) or len(items) > MAX_RANK:
        raise ValueError("a size is no short sequence")
    return tuple(items)


def _sharded(kind: Any, arguments: tuple[Any, ...], state: Any) -> Sharded:
    """_rebuild_wrapper_subclass(class, dtype, size, stride, offset, layout, device, requires_grad), and its state."""
    _, dtype, shape, *_ = arguments
    names = {**dict.fromkeys(_DTENSOR, "DTensor"), _SHARDED: "ShardedTensor"}
    if type(shape) is not tuple or len(shape) > MAX_RANK or any(type(n) is not int or n < 0 or n >> 63 for n in shape):
        raise ValueError("a sharded tensor's size is no short tuple of numbers")
    return Sharded(names[kind.name], dtype.name.removeprefix("torch."), shape, state)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> TensorRef:
    """_rebuild_tensor(storage, offset, size, stride), and v2 with requires_grad, hooks and optional metadata."""
    lazy = len(rest) > 2 and bool(rest[2])
    return _tensor_ref(storage, storage.dtype, offset, shape, stride, lazy)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, lazy: Any = None
) -> TensorRef:
    kind = dtype.name.removeprefix("torch.")
    if kind not in ITEMSIZE:
        raise ValueError("a tensor's dtype is unknown")
    return _tensor_ref(storage, kind, offset, shape, stride, bool(lazy))


def _tensor_ref(storage: Any, dtype: str, offset: Any, shape: Any, stride: Any, lazy: bool) -> TensorRef:
    if type(shape) is not tuple or type(stride) is not tuple or max(len(shape), len(stride)) > MAX_RANK:
        raise ValueError(f"a tensor's size is no tuple of at most {MAX_RANK} numbers")
    numbers = (offset, *shape, *stride)
    if type(storage) is not StorageRef or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor is not described as torch does it")
    if any(size >> 63 for size in shape):
        raise ValueError("a tensor's size is beyond 63 bits")
    if len(shape) != len(stride):
        raise ValueError("a tensor's size and stride differ in length")
    return TensorRef(storage, dtype, offset, shape, stride, lazy)


_BUILDERS: Mapping[str, Callable[..., Any]] = {
    "builtins.getattr": lambda kind, name: Global(f"{kind.name}.{name}"),  # of what `call` lets through
    "collections.OrderedDict": _empty_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
}


def _shown(text: str) -> str:
    # The name is the attacker's text: bounded, and no escape sequences reach the terminal.
    return ascii(text[:120])


def _reason(name: str) -> str:
    for prefix, hint in _HINTS.items():
        if name.startswith(prefix):
            return hint
    return (
        "only plain containers, numbers, strings and tensors are read, and nothing is ever run; "
        "save model.state_dict() instead of whole objects"
    )
