"""LoRA: adapters merged into the weights that they adapt, or kept as they are.

W' = W + s B A with s = alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Hu et al. 2021, arXiv:2106.09685;
Kalajdzievski 2023, arXiv:2312.03732). The sum is made in float32 and rounded once. An unknown alpha is an error: a
guessed one gives a model that looks fine and is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.convert.dtypes import CASTABLE, ITEMSIZE, cast
from bridge.convert.places import inside, lexical, read_json
from bridge.convert.plan import output_dtype, tie_flag
from bridge.convert.source import Elements, Source, Tensor
from bridge.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
VERL_META = "lora_train_meta.json"

PREFIX = "base_model.model."
"""What PEFT puts before every name of an adapter."""

_FACTOR = re.compile(r"(.*)\.(lora_(?:embedding_)?[AB])(?:\.(?!weight$|bias$)([^.]+))?(?:\.weight)?")
"""The adapted module, the factor, the adapter's name."""

_SAVED = re.compile(r"(.*)\.modules_to_save\.(.*)")
_WRAPPED, _PROMPT = ".base_layer.", "prompt_encoder."
_LARGEST = float(np.finfo(np.float32).max)
_PATTERN = re.compile(r"\^?[\w.\-]+\$?")

_OTHERWISE = (
    "use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication", "arrow_config",
    "kasa_config", "monteclora_config", "velora_config", "target_parameters",
)  # fmt: skip
"""Settings of PEFT with which the model is not W + s B A for each of its weights."""

_CHANGES_BASE = re.compile(r"pissa.*|olora|corda.*|loftq|lora_ga")
"""Values of `init_lora_weights` with which training begins by taking the first B A, or a rounding, off W."""

_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""`model_type`s of transformers whose blocks store their weights (in, out)."""


@dataclass(frozen=True)
class Settings:
    """What scales an adapter."""

    alpha: float
    patterns: Mapping[str, float]
    """alpha of modules whose name ends with the key."""
    rank_stabilised: bool
    transposed: bool
    """`fan_in_fan_out`: adapted weights are stored (in, out). One for all modules, so it may be that of another."""
    conv1d: bool
    """Whether the blocks of the model store theirs so, by its type; `transposed` where that is unknown."""
    changes_base: str | None
    """The initialisation, if it changed the weights that are adapted."""

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A for a module."""
        key = next((key for key in self.patterns if re.match(rf"(.*\.)?({key})$", module)), None)  # as PEFT does
        alpha = self.alpha if key is None else self.patterns[key]
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True)
class MergedTensor:
    """A weight with its adapter added."""

    base: Tensor
    left: Tensor
    """(rows, r), or (r, rows) if `flipped`."""
    right: Tensor
    """(r, columns), or (columns, r) if `flipped`."""
    flipped: bool
    scale: float
    dtype: str
    """What the sum is rounded to: the dtype that will be written."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def identity(self) -> Hashable:
        return (self.base.identity, self.left.identity, self.right.identity, self.scale, self.dtype)

    def read(self, origin: tuple[int, ...], out: Elements) -> None:
        (row, column), (rows, columns) = origin, out.shape
        rank = self.left.shape[0] if self.flipped else self.left.shape[1]
        if self.flipped:
            left = _floats(self.left, (0, row), (rank, rows)).T
            right = _floats(self.right, (column, 0), (columns, rank)).T
        else:
            left = _floats(self.left, (row, 0), (rows, rank))
            right = _floats(self.right, (0, column), (rank, columns))
        merged = _floats(self.base, origin, out.shape) + np.float32(self.scale) * (left @ right)
        raw = cast(np.ascontiguousarray(merged, dtype=np.float32).reshape(-1).view(np.uint8), "float32", self.dtype)
        out[...] = raw.view(out.dtype).reshape(out.shape)


def _floats(tensor: Tensor, origin: tuple[int, ...], sizes: tuple[int, ...]) -> NDArray[np.float32]:
    raw = np.empty(math.prod(sizes) * ITEMSIZE[tensor.dtype], np.uint8)
    tensor.read(origin, raw.view(f"u{ITEMSIZE[tensor.dtype]}").reshape(sizes))
    return cast(raw, tensor.dtype, "float32").view(np.float32).reshape(sizes)


def has_adapter(names: Mapping[str, Tensor]) -> bool:
    """Whether some of the names are those of LoRA factors, or of a model that an adapter of another kind wraps."""
    return any(_WRAPPED in name or is_adapter_name(name) or name.startswith(_PROMPT) for name in names)


def is_adapter_name(name: str) -> bool:
    """Whether a tensor of this name is part of an adapter and no weight."""
    return ".lora_" in name or ".trainable_tokens_" in name


def merge(
    source: Source, base: Mapping[str, Tensor] | None, config: Mapping[str, Any], wanted: str
) -> dict[str, Tensor]:
    """The full weights: those in `source`, or those of the model `base`, with the adapters of `source` added.

    `config` is the base model's configuration (for tied embeddings), `wanted` the dtype asked for. UserError if alpha
    is unknown, if the kind of adapter is not LoRA, or if a factor fits no weight.
    """
    where = str(source.path)
    own = {name: tensor for name, tensor in source.tensors.items() if ".original_module." not in name}
    found = {name: match for name in own if (match := _FACTOR.fullmatch(name))}
    settings = read_settings(source, where, config.get("model_type")) if found or source.format == "peft" else None
    adapters = sorted({match[3] for match in found.values() if match[3]}) or ["default"]
    if len(adapters) > 1:
        raise UserError(f"{where}: holds several adapters ({', '.join(adapters)[:120]}); save the wanted one alone")
    odd = next(_unknown(own), None)
    if odd is not None:
        raise UserError(
            f"{where}: {odd[:120]!a} is of DoRA, of biases or tokens that are adapted, or of no LoRA at all; "
            "merge it with PEFT (merge_and_unload)"
        )
    given = {_plain(name, adapters[0]): tensor for name, tensor in own.items()}
    if len(given) < len(own):
        raise UserError(f"{where}: two tensors have one name once PEFT's prefixes are taken off; save it again")
    factors: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = dict(base or {})
    head, embedding = _ends(weights)
    for name, tensor in given.items():
        if match := _FACTOR.fullmatch(name):
            factors.setdefault(match[1], {})[match[2]] = tensor
    if base is not None and settings is not None and settings.changes_base is not None:
        raise UserError(
            f"{where}: `init_lora_weights: {settings.changes_base}` changed the base model at the start of training, "
            "so the adapter does not fit the model as it was; merge it with PEFT (merge_and_unload)"
        )
    if base is not None and tie_flag(config) and head is None and embedding is not None:
        # The adapted end is no longer the other one, so the head must exist before either is changed.
        ends = ("lm_head", embedding.removesuffix(".weight"))
        if any(name.removesuffix(".weight") in ends for name in (*factors, *given)):
            weights["lm_head.weight"] = weights[embedding]
    for name, tensor in given.items():
        if not _FACTOR.fullmatch(name):
            if base is not None and name not in weights and not name.startswith("lm_head."):
                raise UserError(f"{where}: the base model has no {name[:120]!a}; name the model that it was trained on")
            weights[name] = tensor
    for module, pair in factors.items():
        assert settings is not None
        name = module if module in weights else f"{module}.weight"
        if name not in weights:
            remedy = "name the base model (--base MODEL)"
            if base is not None:
                remedy = "name the model that it was trained on; if transformers renames it, merge it with PEFT"
            raise UserError(f"{where}: adapts {module[:120]!a}, whose weight is not there; {remedy}")
        weights[name] = _merged(where, module, weights[name], pair, settings, wanted)
    return weights


def read_settings(source: Source, where: str, model_type: Any) -> Settings:
    """alpha and its company, from `adapter_config.json` or verl's `lora_train_meta.json` beside the weights."""
    folder = source.folder
    names = (ADAPTER_CONFIG, VERL_META)
    places = (folder, lexical(folder).parent)
    path = next((inside(place, name) for place in places for name in names if (place / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{where}: holds LoRA weights, but no {ADAPTER_CONFIG} or {VERL_META} beside them says what lora_alpha is; "
            f'write {{"lora_alpha": …}} into {folder / VERL_META}'
        )
    config = read_json(path)
    other = next((f"has `{key}`" for key in _OTHERWISE if config.get(key)), None)
    if other is None and config.get("peft_type", "LORA") != "LORA":
        other = f"is of the type {str(config['peft_type'])[:20]}"
    if other is not None:
        raise UserError(f"{path}: {other}, so the adapter is more than a product to add; merge it with PEFT")
    alpha: Any = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    values: list[Any] = [alpha, *patterns.values()] if isinstance(patterns, dict) else [None]
    if any(type(value) not in (int, float) or not 0 < value <= _LARGEST for value in values):
        raise UserError(
            f"{path}: lora_alpha is {str(alpha)[:20]}, so the scale is unknown; write the value of training"
        )
    odd = next((key for key in patterns if not _PATTERN.fullmatch(key)), None)
    if odd is not None:
        raise UserError(f"{path}: the alpha_pattern {odd[:120]!a} is no module name; write the names out")
    init, transposed = config.get("init_lora_weights"), config.get("fan_in_fan_out") is True
    return Settings(
        alpha,
        patterns,
        rank_stabilised=config.get("use_rslora") is True,
        transposed=transposed,
        conv1d=model_type in _CONV1D if isinstance(model_type, str) else transposed,
        changes_base=init if isinstance(init, str) and _CHANGES_BASE.fullmatch(init.lower()) else None,
    )


def _merged(
    where: str, module: str, weight: Tensor, pair: Mapping[str, Tensor], settings: Settings, wanted: str
) -> MergedTensor:
    embedding = "lora_embedding_A" in pair
    a, b = (pair.get(f"lora_{'embedding_' if embedding else ''}{end}") for end in "AB")
    if a is None or b is None or len(pair) != 2:
        raise UserError(f"{where}: {module[:120]!a} has not exactly one A and one B; save it again")
    wide = [tensor.shape for tensor in (b, a)]
    if any(len(shape) != 2 for shape in (*wide, weight.shape)) or wide[0][1] != wide[1][0] or 0 in wide[1]:
        raise UserError(
            f"{where}: the adapter of {module[:120]!a} is no pair of matrices for one matrix; merge it with PEFT"
        )
    product = (wide[0][0], wide[1][1])
    if product[0] == product[1]:
        turned = settings.conv1d
    else:
        turned = product != weight.shape and (settings.conv1d or settings.transposed)
    flipped = embedding or turned
    if (product[::-1] if flipped else product) != weight.shape:
        raise UserError(
            f"{where}: the adapter of {module[:120]!a} makes {list(product)}, but the weight is {list(weight.shape)}; "
            "name the model that it was trained on"
        )
    if any(tensor.dtype not in CASTABLE for tensor in (weight, a, b)):
        raise UserError(f"{where}: {module[:120]!a} is quantised ({weight.dtype}); merge into the unquantised model")
    scale = settings.scale(module, wide[1][0])
    left, right = (a, b) if flipped else (b, a)
    return MergedTensor(weight, left, right, flipped, scale, output_dtype(weight.dtype, wanted))


def _plain(name: str, adapter: str) -> str:
    """The name of the adapted model's own parameter."""
    name = name.removeprefix(PREFIX).replace(_WRAPPED, ".")
    match = _SAVED.fullmatch(name)
    return f"{match[1]}.{match[2].removeprefix(adapter + '.')}" if match else name


def _unknown(names: Iterable[str]) -> Iterator[str]:
    """Names of parts of an adapter that are no LoRA factors: prompts, and what lies beside a weight that is wrapped."""
    names = list(names)
    wrapped = {name.partition(_WRAPPED)[0] for name in names if _WRAPPED in name}
    prompted = any(name.startswith("base_model.") for name in names)
    for name in names:
        if _WRAPPED in name or _FACTOR.fullmatch(name):
            continue
        parts = name.split(".")
        prompt = prompted and name.startswith(_PROMPT)
        if (
            prompt
            or is_adapter_name(name)
            or any(".".join(parts[:length]) in wrapped for length in range(1, len(parts)))
        ):
            yield name


def _ends(weights: Mapping[str, Tensor]) -> tuple[str | None, str | None]:
    head = next((name for name in weights if name.endswith(("lm_head.weight", "embed_out.weight"))), None)
    embedding = next((name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    return head, embedding
