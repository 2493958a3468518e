"""What is written into config.json and tokenizer_config.json, so that older and newer loaders read the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, folder

from bridge.convert import convert
from bridge.convert.companions import _CAUSAL, causal_class, config_warnings, older_tokenizer, strangers, true_config
from bridge.errors import UserError

DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
SCALED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"rope_parameters": DEFAULT}, {"rope_theta": 1e6}),
        (
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_parameters": SCALED},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
        ),
        ({"rope_parameters": DEFAULT, "rope_theta": 1e4}, {"rope_theta": 1e6}),
        ({"rope_parameters": DEFAULT, "rope_scaling": SCALED, "rope_theta": 2.0}, {"rope_theta": 2.0}),
        ({"rope_theta": 1e4}, {"rope_theta": 1e4}),
        ({"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": SCALED}}, {}),
        ({"rope_parameters": {}}, {}),
        ({"rope_parameters": None}, {}),
    ],
)
def test_rotary_settings_are_there_for_transformers_4(config: dict[str, Any], older: dict[str, Any]) -> None:
    assert true_config(config, None, None) == {**config, **older}
    inside = true_config({"text_config": config}, None, None)
    assert inside == {"text_config": {**config, **older}}


def test_rotary_settings_of_each_kind_of_layer_are_a_warning() -> None:
    layers = {"architectures": ["A"], "rope_parameters": {"full_attention": DEFAULT, "sliding_attention": SCALED}}
    assert "only transformers 5" in config_warnings(layers, None, None)[0]
    assert config_warnings({"architectures": ["A"], "rope_parameters": DEFAULT}, None, None) == []


@pytest.mark.parametrize(
    ("written", "older"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}),
        ({"extra_special_tokens": ["<a>"]}, {"additional_special_tokens": ["<a>"]}),
        ({"extra_special_tokens": {"image": "<i>"}}, {"extra_special_tokens": {"image": "<i>"}}),
        (
            {"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]},
            {"additional_special_tokens": ["<b>"]},
        ),
    ],
)
def test_the_tokenizer_is_told_in_words_of_transformers_4(written: dict[str, Any], older: dict[str, Any]) -> None:
    assert older_tokenizer(written) == older


def test_the_class_is_told_only_of_a_causal_language_model() -> None:
    qwen = {"model_type": "qwen2"}
    assert causal_class(qwen, [EMBEDDING, NORM]) == causal_class(qwen, [EMBEDDING, HEAD]) == "Qwen2ForCausalLM"
    assert causal_class(qwen, [EMBEDDING, "score.weight"]) is None  # a classifier
    assert causal_class(qwen, ["embed_tokens.weight", "norm.weight"]) is None  # a body without a head
    assert causal_class(qwen, [NORM]) is None
    assert causal_class({"model_type": "mine"}, [EMBEDDING]) is None
    assert causal_class({"model_type": ["qwen2"]}, [EMBEDDING]) is None
    assert causal_class({}, [EMBEDDING]) is None


def test_the_classes_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in _CAUSAL} == _CAUSAL


def test_a_checkpoint_of_transformers_5_gets_the_old_words_too(tmp_path: Path) -> None:
    content = {EMBEDDING: torch.ones(61, 4), NORM: torch.ones(4)}
    path = folder(tmp_path / "src", content, architectures=None, rope_parameters=SCALED)
    written = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"], "eos_token": "ü"}
    (tmp_path / "src" / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    report = convert(path, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["rope_type"] == "yarn"
    assert config["rope_parameters"] == SCALED
    assert report.warnings == [
        "config.json names no architectures; Qwen2ForCausalLM was set, as model_type and tensors tell"
    ]
    told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert told == older_tokenizer(written)


def test_a_tokenizer_config_that_all_read_is_copied_byte_for_byte(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", {EMBEDDING: torch.ones(61, 4)})
    text = b'{"tokenizer_class":   "Qwen2Tokenizer", "eos_token": "\\u00fc"}'
    (tmp_path / "src" / "tokenizer_config.json").write_bytes(text)
    convert(path, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == text


def test_a_damaged_tokenizer_config_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", {EMBEDDING: torch.ones(61, 4)})
    (tmp_path / "src" / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is no valid JSON"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_no_part_of_the_model_are_told_of() -> None:
    """A value head, and every name under a wrapper that is not known: transformers would start from random weights."""
    config = {"architectures": ["Qwen2ForCausalLM"]}
    assert strangers(config, [EMBEDDING, HEAD, "lm_head.bias"]) == []
    (told,) = strangers(config, [EMBEDDING, "v_head.summary.weight"])
    assert told.startswith("'v_head.summary.weight': no part of Qwen2ForCausalLM")
    (told,) = strangers(config, [f"net.{name}" for name in (EMBEDDING, NORM, HEAD)])
    assert told.startswith("'net.model.embed_tokens.weight' and 2 more: no part")
    assert strangers({"architectures": ["MyModel"]}, ["x"]) == strangers({}, ["x"]) == []
    assert strangers({"architectures": "Qwen2ForCausalLM"}, ["x"]) == []
