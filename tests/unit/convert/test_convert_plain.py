"""From a torch.save file to a model folder: every tensor bit for bit, under its right name, with a true config."""

import argparse
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIG, config_of, folder, loaded, raw_archive, same_bits

from bridge.convert import convert, inspect, parse_size
from bridge.errors import UserError


def values() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(61, 8, generator=draw),
        "model.layers.0.w": torch.randn(8, 8, generator=draw),
        "model.norm.weight": torch.randn(8, generator=draw),
        "lm_head.weight": torch.randn(61, 8, generator=draw),
    }


def assert_holds(out: Path, want: dict[str, torch.Tensor]) -> None:
    got = loaded(out)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor), name


def all_dtypes() -> dict[str, torch.Tensor]:
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 uint16 uint32 uint64 complex64"
    names += " float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"
    return {name: torch.arange(6).remainder(2).reshape(2, 3).to(getattr(torch, name)) for name in names.split()}


def test_every_dtype_keeps_its_bytes_and_floats_alone_are_cast(tmp_path: Path) -> None:
    want = all_dtypes()
    path = folder(tmp_path / "src", want)
    convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", want)
    convert(path, tmp_path / "cast", dtype="bfloat16")
    floats = ("float64", "float32", "float16")
    assert_holds(tmp_path / "cast", {n: t.bfloat16() if n in floats else t for n, t in want.items()})


@pytest.mark.parametrize("zipped", [True, False])
def test_views_scalars_empties_and_odd_strides(tmp_path: Path, zipped: bool) -> None:
    base = torch.randn(50, 40)
    want = {
        "slice": base[3:20, 5:9],
        "transposed": base.t(),
        "expanded": base[0, :1].expand(5, 7),
        "every third": base[::3, ::2],
        "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
    }
    path = folder(tmp_path / "src", {})
    torch.save(want, path, _use_new_zipfile_serialization=zipped)
    report = convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", {name: tensor.detach() for name, tensor in want.items()})
    assert (report.tensors, report.bytes) == (9, sum(t.numel() * 4 for t in want.values()))


def training_checkpoint() -> dict[str, Any]:
    """What a trainer of ours saves: the model, and everything needed to go on."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "bit generator": np.random.default_rng(0).bit_generator.state,
        "cursor": {"epoch": 1, "row": 17, "order": list(range(500))},
        "args": argparse.Namespace(lr=1e-3, out=Path("x"), dtype=torch.bfloat16, device=torch.device("cpu")),
        "loss": np.float32(0.5),
        "array": np.arange(3),
        "tags": {"a", "b"},
        "range": range(3),
        "raw": b"\xff",
        "step": 120,
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_training_checkpoint_gives_its_model(tmp_path: Path, protocol: int) -> None:
    content = training_checkpoint()
    path = folder(tmp_path / "src", {})
    torch.save(content, path, pickle_protocol=protocol)
    convert(tmp_path / "src", tmp_path / "out")
    assert_holds(tmp_path / "out", content["model"])
    facts = inspect(path)
    assert (facts["format"], facts["wrapper"], facts["step"]) == ("torch", ["model"], 120)
    assert facts["bytes"] == sum(t.numel() * t.itemsize for t in content["model"].values())
    assert {"name": "1.num_batches_tracked", "dtype": "int64", "shape": []} in facts["tensors"]
    json.dumps(facts)


@pytest.mark.parametrize("keys", [["state_dict"], ["module"], ["model_state_dict"], ["model", "module"], ["actor"]])
def test_wrappers_are_opened(tmp_path: Path, keys: list[str]) -> None:
    want, content = values(), values()
    for key in reversed(keys):
        content = {key: content, "epoch": 1, "optimizer": {"state": {}}}
    convert(folder(tmp_path / "src", content), tmp_path / "out")
    assert_holds(tmp_path / "out", want)


@pytest.mark.timeout(60)  # the alternative is hours
def test_wrappers_that_hold_each_other_end(tmp_path: Path) -> None:
    keys = ("model", "state_dict", "model_state_dict", "module", "actor", "policy", "net", "weights")
    content: dict[Any, Any] = {**dict.fromkeys(range(300_000))}
    for _ in range(3):
        content = dict.fromkeys(keys, content)
    content["model"]["model"]["model"]["model"] = content
    with pytest.raises(UserError, match="holds no tensors"):
        convert(folder(tmp_path / "src", content), tmp_path / "out")


def test_averaged_weights_serve_only_alone(tmp_path: Path) -> None:
    plain, ema = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    convert(folder(tmp_path / "a", {"model": plain, "ema": ema}), tmp_path / "both")
    assert_holds(tmp_path / "both", plain)
    convert(folder(tmp_path / "b", {"ema": ema}), tmp_path / "alone")
    assert_holds(tmp_path / "alone", ema)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no tensors"),
        ({"model": {}, "step": 3}, "'model' in it holds no tensors"),
        ({"model": {"epoch": 3}}, "'model' in it holds no tensors"),
        ({"weights of mine": {"w": torch.ones(1)}}, "its keys: 'weights of mine'"),
        ([torch.ones(1)], "a list"),
        (torch.ones(1), "but a tensor"),
        ({"model": {"w": torch.ones(1)}, "actor": {"w": torch.ones(1)}}, r"several sets of weights \(model, actor\)"),
        ({"module": {"w": torch.ones(0)}, "param_shapes": [{"w": torch.Size([2])}]}, "ZeRO-3 .* placeholders"),
        ({"w": torch.ones(1, dtype=torch.complex128)}, "complex128"),
        ({"w": torch.ones(1, dtype=torch.complex64).conj()}, "conjugated"),
        ({"w": torch.eye(3).to_sparse(), "v": torch.ones(1)}, "sparse"),
        ({"w": torch.ones(3, device="meta"), "v": torch.ones(1)}, "meta"),
        ({"__metadata__": torch.ones(1)}, "cannot be written"),
        ({"bad \ud800 name": torch.ones(1)}, "cannot be written"),
        ({"layer.lora_A.default.weight": torch.ones(1)}, "lora_alpha"),
        ({"model._flat_param": torch.ones(1)}, "flattened FSDP"),
        ({"module.w": torch.ones(1), "module._orig_mod.w": torch.ones(1)}, "have the same name"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = folder(tmp_path / "src", content)
    with pytest.raises(UserError, match=message) as caught:
        convert(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.module.",
        "_forward_module.policy.",
        "actor.",
        "base_model.model.",
    ],
)
def test_prefixes_that_all_names_share_are_taken_off(tmp_path: Path, prefix: str) -> None:
    noisy = {prefix + name: tensor for name, tensor in values().items()}
    convert(folder(tmp_path / "src", {"model": noisy}), tmp_path / "out")
    assert_holds(tmp_path / "out", values())


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("model.model.norm.weight", "model.lm_head.weight"), ("model.norm.weight", "lm_head.weight")),
        (("module.model.model.norm.weight",), ("model.norm.weight",)),
        (("model.transformer.h.0.weight", "model.lm_head.weight"), ("transformer.h.0.weight", "lm_head.weight")),
        (("model.norm.weight",), ("model.norm.weight",)),
        (("model.model.norm.weight", "value_head.weight"), ("model.model.norm.weight", "value_head.weight")),
    ],
)
def test_the_attribute_of_a_lightning_module_goes(
    tmp_path: Path, names: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    """`model.` is of the transformer itself, unless a whole model lies in it."""
    convert(folder(tmp_path / "src", {"state_dict": {name: torch.ones(2) for name in names}}), tmp_path / "out")
    assert sorted(loaded(tmp_path / "out")) == sorted(kept)


def test_noise_inside_names_goes_and_real_parts_stay(tmp_path: Path) -> None:
    w = torch.ones(1)
    noisy = {"model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.module.w": w, "policy.w": w}
    convert(folder(tmp_path / "src", noisy), tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"model.layers.0.module.w", "policy.w"}


def test_entries_that_are_no_tensors_are_reported(tmp_path: Path) -> None:
    report = convert(folder(tmp_path / "src", {"w": torch.ones(1), "_extra_state": None, "v": 3}), tmp_path / "out")
    assert report.dropped == ["_extra_state", "v"]


@pytest.mark.parametrize("alias", [True, False])
def test_a_tied_head_that_is_equal_is_left_out(tmp_path: Path, alias: bool) -> None:
    want = values()
    embedding = want["model.embed_tokens.weight"]
    content = {**want, "lm_head.weight": embedding if alias else embedding.clone()}
    report = convert(folder(tmp_path / "src", content), tmp_path / "out", dtype="float16")
    want.pop("lm_head.weight")
    assert_holds(tmp_path / "out", {name: tensor.half() for name, tensor in want.items()})
    assert (report.tied, config_of(tmp_path / "out")["tie_word_embeddings"]) == (["lm_head.weight"], True)


@pytest.mark.parametrize("text_config", [False, True])
def test_a_tied_flag_over_different_tensors_becomes_false(tmp_path: Path, text_config: bool) -> None:
    nested = {"text_config": {"tie_word_embeddings": True, "dtype": "float64", "hidden_size": 8}}
    path = folder(tmp_path / "src", values(), **(nested if text_config else {}))
    report = convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", values())
    config = config_of(tmp_path / "out")
    assert config["tie_word_embeddings"] is False and report.tied == []
    assert any("tie_word_embeddings" in warning for warning in report.warnings)
    if text_config:
        assert config["text_config"] == {"tie_word_embeddings": False, "dtype": "float32", "hidden_size": 8}


@pytest.mark.parametrize(("flag", "equal", "after"), [(False, True, False), (None, True, None), (None, False, False)])
def test_without_a_tied_flag_the_head_stays(tmp_path: Path, flag: bool | None, equal: bool, after: bool | None) -> None:
    content = values()
    if equal:
        content["lm_head.weight"] = content["model.embed_tokens.weight"]
    path = folder(tmp_path / "src", content, tie_word_embeddings=flag)
    if flag is None:
        config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
        (tmp_path / "src" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", content)
    assert config_of(tmp_path / "out").get("tie_word_embeddings") is after


def test_the_config_says_what_was_written(tmp_path: Path) -> None:
    content = {**values(), "steps": torch.arange(1000), "scale": torch.ones(1, dtype=torch.float16)}
    path = folder(tmp_path / "src", {k: v.bfloat16() if k in values() else v for k, v in content.items()}, extra=[1])
    report = convert(path, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert report.dtype == config["torch_dtype"] == config["dtype"] == "bfloat16"
    changed = {**CONFIG, "extra": [1], "torch_dtype": "bfloat16", "dtype": "bfloat16", "tie_word_embeddings": False}
    assert config == changed
    assert list(config)[:3] == ["architectures", "model_type", "vocab_size"]


def test_values_too_large_for_float16_are_reported(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", {"a": torch.tensor([1e5, -7e4, float("inf"), 1.0]), "b": torch.ones(1)})
    report = convert(path, tmp_path / "out", dtype="float16")
    assert [warning for warning in report.warnings if "infinite" in warning] == [
        "a: 2 finite values are too large for float16 and became infinite"
    ]


def test_shards_and_index(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", values())
    report = convert(path, tmp_path / "out", max_shard_size=2000)
    # embed 1952, then 256 + 32 together, then lm_head 1952
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index == {
        "metadata": {"total_size": 4192},
        "weight_map": dict(zip(values(), [files[0], files[1], files[1], files[2]], strict=True)),
    }
    assert (report.files, report.bytes, report.tensors) == (3, 4192, 4)
    assert_holds(tmp_path / "out", values())
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [
        "config.json", *files, "model.safetensors.index.json"
    ]  # fmt: skip


def bin_set(path: Path) -> dict[str, torch.Tensor]:
    want = values()
    names = list(want)
    folder(path, {name: want[name] for name in names[:2]}, "pytorch_model-00001-of-00002.bin")
    folder(path, {name: want[name] for name in names[2:]}, "pytorch_model-00002-of-00002.bin")
    files = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 1, 2, 2)]
    write_index(path, dict(zip(names, files, strict=True)))
    return want


def write_index(path: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "pytorch_model.bin.index.json").write_text(text, encoding="utf-8")


def test_a_sharded_bin_folder(tmp_path: Path) -> None:
    want = bin_set(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "out")
    assert report.format == "hf-bin"
    assert_holds(tmp_path / "out", want)


def test_a_bin_folder_with_a_fault_is_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    bin_set(source)
    second = source / "pytorch_model-00002-of-00002.bin"
    outside = tmp_path / "outside.bin"
    outside.write_bytes(second.read_bytes())
    good = json.loads((source / "pytorch_model.bin.index.json").read_text(encoding="utf-8"))["weight_map"]
    for weight_map, message in [
        ({**good, "lm_head.weight": "../outside.bin"}, "leads out of the folder"),
        ({**good, "lm_head.weight": str(outside)}, "leads out of the folder"),
        ({**good, "lm_head.weight": ".."}, "leads out of the folder"),
        ({**good, "lm_head.weight": "pytorch_model-00001-of-00002.bin"}, "lacks the tensor 'lm_head.weight'"),
        ({**good, "lm_head.weight": 3}, "does not map"),
        ({}, "does not map"),
        ([], "does not map"),
        (None, "does not map"),
        ({**good, "w": "pytorch_model-00003-of-00003.bin"}, "1 of its 3 files are missing: pytorch_model-00003"),
    ]:
        write_index(source, weight_map)
        with pytest.raises(UserError, match=message):
            convert(source, out)
    write_index(source, good)
    second.unlink()
    second.symlink_to(outside)
    with pytest.raises(UserError, match="link that leads out"):
        convert(source, out)
    second.unlink()
    folder(source, values(), second.name)
    with pytest.raises(UserError, match="is in two of its files"):
        convert(source, out)
    assert not out.exists()


def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    path = folder(snapshot, values(), "pytorch_model.bin")
    blobs.mkdir()
    path.rename(blobs / "123")
    path.symlink_to("../../blobs/123")
    convert(snapshot, tmp_path / "out")
    assert_holds(tmp_path / "out", values())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no checkpoint file"),
        (["a.pt", "b.pt"], r"several checkpoints \(a.pt, b.pt\)"),
        (["pytorch_model.bin", "pytorch_model.bin.index.json"], "several checkpoints"),
        (["optimizer.pt", "rng_state_0.pth", "training_args.bin"], "holds no checkpoint file"),
        (["__0_0.distcp"], "lacks .metadata"),
        (["model_world_size_2_rank_0.pt"], "1 of its 2 files are missing: model_world_size_2_rank_1.pt"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "lacks the model states of rank 0"),
        (["mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"], "tensor parallel"),
        (["adapter_config.json"], "no adapter_model"),
        (["ckpt_contents.json"], "Megatron"),
        (["iter_0000100", "latest_checkpointed_iteration.txt"], "Megatron"),
        (["latest_universal"], "universal"),
        (["model.safetensors"], "no safetensors file"),
        (["a.safetensors", "model-00001-of-00002.safetensors"], "no index"),
    ],
)
def test_folders_of_another_kind_are_named(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ((40).to_bytes(8, "little") + b'{"a":{}}' + b" " * 32, "'a' is not described as safetensors does it"),
        (pickle.dumps({}), "bare pickle"),
        (bytes(257) + b"ustar" + bytes(250), "tar file"),
        (b"hello", "unknown kind"),
    ],
)
def test_files_of_another_kind_are_named(tmp_path: Path, head: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(head)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "x.pt", tmp_path / "out")


def reference(shape: str, stride: str, offset: str = "I0\n", numel: str = "I6\n", key: str = "0") -> bytes:
    """A state dict of one tensor, written opcode by opcode so that its numbers can lie."""
    text = f"(S'w'\nctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nFloatStorage\nS'{key}'\nS'cpu'\n{numel}tQ"
    return (text + f"{offset}({shape}t({stride}tI00\nNtRd.").encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (reference("I7\n", "I1\n"), "needs 28 bytes of a storage that has 24"),
        (reference("I6\n", "I1\n", offset="I1\n"), "needs 28 bytes of a storage that has 24"),
        (reference("I2\nI2\n", "I5\nI1\n"), "needs 28 bytes of a storage that has 24"),
        (reference("I7\n", "I1\n", numel="I7\n"), "needs 28 bytes of a storage that has 24"),
        (reference("I6\n", "I1\n", key="../../etc/passwd"), "lacks the storage"),
        (reference(f"I{2**62}\nI{2**62}\n", "I0\nI0\n"), "claims"),
        (reference(f"I{2**40}\n", "I0\n"), "claims"),
        (reference(f"I{2**26}\n", "I1\n"), "needs"),
        (reference("I1\n", "I1\n", offset=f"I{2**63}\n"), "needs"),
    ],
)
def test_sizes_that_lie_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = raw_archive(tmp_path / "src" / "x.pt", data, {"data/0": bytes(24)})
    with pytest.raises(UserError, match=message):
        convert(path, tmp_path / "out")


def test_an_honest_handwritten_reference_converts(tmp_path: Path) -> None:
    """The archives above differ from this one by the lie alone."""
    data = np.arange(6, dtype=np.float32).tobytes()
    path = raw_archive(tmp_path / "src" / "x.pt", reference("I2\nI3\n", "I3\nI1\n"), {"data/0": data})
    convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", {"w": torch.arange(6.0).reshape(2, 3)})


@pytest.mark.parametrize("share", [0.01, 0.2, 0.6, 0.99])
def test_a_cut_legacy_file_is_refused(tmp_path: Path, share: float) -> None:
    path = folder(tmp_path / "src", {})
    torch.save(values(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(UserError, match=r"checkpoint\.pt"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 gb", 1_500_000_000), ("200", 200), ("7KB", 7000), ("2M", 2_000_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 apples", "5GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="is not understood"):
        parse_size(text)


def test_tensors_beside_the_weights_are_told_of(tmp_path: Path) -> None:
    """A model in nested dicts loses what lies deeper, so the report says it; an average is known to be none of it."""
    inner = {"w": torch.ones(2), "v": torch.ones(2)}
    report = convert(folder(tmp_path / "a", {"model": {"b": torch.ones(1), "layer": inner}}), tmp_path / "out")
    assert any("'layer' beside the weights holds 2 tensors" in text for text in report.warnings)
    assert not inspect(folder(tmp_path / "c", {"model": inner, "ema": inner, "optimizer": {"w": inner["w"]}}))[
        "warnings"
    ]


def test_tensors_that_are_not_written_are_told_of(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2), "experts": [torch.ones(2), torch.zeros(2)]},
        "v_head.weight": torch.ones(1, 2),
        "step": torch.tensor(5.0),
        "rng_state": torch.zeros(9, dtype=torch.uint8),
    }
    report = convert(folder(tmp_path / "src", state), tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"w"} and report.dropped == ["experts"]
    told = [text for text in report.warnings if "not written" in text]
    assert len(told) == 2 and "'experts' beside the weights holds 2" in told[0]
    assert told[1].startswith("1 tensors beside the weights were not written ('v_head.weight')")
