"""House rules: who may import whom, what the core may import, how files are opened."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "bridge").rglob("*.py"))

# Each folder or module imports only from its own tier and from those below it.
TIERS = [
    {"cli", "__main__"},
    {"launch", "stages"},
    {"report", "train", "rollout", "convert", "behaviors", "tasks", "metrics"},
    {"graph", "record", "runs", "artifacts"},
    {"config"},
    {"errors", "progress"},
]
TIER = {name: number for number, names in enumerate(TIERS) for name in names}
NO_TORCH = {
    "cli",
    "launch",
    "convert",
    "metrics",
    "tasks",
    "behaviors",
    "graph",
    "record",
    "runs",
    "artifacts",
    "config",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "bridge").parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        words = name.split(".")
        if words[0] == "bridge" and len(words) > 1 and words[1] in TIER:
            assert TIER[words[1]] >= TIER[part], f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_text_file_is_opened_with_its_encoding(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = {keyword.arg for keyword in node.keywords}
            if node.func.attr in ("read_text", "write_text"):
                assert "encoding" in names, f"{path}:{node.lineno}"
            if node.func.attr == "open" and not any(
                isinstance(a, ast.Constant) and isinstance(a.value, str) and "b" in a.value for a in node.args
            ):
                known_other = ast.unparse(node.func) in ("os.open", "tarfile.open", "zipfile.open")
                assert known_other or "encoding" in names, f"{path}:{node.lineno}"


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_core_imports_no_torch() -> None:
    core = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in FILES
        if part_of(p) in NO_TORCH and p.name != "__main__.py"
    ]
    loaded = modules_after("\n".join(f"import {name}" for name in core))
    assert not loaded & {"torch", "transformers", "vllm", "deepspeed", "wandb"}


def test_help_and_status_load_little() -> None:
    loaded = modules_after("import bridge.cli")
    assert not loaded & {"torch", "transformers", "numpy", "pyarrow", "submitit", "pydantic"}
    status = modules_after("import bridge.launch.show, bridge.launch.submit, bridge.runs")
    assert not status & {"torch", "transformers", "pyarrow", "submitit"}
