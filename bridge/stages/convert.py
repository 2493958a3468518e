"""Stage `convert`: a training checkpoint becomes a model that transformers and vLLM load."""

from __future__ import annotations

import shutil
from typing import Any

from bridge.config.stages import ConvertSettings
from bridge.convert import write_into
from bridge.progress import progress
from bridge.stages.job import Job


def run(job: Job) -> dict[str, Any]:
    """Write the safetensors model of the checkpoint in `inputs["checkpoint"]` into `out`; returns convert's report."""
    settings = job.settings
    assert isinstance(settings, ConvertSettings)
    shutil.rmtree(job.out)  # a killed attempt may have left half a file: a conversion starts over
    job.out.mkdir()
    checkpoint = job.inputs["checkpoint"]
    with progress(job.label, 100, "%") as meter:
        report = write_into(
            checkpoint,
            job.out,
            dtype=settings.dtype,
            progress=lambda done, total: meter.advance(int(100 * done / max(total, 1)) - meter.done),
        )
    return report.to_json()
