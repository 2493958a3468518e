"""How long conversion takes beside copying the same bytes, and beside the tools that users run today.

A seeded Qwen2-like model is saved as FSDP shards in verl's layout (real DTensors of four ranks, made in one process
over torch's fake process group), as DeepSpeed ZeRO-2 of two ranks (laid out by hand, with moments, so that the files
have their true weight), as a DCP folder (one process) and as one plain file. Every tool then converts the same files,
alternating. Outputs are forced to disk within the time, and compared bit for bit with the model.

Prints one JSON line. Usage: python bench/convert.py --folder DIR [--size MB] [--rounds N] [--cold] [--peers PYTHON]
"""

import argparse
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RANKS, ZERO_RANKS = 4, 2
BLOCK = 4 << 20
Digests = dict[str, str]

OURS_WORK = """
import sys, time
from pathlib import Path
from bridge.convert import convert
start = time.perf_counter()
convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=sys.argv[3])
print(time.perf_counter() - start)
"""
NAIVE = """
import os, sys, glob, torch
from torch.distributed.tensor import DTensor
from safetensors.torch import save_file
files, out, dtype = sorted(glob.glob(sys.argv[1])), sys.argv[2], getattr(torch, sys.argv[3])
parts = [torch.load(file, weights_only=False) for file in files]
parts = [part.get("module", part) for part in parts]
local = lambda t: t._local_tensor if isinstance(t, DTensor) else t
whole = {name: torch.cat([local(part[name]) for part in parts]).to(dtype) for name in parts[0]}
os.makedirs(out)
save_file(whole, out + "/model.safetensors", {"format": "pt"})
"""


@dataclass(frozen=True)
class Job:
    """One checkpoint, the dtype asked for, and everybody who can do it."""

    name: str
    source: Path
    dtype: str
    read: int
    """Bytes of weights that have to be read."""
    tools: dict[str, Callable[[Path], list[str]]]
    """Tool -> its command line for an output folder."""
    cast: bool


@dataclass
class Run:
    """What one command took."""

    seconds: float
    work: float | None
    anonymous: int
    """Peak of RssAnon over the command's processes, in bytes, sampled every 10 ms."""
    failure: str | None


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a tied Qwen2 model of about `size` bytes in bf16: a quarter embedding, the rest layers."""
    wanted = size // 2
    hidden = 896 if wanted > 10**8 else 64
    inner = hidden * 38 // 7
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden), "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (hidden // 7, hidden), "self_attn.k_proj.bias": (hidden // 7,),
        "self_attn.v_proj.weight": (hidden // 7, hidden), "self_attn.v_proj.bias": (hidden // 7,),
        "self_attn.o_proj.weight": (hidden, hidden), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    each = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in layer.values())
    layers = max(1, round(wanted * 0.75 / each))
    rows = max(8, (wanted - layers * each) // hidden)
    return {
        "model.embed_tokens.weight": (rows, hidden),
        **{f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
    }


def make(folder: Path, size: int, only: list[str]) -> dict[str, Digests]:
    """Write the checkpoints; returns the digests of the true tensors by dtype."""
    import torch

    generator = torch.Generator().manual_seed(7)
    planned = shapes(size)
    flat = torch.empty(sum(torch.Size(shape).numel() for shape in planned.values())).normal_(
        0, 0.02, generator=generator
    )
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in planned.values()])
    model = {name: part.view(shape) for (name, shape), part in zip(planned.items(), parts, strict=True)}
    half = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True,
        "vocab_size": planned["model.embed_tokens.weight"][0], "hidden_size": len(model["model.norm.weight"]),
        "intermediate_size": len(model["model.layers.0.mlp.up_proj.weight"]),
        "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in planned),
    }  # fmt: skip
    writers = {"plain": write_plain, "fsdp": write_fsdp, "zero": write_zero, "dcp": write_dcp}
    for kind in only:
        place = folder / kind
        (place / "huggingface").mkdir(parents=True)
        for home in (place, place / "huggingface"):
            (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
        writers[kind](place, model, half, flat)
    return {
        "float32": {name: digest(tensor.numpy()) for name, tensor in model.items()},
        "bfloat16": {name: digest(tensor.view(torch.int16).numpy()) for name, tensor in half.items()},
    }


def write_plain(place: Path, model: Any, half: Any, flat: Any) -> None:
    import torch

    torch.save(half, place / "checkpoint.pt")


def write_fsdp(place: Path, model: Any, half: Any, flat: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        state = {
            name: DTensor.from_local(
                _cut(tensor, rank), mesh, [Shard(0)],
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )
            for name, tensor in model.items()
        }  # fmt: skip
        torch.save(state, place / f"model_world_size_{RANKS}_rank_{rank}.pt")
        dist.destroy_process_group()
    (place / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}), encoding="utf-8")


def _cut(tensor: Any, rank: int) -> Any:
    """A rank's rows: FSDP gives the last ranks none when the rows run out."""
    parts = tensor.chunk(RANKS)
    return (parts[rank] if rank < len(parts) else tensor[:0]).clone()


def write_zero(place: Path, model: Any, half: Any, flat: Any) -> None:
    import torch

    tag = place / "global_step1"
    tag.mkdir()
    (place / "latest").write_text(tag.name, encoding="utf-8")
    line = torch.cat([tensor.reshape(-1) for tensor in half.values()])
    views = torch.split(line, [tensor.numel() for tensor in half.values()])
    state = {
        "module": {name: view.view(half[name].shape) for name, view in zip(half, views, strict=True)},
        "buffer_names": [], "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "param_shapes": [{name: tensor.shape for name, tensor in model.items()}],
        "dp_world_size": ZERO_RANKS, "mp_world_size": 1, "global_steps": 1, "ds_version": "0.19.8",
    }  # fmt: skip
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(flat.chunk(ZERO_RANKS)):
        moments = {0: {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}}
        optimizer = {
            "zero_stage": 2, "partition_count": [ZERO_RANKS], "single_partition_of_fp32_groups": [part.clone()],
            "base_optimizer_state": {"state": moments}, "loss_scaler": None,
        }  # fmt: skip
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def write_dcp(place: Path, model: Any, half: Any, flat: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": model}, checkpoint_id=str(place / "pytorch_model_fsdp_0"), no_dist=True)


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def wrong(out: Path, true: Digests) -> str | None:
    """What differs from the true tensors, read without the safetensors library or any converter."""
    found: set[str] = set()
    for path in sorted(out.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                if true.get(name) != digest(file.read(end - start)):
                    return f"{name} differs"
                found.add(name)
    missing = true.keys() - found
    return f"{len(missing)} tensors are missing" if missing else None


def jobs(folder: Path, size: dict[str, int], peers: str | None, only: list[str]) -> Iterator[Job]:
    """The conversions whose results users compare, each with the tools that offer it."""

    def tools(source: Path, dtype: str, pattern: str | None, **more: Callable[[Path], list[str]]) -> Any:
        mine: dict[str, Callable[[Path], list[str]]] = {
            "ours": lambda out: [sys.executable, "-m", "bridge", "convert", str(source), str(out), "--dtype", dtype],
            "ours-work": lambda out: [sys.executable, "-c", OURS_WORK, str(source), str(out), dtype],
        }
        if pattern is not None:
            mine["naive"] = lambda out: [sys.executable, "-c", NAIVE, str(source / pattern), str(out), dtype]
        return mine | (more if peers else {})

    python = str(peers)
    fsdp, zero, plain, dcp = (folder / kind for kind in ("fsdp", "zero", "plain", "dcp"))
    verl: Callable[[Path], list[str]] = lambda out: [  # noqa: E731
        python, "-m", "verl.model_merger", "merge", "--backend", "fsdp",
        "--local_dir", str(fsdp), "--target_dir", str(out),
    ]  # fmt: skip
    to_fp32: Callable[[Path], list[str]] = lambda out: [  # noqa: E731
        python, "-m", "deepspeed.utils.zero_to_fp32", str(zero), str(out), "--safe_serialization",
    ]  # fmt: skip
    merge: Callable[[Path], list[str]] = lambda out: [  # noqa: E731
        python, "-m", "accelerate.commands.accelerate_cli", "merge-weights",
        str(dcp / "pytorch_model_fsdp_0"), str(out),
    ]  # fmt: skip
    wide, narrow = "float32", "bfloat16"
    module = "global_step1/mp_rank_00_model_states.pt"
    every = [
        Job("plain bf16 to bf16", plain, narrow, size[narrow], tools(plain, narrow, "checkpoint.pt"), False),
        Job("fsdp fp32 to bf16", fsdp, narrow, size[wide], tools(fsdp, narrow, "*.pt", verl=verl), True),
        Job("fsdp fp32 to fp32", fsdp, wide, size[wide], tools(fsdp, wide, "*.pt"), False),
        Job("zero2 module to bf16", zero, narrow, size[narrow], tools(zero, narrow, module), False),
        Job("zero2 masters to fp32", zero, wide, size[wide], tools(zero, wide, None, zero_to_fp32=to_fp32), False),
        Job("dcp fp32 to fp32", dcp, wide, size[wide], tools(dcp, wide, None, **{"merge-weights": merge}), False),
    ]
    yield from (job for job in every if job.source.name in only)


def floor(job: Job, out: Path, size: int) -> float:
    """Seconds to read `job.read` bytes of the source's largest files and write `size` bytes, fsync included."""
    files = sorted(weights(job.source), key=lambda file: file.stat().st_size, reverse=True)
    if "module" in job.name:
        files = [file for file in files if "model_states" in file.name]
    share = -(-job.read // len(files))
    start, written = time.perf_counter(), 0
    buffer = memoryview(bytearray(BLOCK))
    with out.open("xb", buffering=0) as target:
        for file in files:
            with file.open("rb", buffering=0) as source:
                left = min(share, file.stat().st_size)
                while left > 0 and (got := source.readinto(buffer[: min(BLOCK, left)])):
                    left -= got
                    # A cast writes less than it reads: keep the two in step.
                    part = buffer[: min(got * size // job.read, size - written)]
                    written += target.write(part) or 0
        os.fsync(target.fileno())
    return time.perf_counter() - start


def weights(source: Path) -> list[Path]:
    return [file for file in source.rglob("*") if file.suffix in (".pt", ".distcp")]


def drop_cache(source: Path) -> None:
    """Make the kernel forget the files; they must be on disk for that."""
    for file in weights(source):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def anonymous(pid: int) -> int:
    """RssAnon of a process and its children, in bytes; 0 when it is gone."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            total += anonymous(int(child))
    except OSError:
        pass
    return total


def measure(command: list[str], out: Path) -> Run:
    """Run one command to its end and its output to the disk."""
    peak, done = 0, threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    text, errors = process.communicate()
    for file in out.glob("*"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    last = (errors.strip().splitlines() or ["no message"])[-1][:300]
    work = float(text.split()[-1]) if process.returncode == 0 and OURS_WORK in command else None
    return Run(seconds, work, peak, None if process.returncode == 0 else f"exit {process.returncode}: {last}")


def race(job: Job, folder: Path, rounds: int, cold: bool, true: Digests, size: int) -> dict[str, Any]:
    """Every tool in turn, `rounds` times over; a tool that fails once is out and its reason kept."""
    floors: list[float] = []
    runs: dict[str, list[Run]] = {tool: [] for tool in job.tools}
    failed: dict[str, str] = {}
    out = folder / "out"
    for _ in range(rounds):
        for tool in ("floor", *job.tools):
            if tool in failed:
                continue
            (drop_cache if cold else warm)(job.source)
            if tool == "floor":
                floors.append(floor(job, out, size))
                out.unlink()
                continue
            run = measure(job.tools[tool](out), out)
            problem = run.failure or wrong(out, true)
            shutil.rmtree(out, ignore_errors=True)
            if problem and tool.startswith("ours"):
                raise SystemExit(f"{job.name}: {tool}: {problem}: the times would mean nothing")
            if problem:
                failed[tool] = problem
            else:
                runs[tool].append(run)
    base = median(floors)
    result: dict[str, Any] = {"floor_s": round(base, 3), "failed": failed}
    times = {}
    for tool, kept in runs.items():
        if not kept or tool in failed:
            continue
        times[tool] = median(run.seconds if run.work is None else run.work for run in kept)
        result[tool] = {
            "s": round(times[tool], 3),
            "over_floor": round(times[tool] / base, 2),
            "anonymous_mb": round(max(run.anonymous for run in kept) / 1e6),
            "equal": True,
        }
    result["faster_than"] = {
        tool: round(seconds / times["ours"], 2) for tool, seconds in times.items() if not tool.startswith("ours")
    }
    return result


def warm(source: Path) -> None:
    """Have the kernel hold the files."""
    buffer = bytearray(BLOCK)
    for file in weights(source):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def main() -> None:
    kinds = ["plain", "fsdp", "zero", "dcp"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder; its files are removed")
    parser.add_argument("--size", type=float, default=1000, help="MB of the model in bf16; the disk holds 16 times it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the sources from the page cache before each run")
    parser.add_argument("--peers", help="a Python that has deepspeed, verl and accelerate")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="checkpoints to make and convert")
    args = parser.parse_args()
    folder = args.folder / "bench-convert"
    folder.mkdir(parents=True)
    try:
        true = make(folder, int(args.size * 10**6), args.only)
        gc.collect()
        elements = sum(_count(shape) for shape in shapes(int(args.size * 10**6)).values())
        size = {"float32": elements * 4, "bfloat16": elements * 2}
        load = os.getloadavg()[0]
        results = {
            job.name: race(job, folder, args.rounds, args.cold, true[job.dtype], size[job.dtype])
            for job in jobs(folder, size, args.peers, args.only)
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = {"bf16_mb": round(elements * 2 / 1e6, 3), "rounds": args.rounds, "cold": args.cold, "load": load}
    peers = args.peers or "not run: name a Python that has deepspeed, verl and accelerate (--peers)"
    print(json.dumps({"bench": "convert", **facts, "peers": peers, "jobs": results}))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


if __name__ == "__main__":
    main()
