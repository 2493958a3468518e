"""Models and tokenizers on disk. Every difference between the supported transformers versions is in this module.

Supported are 4.51 and 5.x. They differ in the name of the dtype argument and of the cache argument.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from bridge.config.stages import InitSettings
from bridge.errors import UserError
from bridge.train.parallel import together

MODERN = int(transformers.__version__.split(".")[0]) >= 5
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def setup(threads: int, seed: int) -> torch.device:
    """Set torch's threads and generators; returns the device to work on."""
    group = together()
    torch.set_num_threads(threads)
    torch.manual_seed(group.seed(seed))
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return group.device


def model_folder(source: Path) -> Path:
    """The folder of a model: `source` itself, or the local snapshot of the hub model that `source` names.

    Raises UserError for a folder without config or weights and for a name that cannot be had.
    """
    if not source.exists():
        return _hub_snapshot(str(source))
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: is no model folder (it has no config.json)")
    if not any(next(source.glob(pattern), None) for pattern in WEIGHTS):
        raise UserError(f"{source}: holds no weights (no .safetensors); convert the checkpoint first")
    return source


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.pth", "*.gguf", "*.onnx", "original/*"]))
    except Exception as error:  # the hub client raises a dozen kinds: bad name, no network, no access
        raise UserError(f"model {name!r} is neither a folder nor a hub model that can be fetched: {error}") from error


def load_model(folder: Path, device: torch.device) -> nn.Module:
    """The causal language model of a folder, in float32 and in evaluation mode."""
    name = "dtype" if MODERN else "torch_dtype"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **{name: torch.float32})
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be loaded as a language model: {error}") from error
    loaded: nn.Module = model.to(device)  # type: ignore[arg-type]
    return loaded.eval()


def positions(model: Any) -> int:
    """The longest sequence that the model was made for."""
    return int(getattr(model.config, "max_position_embeddings", sys.maxsize))


def stop_ids(model: Any) -> list[int]:
    """The tokens that end a response according to the model's generation config."""
    ids = model.generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises UserError when it has no chat template or no end-of-sequence token."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise UserError(f"{folder}: the tokenizer has no chat template; add chat_template to tokenizer_config.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no eos_token; set it in tokenizer_config.json")
    return tokenizer


def new_qwen2(tokenizer: Any, settings: InitSettings) -> Any:
    """A Qwen2 network with tied embeddings, float32, drawn from torch's global generator.

    The vocabulary has exactly the rows of the tokenizer, so no row can be sampled that has no text.
    """
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.ffn,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.positions,
        initializer_range=settings.init_std,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen2ForCausalLM(config)


def forward_logits(model: nn.Module, ids: Tensor, first: int) -> Tensor:
    """Logits [B, T − first, V] of positions first…T−1 of right-padded ids [B, T].

    No attention mask is needed: attention is causal and the padding comes last, so no real position sees it.
    """
    keep = torch.arange(first, ids.shape[1], device=ids.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    return logits


class Decoder:
    """Steps through left-padded sequences with a key-value cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache = transformers.DynamicCache()
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def step(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Feed ids [B, t]; mask [B, all so far] says what is no padding. Returns the logits [B, V] of the last one."""
        arguments = {self._name: self._cache}
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **arguments,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder sequences of the batch by index."""
        self._cache.batch_select_indices(rows)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files as they are: saving again would rewrite them for one transformers version."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def copy_configuration(source: Path, target: Path, stop_ids: Iterable[int]) -> None:
    """Copy config, tokenizer and generation config of a model folder, the last one with every id that ends a turn."""
    shutil.copyfile(source / "config.json", target / "config.json")
    copy_tokenizer(source, target)
    file = source / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    generation["eos_token_id"] = sorted(stop_ids)
    text = json.dumps(generation, indent=2) + "\n"
    (target / "generation_config.json").write_text(text, encoding="utf-8")
