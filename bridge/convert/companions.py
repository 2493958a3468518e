"""The files beside the weights that a loader needs: found near the checkpoint, copied, the config made true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.convert.lora import ADAPTER_CONFIG
from bridge.convert.places import inside, lexical, read_json
from bridge.convert.plan import tie_flag
from bridge.errors import UserError

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_TOKENIZERS = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)
_GROUPS: tuple[tuple[str, ...], ...] = (
    (CONFIG,),
    ("generation_config.json",),
    _TOKENIZERS,
    ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files that belong together: a group is taken whole from the first folder that has any of it, so that a tokenizer
is never pieced together from two models."""

_CAUSAL = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""`model_type` -> the class of the language model: transformers' own table for the families that are trained most."""


@dataclass(frozen=True)
class Companions:
    """What was found, and where."""

    config: dict[str, Any]
    files: dict[str, Path]
    """Name in the output -> where it is copied from; `config.json` is among them but is written anew."""


def find_companions(folder: Path, base: Path | None, merged: bool = False) -> Companions:
    """Look in `folder`, in its `huggingface/`, in up to two parents, then in the model folder `base`.

    With `merged` the weights are those of `base` with an adapter added: then its config comes before one of a parent.
    UserError if no config.json is found or if it is not a JSON object.
    """
    if base is not None and not base.is_dir():
        raise UserError(f"{base}: the base model is no folder; give a local model folder")
    home = lexical(folder)
    near, above, last = [home, home / "huggingface"], list(home.parents)[:2], [base] if base else []
    files: dict[str, Path] = {}
    for group in _GROUPS:
        places = [*near, *last] if merged and CONFIG in group else [*near, *above, *last]
        found = next((names for place in places if (names := list(_present(place, group)))), [])
        files.update({path.name: path for path in found})
    if CONFIG not in files:
        raise UserError(
            f"{home}: no config.json here, in huggingface/, or in the two folders above; "
            "name a model folder that has one as the base (--base)"
        )
    return Companions(read_json(files[CONFIG]), files)


def adapter_companions(folder: Path) -> Companions:
    """What goes with an adapter that is kept: its settings, and a tokenizer that was saved with it."""
    tokenizer = {path.name: path for path in _present(lexical(folder), _TOKENIZERS)}
    return Companions({}, {ADAPTER_CONFIG: inside(folder, ADAPTER_CONFIG), **tokenizer})


def true_config(
    config: Mapping[str, Any], dtype: str | None, tie: bool | None, rows: int | None = None, causal: str | None = None
) -> dict[str, Any]:
    """The config with the dtype of the written floats, and the tie flag and vocabulary where they must change.

    `rows` are those of the input embedding: a training that added tokens or padded it leaves an older number behind.
    `causal` is the class that the tensors tell; it becomes `architectures` where there are none.
    The dtype is written as `torch_dtype` and as `dtype`, and rotary settings in both spellings: transformers 4 and its
    vLLM read the first, transformers 5 writes the second. Composite models repeat all this in `text_config`, where it
    is changed if it is there.
    """
    changed = {**config, **_older_rope(config)}
    inner = config.get("text_config")
    text = {**inner, **_older_rope(inner)} if isinstance(inner, dict) else None
    if causal is not None and not config.get("architectures"):
        changed["architectures"] = [causal]
    if dtype is not None:
        changed.update(torch_dtype=dtype, dtype=dtype)
        if text is not None:
            text.update({key: dtype for key in ("torch_dtype", "dtype") if key in text})
    if tie is not None:
        changed["tie_word_embeddings"] = tie
        if text is not None and "tie_word_embeddings" in text:
            text["tie_word_embeddings"] = tie
    for place in (changed, text):
        if place is not None and rows is not None and type(place.get("vocab_size")) is int:
            place["vocab_size"] = rows
    return changed if text is None else {**changed, "text_config": text}


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5's `rope_parameters` in the keys of transformers 4, which ignores them and takes its defaults."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or config.get("rope_scaling"):
        return {}
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: value for key, value in rope.items() if key not in older}
    return older


def causal_class(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The class of a causal language model with tensors of these names; None if they may be another kind of model."""
    held = set(names)
    kind = config.get("model_type")
    if "model.embed_tokens.weight" not in held or not isinstance(kind, str):
        return None
    return _CAUSAL.get(kind) if all(name == "lm_head.weight" or name.startswith("model.") for name in held) else None


def strangers(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """A warning if some names are no part of the language model that the config tells: a value head, a prefix."""
    told = config.get("architectures")
    known = [name for name in told if name in _CAUSAL.values()] if isinstance(told, list) else []
    found = [name for name in names if not name.startswith(("model.", "lm_head."))] if known else []
    if not found:
        return []
    which = f"{found[0][:120]!a}" + (f" and {len(found) - 1:,} more" if len(found) > 1 else "")
    return [f"{which}: no part of {known[0]}; transformers does not use such tensors, vLLM does not load the folder"]


def older_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `tokenizer_config.json` in words that transformers 4 knows too.

    transformers 5 renamed PreTrainedTokenizerFast to TokenizersBackend, and `additional_special_tokens` to
    `extra_special_tokens`, which is a mapping in transformers 4. It still reads the old names.
    """
    changed = dict(config)
    if changed.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(changed.get("extra_special_tokens"), list):
        changed.setdefault("additional_special_tokens", changed.pop("extra_special_tokens"))
    return changed


def config_warnings(
    config: Mapping[str, Any], tie: bool | None, rows: int | None, causal: str | None = None
) -> list[str]:
    """What a loader may stumble over, and what was set. Arguments as in `true_config`."""
    warnings = []
    if not config.get("architectures"):
        found = f"; {causal} was set, as model_type and tensors tell" if causal else "; vLLM needs them"
        warnings.append(f"config.json names no architectures{found}")
    if tie is False and tie_flag(config) is not False:
        warnings.append("the output layer differs from the input embedding: tie_word_embeddings was set to false")
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        rope = place.get("rope_parameters")
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            warnings.append("config.json has rotary settings for each kind of layer, which only transformers 5 reads")
        told = place.get("vocab_size")
        if rows is not None and type(told) is int and told != rows:
            warnings.append(f"the input embedding has {rows:,} rows: vocab_size was set to that from {told:,}")
    return warnings


def _present(place: Path, group: tuple[str, ...]) -> Iterator[Path]:
    for pattern in group:
        for path in sorted(place.glob(pattern)) if "*" in pattern else [place / pattern]:
            if path.is_file():
                yield inside(place, path.name)
