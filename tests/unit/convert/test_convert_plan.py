"""The layout of output files, against the rules of the safetensors format and the library that reads them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert.dtypes import CASTABLE, ITEMSIZE, SAFETENSORS
from bridge.convert.plan import decide_tie, index_json, main_dtype, output_dtype, place


@dataclass(frozen=True)
class Shape:
    """A tensor that is only planned with."""

    dtype: str
    shape: tuple[int, ...]
    identity: str = ""

    def blocks(self) -> Iterator[bytes]:
        raise AssertionError("a plan moves no data")


shapes = st.builds(
    Shape, st.sampled_from(sorted(SAFETENSORS)), st.lists(st.integers(0, 6), max_size=3).map(tuple), st.text()
)
names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)


@given(
    tensors=st.dictionaries(names, shapes, min_size=1, max_size=12),
    wanted=st.sampled_from(["auto", "bfloat16", "float32"]),
    limit=st.integers(1, 2000),
)
def test_every_tensor_lies_once_aligned_and_without_gaps(tensors: dict[str, Shape], wanted: str, limit: int) -> None:
    files = place(tensors, wanted, limit)
    assert sorted(tensor.name for file in files for tensor in file.tensors) == sorted(tensors)
    assert index_json(files)["weight_map"] == {tensor.name: file.name for file in files for tensor in file.tensors}
    for number, file in enumerate(files, 1):
        single = len(files) == 1
        assert file.name == ("model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors")
        assert file.data <= limit or len([t for t in file.tensors if t.end > t.begin]) == 1
        length = int.from_bytes(file.header[:8], "little")
        assert length == len(file.header) - 8 and length % 8 == 0
        header = json.loads(file.header[8:])
        assert header.pop("__metadata__") == {"format": "pt"}
        at = 0
        for tensor in file.tensors:
            source = tensors[tensor.name]
            assert (tensor.begin, tensor.begin % ITEMSIZE[tensor.dtype]) == (at, 0)
            assert tensor.dtype == (wanted if wanted != "auto" and source.dtype in CASTABLE else source.dtype)
            entry = {"dtype": SAFETENSORS[tensor.dtype], "shape": [*source.shape], "data_offsets": [at, tensor.end]}
            assert header[tensor.name] == entry
            at = tensor.end
        opened = dict(safetensors.deserialize(file.header + bytes(file.data)))
        assert set(opened) == {tensor.name for tensor in file.tensors}


def test_shards_are_filled_in_order() -> None:
    tensors = {name: Shape("float32", (size,)) for name, size in {"a": 10, "b": 10, "c": 11, "d": 100, "e": 1}.items()}
    shards = [[tensor.name for tensor in file.tensors] for file in place(tensors, "auto", 80)]
    assert shards == [["a", "b"], ["c"], ["d"], ["e"]]


def test_the_config_gets_the_float_type_of_most_bytes() -> None:
    tensors = {"w": Shape("bfloat16", (100,)), "scale": Shape("float32", (40,)), "steps": Shape("int64", (1000,))}
    assert main_dtype(tensors, "auto") == "bfloat16"
    assert main_dtype(tensors, "float16") == "float16"
    assert main_dtype({"steps": tensors["steps"]}, "float16") is None
    assert output_dtype("float8_e4m3fn", "float32") == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("config", "equal", "dropped", "flag"),
    [
        ({"tie_word_embeddings": True}, True, True, None),
        ({"tie_word_embeddings": True}, False, False, False),
        ({"tie_word_embeddings": False}, True, False, None),
        ({"tie_word_embeddings": False}, False, False, None),
        ({}, True, False, None),
        ({}, False, False, False),
        ({"text_config": {"tie_word_embeddings": True}}, True, True, None),
    ],
)
def test_ties(config: dict[str, object], equal: bool, dropped: bool, flag: bool | None) -> None:
    tensors = {"model.embed_tokens.weight": Shape("float32", (5, 2)), "lm_head.weight": Shape("float32", (5, 2))}
    tie = decide_tie(tensors, config, lambda a, b: equal)
    assert tie.dropped == (("lm_head.weight", "model.embed_tokens.weight") if dropped else None)
    assert tie.flag is flag


def test_a_model_without_head_or_embedding_has_no_tie() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tie = decide_tie({name: Shape("float32", (5, 2))}, {"tie_word_embeddings": True}, lambda a, b: True)
        assert (tie.dropped, tie.flag) == (None, None)
