"""Adapters merged into their base, against sums in double precision made here from the published formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIG, config_of, loaded, same_bits
from safetensors.torch import save_file

from bridge.convert import convert
from bridge.errors import UserError

PREFIX = "base_model.model."


def base_model(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (11, 6),
        "q_proj.weight": (6, 6),
        "v_proj.weight": (4, 6),
        "norm.weight": (6,),
    }
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    return weights


def adapter(folder: Path, tensors: dict[str, torch.Tensor], binary: bool = False, **config: Any) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    if binary:
        torch.save(named, folder / "adapter_model.bin")
    else:
        save_file(named, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, rows: int, columns: int, rank: int = 2, kind: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weight = "" if kind else ".weight"
    return {
        f"{module}.lora_{kind}A{weight}": torch.randn(rank, columns, generator=generator),
        f"{module}.lora_{kind}B{weight}": torch.randn(rows, rank, generator=generator),
    }


def assert_sum(got: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor, scale: float) -> None:
    want = weight.double() + scale * delta
    slack = 1e-5 if got.dtype == torch.float32 else 2.0**-8 * float(want.abs().max())
    assert got.dtype in (weight.dtype, torch.float32) and torch.allclose(got.double(), want, rtol=0, atol=slack)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stabilised", [False, True])
def test_scale_and_patterns(tmp_path: Path, binary: bool, dtype: str, stored: torch.dtype, stabilised: bool) -> None:
    weights = base_model(tmp_path / "base", stored)
    tensors = {**pair("q_proj", 6, 6), **pair("v_proj", 4, 6, rank=3)}
    source = adapter(
        tmp_path / "src",
        tensors,
        binary,
        use_rslora=stabilised,
        rank_pattern={"v_proj": 3},
        alpha_pattern={"v_proj": 5},
    )
    report = convert(source, tmp_path / "out", base=tmp_path / "base", dtype=dtype)
    got = loaded(tmp_path / "out")
    assert set(got) == set(weights)
    for name, alpha, rank in (("q_proj", 8, 2), ("v_proj", 5, 3)):
        delta = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
        scale = alpha / (math.sqrt(rank) if stabilised else rank)
        assert_sum(got[f"{name}.weight"], weights[f"{name}.weight"], delta, scale)
    assert report.dtype == ("float32" if dtype == "float32" else str(stored).removeprefix("torch."))
    assert same_bits(got["norm.weight"], weights["norm.weight"].to(got["norm.weight"].dtype))


def test_fan_in_fan_out_adds_the_transpose(tmp_path: Path) -> None:
    weights = base_model(tmp_path / "base")
    tensors = pair("v_proj", 6, 4)
    source = adapter(tmp_path / "src", tensors, fan_in_fan_out=True)
    convert(source, tmp_path / "out", base=tmp_path / "base")
    delta = (tensors["v_proj.lora_B.weight"] @ tensors["v_proj.lora_A.weight"]).T.double()
    assert_sum(loaded(tmp_path / "out")["v_proj.weight"], weights["v_proj.weight"], delta, 4)


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_an_adapter_on_one_tied_end_unties_them(tmp_path: Path, end: str) -> None:
    weights = base_model(tmp_path / "base", tie_word_embeddings=True)
    embedding = weights["model.embed_tokens.weight"]
    tensors = pair("model.embed_tokens", 6, 11, kind="embedding_") if end == "embedding" else pair("lm_head", 11, 6)
    convert(adapter(tmp_path / "src", tensors), tmp_path / "out", base=tmp_path / "base")
    got = loaded(tmp_path / "out")
    a, b = (tensor.double() for tensor in tensors.values())
    changed, kept = ("model.embed_tokens.weight", "lm_head.weight")[:: 1 if end == "embedding" else -1]
    assert_sum(got[changed], embedding, (b @ a).T if end == "embedding" else b @ a, 4)
    assert same_bits(got[kept], embedding)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False


def test_saved_modules_replace(tmp_path: Path) -> None:
    base_model(tmp_path / "base")
    tensors = {**pair("q_proj", 6, 6), "norm.modules_to_save.default.weight": torch.full((6,), 3.0)}
    convert(adapter(tmp_path / "src", tensors), tmp_path / "out", base=tmp_path / "base")
    assert torch.equal(loaded(tmp_path / "out")["norm.weight"], torch.full((6,), 3.0))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("model_type", "turned"), [("gpt2", True), ("llama", False), (None, None)])
def test_the_layout_of_a_square_weight_goes_by_the_model(
    tmp_path: Path, told: bool, model_type: str | None, turned: bool | None
) -> None:
    """`fan_in_fan_out` is one for all modules: PEFT saves that of the last, and heeds the layer's type at loading."""
    weights = base_model(tmp_path / "base", model_type=model_type)
    tensors = pair("q_proj", 6, 6)
    source = adapter(tmp_path / "src", tensors, fan_in_fan_out=told)
    convert(source, tmp_path / "out", base=tmp_path / "base")
    delta = (tensors["q_proj.lora_B.weight"] @ tensors["q_proj.lora_A.weight"]).double()
    delta = delta.T if (told if turned is None else turned) else delta
    assert_sum(loaded(tmp_path / "out")["q_proj.weight"], weights["q_proj.weight"], delta, 4)


@pytest.mark.parametrize(
    ("key", "alpha"),
    [("q_proj", 5), ("^layers.0.q_proj$", 5), ("layers.0.q_proj", 5), ("proj", 8), ("^q_proj", 8), ("q.proj", 5)],
)
def test_alpha_patterns_match_as_in_peft(tmp_path: Path, key: str, alpha: int) -> None:
    """PEFT's rule: `(.*\\.)?(KEY)$` against the whole name of the module."""
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    base_model(tmp_path / "base")
    save_file({"layers.0.q_proj.weight": weight}, tmp_path / "base" / "model.safetensors")
    tensors = pair("layers.0.q_proj", 6, 6)
    convert(adapter(tmp_path / "src", tensors, alpha_pattern={key: 5}), tmp_path / "out", base=tmp_path / "base")
    a, b = (tensor.double() for tensor in tensors.values())
    assert_sum(loaded(tmp_path / "out")["layers.0.q_proj.weight"], weight, b @ a, alpha / 2)


def test_an_adapter_in_a_state_dict_may_have_any_name(tmp_path: Path) -> None:
    """As `PeftModel.state_dict()` has it, with a module that is trained whole."""
    weights = base_model(tmp_path / "base")
    factors = {name.replace("weight", "mine.weight"): value for name, value in pair("q_proj", 6, 6).items()}
    wrapped = {name.replace("q_proj.", "q_proj.base_layer."): value for name, value in weights.items()}
    wrapped["norm.original_module.weight"] = wrapped.pop("norm.weight")
    wrapped["norm.modules_to_save.mine.weight"] = torch.full((6,), 3.0)
    folder = adapter(tmp_path / "src", {})
    (folder / "adapter_model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.save({PREFIX + name: value for name, value in (wrapped | factors).items()}, folder / "model.pt")
    convert(folder / "model.pt", tmp_path / "out")
    got = loaded(tmp_path / "out")
    a, b = (tensor.double() for tensor in factors.values())
    assert set(got) == set(weights) and torch.equal(got["norm.weight"], torch.full((6,), 3.0))
    assert_sum(got["q_proj.weight"], weights["q_proj.weight"], b @ a, 4)


Q = {"q_proj.base_layer.weight": torch.ones(6, 6)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (Q | {"q_proj.ia3_l.default": torch.ones(6, 1)}, "ia3_l.*of no LoRA"),
        (Q | {"q_proj.lora_E.default": torch.ones(2, 1)}, "lora_E.*of no LoRA"),
        (Q | {"q_proj.lora_magnitude_vector.default.weight": torch.ones(6)}, "DoRA"),
        (Q | {"q_proj.lora_B.default.bias": torch.ones(6)}, "biases"),
        (
            {
                "wte.token_adapter.base_layer.weight": torch.ones(6, 6),
                "wte.token_adapter.trainable_tokens_delta.default": torch.ones(1, 6),
            },
            "tokens that are adapted",
        ),
        (
            Q
            | {f"q_proj.lora_A.{name}.weight": torch.ones(2, 6) for name in "xy"}
            | {f"q_proj.lora_B.{name}.weight": torch.ones(6, 2) for name in "xy"},
            r"several adapters \(x, y\)",
        ),
    ],
)
def test_adapters_in_a_state_dict_that_are_no_lora(tmp_path: Path, tensors: Any, message: str) -> None:
    """Their base weights alone would be a model that looks fine and is the untrained one."""
    folder = adapter(tmp_path / "src", {})
    (folder / "adapter_model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.save({PREFIX + name: value for name, value in tensors.items()}, folder / "model.pt")
    with pytest.raises(UserError, match=message):
        convert(folder / "model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompt_tuning_in_a_state_dict(tmp_path: Path) -> None:
    tensors = {
        "base_model.lm_head.weight": torch.ones(6, 6),
        "prompt_encoder.default.embedding.weight": torch.ones(4, 6),
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.save(tensors, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"prompt_encoder.*merge it with PEFT"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    tensors["lm_head.weight"] = tensors.pop("base_model.lm_head.weight")  # a model that has a prompt encoder of its own
    torch.save(tensors, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == set(tensors)


def test_the_adapters_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    base_model(tmp_path / "base")
    tensors = {**pair("q_proj", 6, 6), "norm.weight": torch.full((6,), 3.0)}
    source = adapter(tmp_path / "src", tensors)
    for name, path in (("a", source), ("b", source / "adapter_model.safetensors")):
        convert(path, tmp_path / name, base=tmp_path / "base")
    a, b = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_config_of_the_base_comes_before_one_of_a_parent(tmp_path: Path) -> None:
    """Above an adapter may lie any config.json: of W&B, of a trainer, of another model."""
    base_model(tmp_path / "base", hidden_size=6)
    (tmp_path / "config.json").write_text('{"wandb": 1}', encoding="utf-8")
    convert(adapter(tmp_path / "src", pair("q_proj", 6, 6)), tmp_path / "out", base=tmp_path / "base")
    assert config_of(tmp_path / "out")["hidden_size"] == 6


def test_a_tokenizer_stays_with_an_adapter_that_is_kept(tmp_path: Path) -> None:
    source = adapter(tmp_path / "src", pair("q_proj", 6, 6))
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}', encoding="utf-8")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_without_a_base_the_adapter_is_kept(tmp_path: Path) -> None:
    tensors = pair("q_proj", 6, 6)
    report = convert(adapter(tmp_path / "src", tensors, binary=True), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    got = loaded(tmp_path / "out")
    assert all(same_bits(got[PREFIX + name], tensor) for name, tensor in tensors.items())
    assert report.format == "peft" and any("kept as it is" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (pair("q_proj", 6, 6), {"lora_alpha": 0}, "lora_alpha is 0"),
        (pair("q_proj", 6, 6), {"lora_alpha": None}, "lora_alpha is None"),
        (pair("q_proj", 6, 6), {"alpha_pattern": {"(a+)+$": 3}}, "no module name"),
        (pair("q_proj", 6, 6), {"use_dora": True}, "use_dora"),
        (pair("q_proj", 6, 6), {"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        (pair("q_proj", 6, 6), {"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        (pair("q_proj", 6, 6), {"target_parameters": ["experts.up"]}, "target_parameters"),
        (pair("q_proj", 6, 6), {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4. changed the base model"),
        (pair("q_proj", 6, 6), {"init_lora_weights": "olora"}, "olora. changed the base model"),
        (pair("q_proj", 6, 6), {"peft_type": "IA3"}, "IA3"),
        ({"q_proj.hada_w1_a": torch.ones(6, 2)}, {"peft_type": "LOHA", "lora_alpha": None}, "LOHA.*merge it with PEFT"),
        (pair("k_proj", 6, 6), {}, "whose weight is not there; name the model that it was trained on"),
        (pair("q_proj", 6, 5), {}, r"makes \[6, 5\], but the weight is \[6, 6\]"),
        ({"q_proj.lora_A.weight": torch.ones(2, 6)}, {}, "not exactly one A and one B"),
        ({"absent.weight": torch.ones(2)}, {}, "base model has no 'absent.weight'"),
        ({**pair("q_proj", 6, 6), "q_proj.lora_magnitude_vector": torch.ones(6)}, {}, "DoRA"),
    ],
)
def test_what_cannot_be_merged_is_refused(tmp_path: Path, tensors: Any, config: Any, message: str) -> None:
    base_model(tmp_path / "base")
    with pytest.raises(UserError, match=message):
        convert(adapter(tmp_path / "src", tensors, **config), tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()
