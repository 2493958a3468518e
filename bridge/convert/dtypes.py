"""Element types as torch and safetensors name them, and rounding between the float types without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""torch dtype -> the name in a safetensors header. A dtype that is not here cannot be written."""

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "qint8": 1,
    "quint8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "qint32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""torch dtype -> bytes per element."""

STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}
"""Typed storage class of torch -> dtype of its elements."""

CASTABLE = ("float64", "float32", "bfloat16", "float16")
"""Only these change type on request: integers, bools, float8 and packed data keep their bytes."""

TARGETS = ("float32", "bfloat16", "float16")

_CHUNK = 1 << 18  # elements; the temporaries of one chunk stay in the CPU's cache


def cast(raw: Bytes, source: str, target: str) -> Bytes:
    """Bytes of `source` floats as bytes of `target` floats, rounded to nearest even as torch does it.

    Everything passes through float32, as in torch, so float64 is rounded twice on its way to a 16-bit type.
    Infinities, signed zeros and subnormals are kept; a NaN stays a NaN of the same sign.
    """
    if source == target:
        return raw
    elements = raw.size // ITEMSIZE[source]
    out = np.empty(elements * ITEMSIZE[target], np.uint8)
    wide, narrow = ITEMSIZE[source], ITEMSIZE[target]
    for start in range(0, elements, _CHUNK):
        stop = min(start + _CHUNK, elements)
        floats = _to_float32(raw[start * wide : stop * wide], source)
        out[start * narrow : stop * narrow] = _from_float32(floats, target)
    return out


_INFINITY = {
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
"""Bits of a float, all but its sign, and infinity in them: comparing integers is many times faster than isinf."""


def infinities(raw: Bytes, dtype: str) -> int:
    """How many elements are infinite."""
    unsigned, mask, infinity = _INFINITY[dtype]
    bits = raw.view(unsigned)
    return int(np.count_nonzero((bits & unsigned(mask)) == unsigned(infinity)))


def _to_float32(raw: Bytes, source: str) -> NDArray[np.float32]:
    if source == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return raw.view(source).astype(np.float32, copy=False)


def _from_float32(floats: NDArray[np.float32], target: str) -> Bytes:
    if target == "bfloat16":
        return _round_to_bfloat16(floats).view(np.uint8)
    if target == "float16":
        return _round_to_float16(floats).view(np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return floats.astype(target, copy=False).view(np.uint8)


def _round_to_bfloat16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = floats.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out = rounded.astype(np.uint16)
    nan = np.isnan(floats)
    if nan.any():
        # The carry would turn some NaNs into infinity or zero; the quiet bit keeps those with a low payload NaN.
        out[nan] = (bits[nan] >> 16) | 0x40
    return out


_FLOAT16_NORMAL, _FLOAT16_END = 0x38800000, 0x477FF000
"""Bits of the float32 from which on a float16 is no subnormal (2^-14), and from which on it is infinite (65,520)."""


def _round_to_float16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Integer arithmetic for what becomes a normal float16, in half the time of numpy's cast, which does the rest."""
    bits = floats.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude >> 13
    rounded &= 1
    rounded += 0xFFF
    rounded += magnitude
    rounded >>= 13
    rounded -= (127 - 15) << 10  # float32's exponent to float16's
    sign = bits >> 16
    sign &= 0x8000
    rounded |= sign
    out = rounded.astype(np.uint16)
    magnitude -= _FLOAT16_NORMAL  # what is below wraps around
    rest = np.flatnonzero(magnitude >= _FLOAT16_END - _FLOAT16_NORMAL)
    if rest.size:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out[rest] = floats[rest].astype(np.float16).view(np.uint16)
    return out
