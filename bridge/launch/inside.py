"""Runs inside an image, where this package is not: its text is given to the image's Python. Prints one JSON object.

Without an argument: Python, packages, and the SHA-256 of the list of what was installed. With `imports`: also whether
the parts that matter can be imported, each with what it says of itself, or with its error.
"""

import hashlib
import importlib
import importlib.metadata
import json
import pathlib
import platform
import re
import sys
from collections.abc import Callable
from typing import Any

INSTALLED = pathlib.Path("/opt/bridge/installed.txt")


def look() -> dict[str, Any]:
    """What is there, by the metadata of the packages; names as PyPI normalises them."""
    listed = INSTALLED.read_bytes() if INSTALLED.is_file() else None
    packages = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in importlib.metadata.distributions()
    }
    return {
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
        "installed": hashlib.sha256(listed).hexdigest() if listed is not None else None,
        "locked": dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", (listed or b"").decode(), re.MULTILINE)),
    }


def torch() -> str:
    """The CUDA build, NCCL, and the GPUs that can be seen."""
    torch: Any = importlib.import_module("torch")
    cuda = torch.version.cuda
    if cuda is None:
        raise ImportError("torch was built without CUDA")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return f"CUDA {cuda}, NCCL {nccl}, " + (f"GPUs: {', '.join(gpus)}" if gpus else "no GPU is visible")


def deepspeed() -> str:
    """Whether its operators can be built at first use: there must be the compilers."""
    op_builder = importlib.import_module("deepspeed.ops.op_builder")
    ready = [name for name in ("FusedAdamBuilder", "CPUAdamBuilder") if getattr(op_builder, name)().is_compatible()]
    return f"operators that can be built: {', '.join(ready) or 'none'}"


def imported(name: str) -> Callable[[], str]:
    """A check that only imports."""
    return lambda: f"{importlib.import_module(name).__name__} can be imported"


IMPORTS = {"torch": torch, "deepspeed": deepspeed} | {
    name: imported(name) for name in ("transformers", "vllm", "flash_attn", "peft", "pyarrow", "submitit", "wandb")
}


def main() -> None:
    """Look, and print."""
    found = look()
    if sys.argv[1:] == ["imports"]:
        found["imports"] = {}
        for name, check in IMPORTS.items():
            if name.replace("_", "-") not in found["packages"]:
                continue
            try:
                found["imports"][name] = [True, check()]
            except Exception as error:  # whatever it is, it is the finding
                found["imports"][name] = [False, f"{type(error).__name__}: {error}"]
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # a line of its own: imports print what they like


if __name__ == "__main__":
    main()
