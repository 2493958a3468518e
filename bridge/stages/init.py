"""Stage `init`: a small Qwen2-architecture model from random init, with the tokenizer of a data stage."""

from __future__ import annotations

from typing import Any

import torch

from bridge.config.stages import InitSettings
from bridge.errors import UserError
from bridge.stages.job import Job
from bridge.train.model import copy_tokenizer, load_tokenizer, new_qwen2


def run(job: Job) -> dict[str, Any]:
    """Write model.safetensors, the configs and the tokenizer into `job.out`; returns the sizes."""
    settings = job.settings
    assert isinstance(settings, InitSettings)
    folder = job.inputs["tokenizer"] / "tokenizer"
    if not folder.is_dir():
        raise UserError(f"{job.inputs['tokenizer']}: holds no tokenizer; set `tokenizer: true` on its data stage")
    torch.manual_seed(settings.seed)
    tokenizer = load_tokenizer(folder)
    model = new_qwen2(tokenizer, settings)
    model.save_pretrained(job.out)
    copy_tokenizer(folder, job.out)
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}
