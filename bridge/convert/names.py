"""Which part of a checkpoint is the weights, and what its tensors are called without the wrappers' prefixes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bridge.convert.pickles import Sharded, TensorRef
from bridge.errors import UserError

WRAPPERS = ("model", "state_dict", "model_state_dict", "module", "actor", "policy", "net", "weights")
"""Keys under which trainers put the weights."""

AVERAGES = ("ema", "ema_state_dict", "model_ema", "ema_model")
"""Averaged weights; left alone where the weights themselves are there."""

_LEVELS = 4
_LONGEST = 1_024  # characters of a name; prefixes are taken off one by one

_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Name parts that torch.compile, FSDP, activation checkpointing and Lightning put anywhere in a name."""

_LEADING = ("base_model.model.", "module.", "policy.", "actor.", "pretrained_model.")
"""Prefixes of whole-model wrappers. They are noise only where every name has them."""

_ATTRIBUTE, _WHOLE = "model.", ("model.model.", "model.lm_head.")
"""The attribute in which a LightningModule holds its model: a whole one, if its own `model.` or head is there."""


def find_weights(root: Any, where: str, also: tuple[str, ...] = ()) -> tuple[tuple[str, ...], dict[Any, Any]]:
    """The keys that lead to the state dict, and the state dict: the one dict that holds tensors under names.

    It is looked for at the top and under WRAPPERS, and under the keys `also` where the format has such.
    UserError, which names the keys that are there, if there is none or more than one.
    """
    path: tuple[str, ...] = ()
    for _ in range(_LEVELS):
        if not isinstance(root, dict):
            kind = "tensor" if isinstance(root, TensorRef) else type(root).__name__
            raise UserError(f"{where}: holds no dict of tensors but a {kind}; save model.state_dict()")
        if "checkpoint_version" in root:
            raise UserError(
                f"{where}: is part of a Megatron checkpoint, whose names and splits depend on the model; "
                "export it with Megatron-Bridge"
            )
        refuse_split(root, where)
        if "param_shapes" in root and _is_placeholder(root.get("module")):
            raise UserError(
                f"{where}: is one rank of a DeepSpeed ZeRO-3 checkpoint, whose module holds only placeholders; "
                "give its folder"
            )
        inner = _wrapped(root, where, (*WRAPPERS, *also))
        if inner is None:
            break
        path, root = (*path, inner), root[inner]
    if not any(isinstance(value, (TensorRef, Sharded)) for value in root.values()):
        at = f"{'.'.join(path)!r} in it" if path else "it"
        keys = ", ".join(ascii(str(key)[:40]) for key in list(root)[:8] if isinstance(key, (str, int))) or "none"
        raise UserError(
            f"{where}: {at} holds no tensors (its keys: {keys}); the weights are looked for at the top or "
            f"under {', '.join(WRAPPERS)}"
        )
    return path, root


def refuse_split(root: Mapping[Any, Any], where: str) -> None:
    """UserError for DeepSpeed's model states if other files hold the rest: tensor parallel ranks, stages or experts.

    They say so themselves, so that a file that is named alone, or that was copied without the others, is no model.
    """
    if "param_shapes" not in root:
        return
    ranks = root.get("mp_world_size")
    experts = root.get("num_experts") or root.get("ds_autoep_layers")
    if experts or (type(ranks) is int and ranks > 1):
        held = "without its experts" if experts else f"as one of {ranks} tensor or pipeline parallel ranks"
        raise UserError(f"{where}: holds a model {held}; merge it with the trainer's own export first")


def _wrapped(root: Mapping[Any, Any], where: str, wrappers: tuple[str, ...]) -> str | None:
    """The key to go on with, or None if the weights are here."""
    held = [key for key in wrappers if isinstance(root.get(key), dict)]
    known: dict[int, bool] = {}
    full = {id(root[key]): key for key in held if _holds_tensors(root[key], _LEVELS, wrappers, known)}
    if len(full) > 1:
        raise UserError(
            f"{where}: holds several sets of weights ({', '.join(full.values())}); save the wanted one alone"
        )
    averages = [key for key in AVERAGES if isinstance(root.get(key), dict)]
    return next(iter([*full.values(), *held, *averages]), None)


def _holds_tensors(value: Any, levels: int, wrappers: tuple[str, ...], known: dict[int, bool]) -> bool:
    if not isinstance(value, dict) or levels == 0:
        return False
    if id(value) not in known:  # a dict may be reached in many ways, and each is looked at once
        known[id(value)] = any(isinstance(item, (TensorRef, Sharded)) for item in value.values()) or any(
            _holds_tensors(value.get(key), levels - 1, wrappers, known) for key in wrappers
        )
    return known[id(value)]


def _is_placeholder(module: Any) -> bool:
    """Whether ZeRO-3 left size-0 tensors in place of the weights."""
    return isinstance(module, dict) and any(
        isinstance(value, TensorRef) and value.shape == (0,) for value in module.values()
    )


def clean_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Every name -> the name without wrapper prefixes, in the same order.

    UserError if two tensors would get one name, or if a name is absurdly long.
    """
    names = list(names)
    long = next((name for name in names if len(name) > _LONGEST), None)
    if long is not None:
        raise UserError(f"{where}: the tensor name {_quoted(long)} … has {len(long):,} characters; refused as hostile")
    clean = {name: ".".join(part for part in name.split(".") if part not in _INSIDE) for name in names}
    while prefix := _noise(clean.values()):
        clean = {name: short.removeprefix(prefix) for name, short in clean.items()}
    first: dict[str, str] = {}
    for name, short in clean.items():
        if not short:
            raise UserError(f"{where}: {_quoted(name)} is no name for a tensor; save model.state_dict()")
        if short in first:
            raise UserError(
                f"{where}: {_quoted(name)} and {_quoted(first[short])} have the same name once wrapper "
                "prefixes are taken off; save the unwrapped model"
            )
        first[short] = name
    return clean


def _noise(names: Collection[str]) -> str | None:
    """A prefix that all names have and that belongs to a wrapper."""
    wrappers = (*_LEADING, _ATTRIBUTE) if any(name.startswith(_WHOLE) for name in names) else _LEADING
    return next((prefix for prefix in wrappers if names and all(name.startswith(prefix) for name in names)), None)


def check_names(names: Iterable[str], where: str) -> None:
    """UserError for names that show a kind of checkpoint that is no full model, or that no JSON header can hold."""
    for name in names:
        if name.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise UserError(
                f"{where}: holds flattened FSDP parameters ({_quoted(name)}), whose names and shapes are lost; "
                "save with a full or sharded state dict instead"
            )
        if name == "__metadata__" or any("\ud800" <= char <= "\udfff" for char in name):
            raise UserError(f"{where}: the tensor name {_quoted(name)} cannot be written; rename it")


def _quoted(name: str) -> str:
    return ascii(name[:120])
