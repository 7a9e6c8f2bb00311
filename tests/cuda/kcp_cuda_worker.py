"""What each NCCL process of the context-parallel CUDA tests runs, one GPU each."""

from __future__ import annotations

import itertools
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import ple_gdn
from ple_gdn.ops.kcp.partition import LAYOUTS

BOUNDS = [0, 700, 700, 3100, 4000]
H, HV, WIDTH = 2, 6, 128
TOKENS = ("q", "k", "v", "g", "beta")
BUDGET = {torch.bfloat16: 8e-3, torch.float32: 2e-5}  # both sides round: against the op on one GPU


def case(dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    T, N = BOUNDS[-1], len(BOUNDS) - 1

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    decay = torch.linspace(-0.005, -1.0, HV)
    x = {"q": rand(1, T, H, WIDTH), "k": rand(1, T, H, WIDTH), "v": rand(1, T, HV, WIDTH), "do": rand(1, T, HV, WIDTH)}
    x = {name: t.to(dtype) for name, t in x.items()}
    x |= {"g": decay * torch.rand(1, T, HV, generator=generator), "beta": torch.sigmoid(rand(1, T, HV))}
    x |= {"initial_state": rand(N, HV, WIDTH, WIDTH), "dht": rand(N, HV, WIDTH, WIDTH)}
    return {name: t.to(device) for name, t in x.items()}


def run(x: dict[str, torch.Tensor], **where: object) -> dict[str, torch.Tensor]:
    leaves = {n: x[n].clone().requires_grad_() for n in (*TOKENS, "initial_state")}
    o, ht = ple_gdn.gated_delta_rule(**leaves, output_final_state=True, use_qk_l2norm=True, **where)
    torch.autograd.backward([o, ht], [x["do"], x["dht"]])
    return {"o": o.detach(), "ht": ht.detach(), **{f"d{n}": leaf.grad for n, leaf in leaves.items()}}


def check(rank: int, world: int, device: torch.device) -> None:
    # Boundaries and chunk offsets in int64, as a plan has them: the kernels of the ranks, compiled once.
    packing = ple_gdn.prepare_varlen(torch.tensor(BOUNDS, device=device))
    for dtype in BUDGET:
        x = case(dtype, device)
        expected = run(x, cu_seqlens=packing)
        for layout, P in itertools.product(LAYOUTS, (1, 3)):
            results = []
            for exchange in ("ring", "all_to_all"):
                part = ple_gdn.kcp_partition(BOUNDS, world, layout)
                ctx = ple_gdn.build_kcp_context(part, dist.group.WORLD, rank, device, p_rule=P, exchange=exchange)
                ctx.prepare(H, HV)
                mine = {n: t.index_select(1, ctx.positions) if n in (*TOKENS, "do") else t for n, t in x.items()}
                got, again, full = run(mine, cp=ctx), run(mine, cp=ctx), run(mine, cp=ctx, save_mode="full")
                for name, value in got.items():
                    where = f"{dtype} {layout} P={P} {exchange} {name}"
                    assert torch.equal(value, again[name]), f"{where} is not repeatable"
                    assert torch.equal(value, full[name]), f"{where} has other bits with full tapes"
                    reference = expected[name]
                    if name in ("ht", "dinitial_state"):
                        value = value.clone()
                        dist.all_reduce(value)
                    else:
                        reference = reference.index_select(1, ctx.positions)
                    error = float((value.double() - reference.double()).norm() / reference.double().norm())
                    assert error <= BUDGET[dtype], f"{where}: {error:.2e}"
                results.append(got)
            for name, value in results[0].items():
                assert torch.equal(value, results[1][name]), f"{dtype} {layout} P={P}: {name} ring != all_to_all"


def worker(rank: int, world: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=timedelta(seconds=120), device_id=device)
    try:
        check(rank, world, device)
        queue.put((rank, None))
    except Exception:
        queue.put((rank, traceback.format_exc()))
    dist.destroy_process_group()
