"""Writes the locks in containers/locks/ from the .in files, and their hashes into images.yaml.

python3 containers/make_locks.py

This is the one place that says how a lock is made: each lock repeats its own command in its first lines. uv is the one
in locks/uv.txt. Only files that were on the index at the given time are looked at, so a lock comes out the same on any
day, unless the index has lost a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
FENCE = "2025-04-25T00:00:00Z"
# 0.8.5.post1 came a week after the fence.
FENCE_NEXT = "2025-05-15T00:00:00Z"
TARGET = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes"]
# bridge-rl needs math-verify 0.8, which is younger than the rest; nothing else in the lock depends on the two.
YOUNGER = [
    "--exclude-newer-package=math-verify=2025-07-31T00:00:00Z",
    "--exclude-newer-package=latex2sympy2-extended=2025-07-31T00:00:00Z",
]
BRIDGE_RL = ["../pyproject.toml", "--extra", "train", "--extra", "vllm", "--extra", "math"]
LOCKS = {
    "train-cu124-py311": [
        *("requirements.in", *BRIDGE_RL, "--override", "overrides.txt"),
        *("--exclude-newer", FENCE, *YOUNGER, *TARGET),
    ],
    "train-cu124-next-py311": ["requirements-next.in", *BRIDGE_RL, "--exclude-newer", FENCE_NEXT, *YOUNGER, *TARGET],
    # Apart, because it takes hours to build and can be left out. What it needs is in the others.
    "flash-attn": ["flash-attn.in", "--no-deps", "--exclude-newer", FENCE, *TARGET],
    "uv": ["uv.in", *TARGET],
}


def with_hashes(text: str, hashes: dict[str, str]) -> str:
    """images.yaml with the hash of each lock put in after the lock's name."""
    for name, digest in hashes.items():
        text = re.sub(rf"(name: {re.escape(name)}\n +sha256: ).*", rf"\g<1>{digest}", text)
    return text


def main() -> None:
    """Makes every lock anew; a lock that cannot be made leaves its old file in place."""
    # Nothing of this machine's own settings may end up in a lock.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps"]
        subprocess.run([*pip, "-r", str(HERE / "locks" / "uv.txt")], check=True)
        for name, arguments in LOCKS.items():
            # --upgrade: the inputs alone decide, not the lock that is there.
            command = ["uv", "pip", "compile", *arguments, "--no-config", "--upgrade", "-o", f"locks/{name}.txt"]
            subprocess.run([f"{folder}/bin/uv", *command[1:], "--quiet"], check=True, cwd=HERE, env=clean)
    hashes = {name: hashlib.sha256((HERE / "locks" / f"{name}.txt").read_bytes()).hexdigest() for name in LOCKS}
    images = HERE / "images.yaml"
    images.write_text(with_hashes(images.read_text(encoding="utf-8"), hashes), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"make_locks: {error.cmd[0]} failed; what it said is above")
