"""What each gloo process of the data-parallel tests runs; failures come back as text."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed as dist
from layer import batch, layers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ple_gdn

ROWS = 4


def _expected(dtype: torch.dtype = torch.float32) -> tuple[list[str], list[Tensor]]:
    model = layers(2).to(dtype)
    model(batch(ROWS).to(dtype)).float().square().mean().backward()
    return [n for n, _ in model.named_parameters()], [p.grad.float() for p in model.parameters()]


def _share(rank: int) -> Tensor:
    return batch(ROWS).chunk(2)[rank]


def _compare(found: list[Tensor], expected: list[Tensor], names: list[str], tolerance: float) -> None:
    for name, ours, theirs in zip(names, found, expected, strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm().clamp_min(1e-6)
        assert error < tolerance, f"{name}: {error:.2e}"


def check_ddp(rank: int) -> None:
    names, expected = _expected()
    for compiled in (False, True):
        model = layers(2)
        if compiled:
            for layer in model:
                layer.compile(backend="aot_eager", fullgraph=True)
        parallel = DistributedDataParallel(model)
        parallel(_share(rank)).square().mean().backward()
        _compare([p.grad for p in model.parameters()], expected, names, 1e-4)


def check_fsdp(rank: int) -> None:
    """Sharded parameters, bfloat16 compute, each layer checkpointed and compiled on its own."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        names, expected = _expected(dtype)
        model = layers(2)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        wrapped = nn.Sequential(*(checkpoint_wrapper(layer) for layer in model))
        for layer in wrapped:
            layer.compile(backend="aot_eager")
            fully_shard(layer, mp_policy=policy)
        fully_shard(wrapped, mp_policy=policy)
        wrapped(_share(rank).to(dtype)).float().square().mean().backward()
        assert all(isinstance(p, DTensor) for p in wrapped.parameters())
        _compare([p.grad.full_tensor() for p in wrapped.parameters()], expected, names, tolerance)


def check_dtensors(rank: int) -> None:
    """Every front and every raw op names the argument and `.to_local()`."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(1, 4, 16), mesh, [Replicate()])
    four, flat, gate = x.unflatten(-1, (1, 16)), x[0, 0], x[..., :1]
    calls = {
        "gated_delta_rule": lambda op: op(four, four, four, gate, gate),
        "ple_gate_conv": lambda op: op(x, x, x[..., :8], flat, flat, flat, flat.view(16, 1, 1), dilation=1),
        "causal_conv1d": lambda op: op(x, flat.view(16, 1)),
        "grouped_rms_norm": lambda op: op(x, flat, group_size=8),
        "gated_residual_down": lambda op: op(x, 2),
        "gated_residual_mix": lambda op: op(x, x, 2),
        "gated_residual_inject": lambda op: op(x[..., :8], x, x[..., :2]),
    }
    for name, call in calls.items():
        for op in (getattr(ple_gdn, name), getattr(torch.ops.ple_gdn, name)):
            with pytest.raises(TypeError, match=r": expected a plain tensor, got a DTensor; pass \w+\.to_local\(\)"):
                call(op)
    y = ple_gdn.gated_residual_down(x.to_local(), 2)
    assert y.shape == (1, 4, 16)


CHECKS = ("ddp", "fsdp", "dtensors")


def worker(rank: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))
    for name in CHECKS:
        failure = None
        try:
            torch._dynamo.reset()
            globals()[f"check_{name}"](rank)
        except Exception:
            failure = traceback.format_exc()
        queue.put((name, rank, failure))
        dist.barrier()
    dist.destroy_process_group()
