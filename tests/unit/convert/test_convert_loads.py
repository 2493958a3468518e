"""bench/loads.py with this interpreter's transformers: it passes what is right and notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

SCRIPT = Path(__file__).parents[3] / "bench" / "loads.py"


@pytest.fixture(scope="module")
def loads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_loads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_checkpoint_loads_as_the_model_that_was_saved(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--only", "llama-untied", "own"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["cases"] == 1 and line["failed"] == {}
    (loader,) = line["loaders"]
    assert loader["loader"].startswith("transformers ") and loader["folders"] == loader["right"] == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_noticed(loads: ModuleType, tmp_path: Path) -> None:
    truths, (case,) = loads.make(tmp_path, None, lambda name: name == "qwen3-tied safetensors to bf16")
    truth = truths[case.truth]
    out = tmp_path / "out"
    assert loads.convert(case, out) is None
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).encode(loads.PROBE).ids

    def problems(**changed: object) -> str:
        return " ".join(loads.in_transformers(out, replace(truth, **changed), ids))

    assert problems() == ""
    assert "dtype" in problems(dtype="float32")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))

    def lie(**changed: object) -> None:
        (out / "config.json").write_text(json.dumps({**config, **changed}), encoding="utf-8")

    lie(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=1e4)
    assert "logits differ" in problems() and "weight differs" not in problems()
    lie(tie_word_embeddings=False)
    assert "tied" in problems() and "missing_keys" in problems()
    lie()
    file = sorted(out.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if tensors[name].ndim == 2)
    tensors[name][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    assert f"{name} differs" in problems()
