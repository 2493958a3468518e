"""Run by test_convert_shards.py in four processes: saves the same tensors in every placement that trainers use."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

WORLD = 4
SHAPES = {"even": (8, 12), "uneven": (7, 5), "short": (2, 3), "row": (1,), "cube": (5, 6, 4), "empty": (0, 4)}


def truth() -> dict[str, torch.Tensor]:
    """The whole tensors, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def placed_tensor(tensor: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """This process's part of a tensor that all hold: cut by torch.chunk, one mesh axis after the other."""
    local = tensor
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = local.chunk(mesh.size(axis), placement.dim)
            index = mesh.get_local_rank(axis)
            local = parts[index] if index < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def run(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    whole = truth()
    placed = {
        "shard0": (one, [Shard(0)]),
        "shard1": (one, [Shard(1)]),
        "copied": (one, [Replicate()]),
        "hybrid": (two, [Replicate(), Shard(0)]),
        "tiles": (two, [Shard(0), Shard(1)]),
        "twice": (two, [Shard(0), Shard(0)]),
        "submesh": (two["tp"], [Shard(0)]),
    }
    state: dict[str, torch.Tensor] = {"a.buffer": torch.tensor(7), "module": torch.ones(3, dtype=torch.bool)}
    for kind, (mesh, placements) in placed.items():
        for name, tensor in whole.items():
            if all(not isinstance(p, Shard) or p.dim < tensor.ndim for p in placements):
                state[f"{kind}.{name}"] = placed_tensor(tensor, mesh, placements)
    # FSDP over tensor parallelism: rows are cut for tp first, and each cut for dp then.
    rows = whole["even"].chunk(2)[two.get_local_rank("tp")].chunk(2)[two.get_local_rank("dp_replicate")]
    state["strided.even"] = DTensor.from_local(
        rows.clone(), two, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
        shape=whole["even"].shape, stride=whole["even"].stride(),
    )  # fmt: skip
    (folder / "actor").mkdir(exist_ok=True)
    torch.save(state, folder / "actor" / f"model_world_size_{WORLD}_rank_{rank}.pt")
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(("strided", "submesh"))}
    odd = DeviceMesh("cpu", [3, 1, 2, 0])
    crossed = DeviceMesh("cpu", [[0, 2], [1, 3]])
    for kind, mesh, placements in (("odd", odd, [Shard(0)]), ("crossed", crossed, [Shard(0), Shard(1)])):
        (folder / kind).mkdir(exist_ok=True)
        cut = {name: distribute_tensor(whole[name], mesh, placements) for name in ("even", "uneven")}
        torch.save(cut, folder / kind / f"model_world_size_{WORLD}_rank_{rank}.pt")
    writer = HuggingFaceStorageWriter(str(folder / "parts"), save_distributed=True)
    dcp.save({"w": placed_tensor(whole["even"], one, [Shard(0)])}, storage_writer=writer)
    flat = {"model.w": whole["even"], "optimizer.state.model.w.exp_avg": whole["even"]}
    dcp.save(flat, checkpoint_id=str(folder / "flat"))
    dcp.save({"app": {"model": kept, "optim": {"step": torch.ones(1)}}}, checkpoint_id=str(folder / "dcp"))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
