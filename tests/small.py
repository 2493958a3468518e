"""A problem, a tokenizer and a model that train in seconds: "a+b=" → "... #### c" with digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridge.config.stages import StageSettings
from bridge.config.tasks import IgsmSettings
from bridge.stages import init
from bridge.stages.job import Job, StopFlag

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% else %}<sep>{% endif %}"
    "{% endfor %}"
)
PIECES = ["<pad>", "<eos>", "<sep>", "<unk>", "\n", *"0123456789", "+", "=", "#", " "]
TASK = IgsmSettings(name="igsm")


def write_tokenizer(folder: Path, template: str = TEMPLATE, pieces: list[str] | None = None) -> Path:
    """One token for each character: byte-level BPE without merges, which loads the same in every version."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    byte_names = {" ": "Ġ", "\n": "Ċ"}
    names = [byte_names.get(piece, piece) for piece in pieces or PIECES]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [name for name in names if name.startswith("<")]
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",  # else transformers 5 adds one
        "additional_special_tokens": [name for name in special if name not in ("<pad>", "<eos>", "<unk>")],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def sums(count: int, start: int = 0) -> list[dict[str, str]]:
    """Rows `a+b=` with the answer mod 10, some with a second line, so that lengths differ."""
    rows = []
    for index in range(start, start + count):
        a, b = index % 10, (index * 7 // 10) % 10
        steps = f"{a}+{b}={(a + b) % 10}"
        response = steps + ("\n" + steps if index % 3 == 0 else "") + f"\n#### {(a + b) % 10}"
        rows.append({"prompt": f"{a}+{b}=", "response": response, "gold": str((a + b) % 10)})
    return rows


def write_dataset(folder: Path, rows: list[dict[str, str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = {"answer_kind": "number", "response_prefix": ""}
    (folder / "dataset.json").write_text(json.dumps(facts), encoding="utf-8")
    return file


def settings(kind: str, **values: Any) -> StageSettings:
    """Settings of a stage with what a test does not care about filled in."""
    from bridge.config.stages import STAGE_KINDS

    inputs = {name: "x" for name in ("model", "data", "tokenizer") if name in STAGE_KINDS[kind].model_fields}
    return STAGE_KINDS[kind].model_validate({"kind": kind, **inputs, **values}, strict=False)


class StopAfter(StopFlag):
    """Asks to stop at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property  # type: ignore[override]
    def requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def job(folder: Path, stage: StageSettings, stop: StopFlag | None = None, **inputs: Path) -> Job:
    """A job whose folders are `folder/out` and `folder/scratch`."""
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Job("stage/0", stage, TASK, inputs, folder / "out", folder / "scratch", 1, stop or StopFlag())


def write_model(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """A model folder made by the init stage."""
    write_tokenizer(folder / "data" / "tokenizer")
    small = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "positions": 128, **sizes}
    init.run(job(folder, settings("init", seed=seed, **small), tokenizer=folder / "data"))
    return folder / "out"
