"""What several files of tests read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import CONFIG
from save_shards import WORLD


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FSDP shards and a DCP folder that torch itself saved in four processes; copy what you change."""
    folder = tmp_path_factory.mktemp("global_step_7")
    script = [sys.executable, str(Path(__file__).with_name("save_shards.py"))]
    processes = [subprocess.Popen([*script, str(rank), str(folder)]) for rank in range(WORLD)]
    assert [process.wait(timeout=120) for process in processes] == [0] * WORLD
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder
