"""Run with TRITON_INTERPRET=1: the CUDA path of context parallelism on CPU tensors, ranks as threads; prints JSON."""

from __future__ import annotations

import json

import kcp_threads
import kcp_worker
import pytest
import torch

import ple_gdn
from ple_gdn.ops.kcp import gated_delta_rule as op_module
from ple_gdn.ops.kcp import launch, local
from ple_gdn.ops.kcp.plan import needs_map

H, HV, K = 1, 2, kcp_worker.K


def case(bounds: list[int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The first heads of the shared case: the interpreter is slow."""
    heads = {"q": H, "k": H, "v": HV, "g": HV, "beta": HV, "do": HV}
    x = kcp_worker.case(bounds=bounds, dtype=dtype)
    return {n: t[:, :, : heads[n]] if n in heads else t[:, :HV].contiguous() for n, t in x.items()}


def over_ranks(patch, x: dict, bounds: list[int], world: int, save_mode: str, **options) -> tuple[list, list]:
    contexts = [None] * world

    def work(ctx: ple_gdn.KcpContext) -> dict[str, torch.Tensor]:
        contexts[ctx.rank] = ctx
        return kcp_worker.run_gdn(kcp_worker.shard(x, ctx), cp=ctx, save_mode=save_mode)

    part = ple_gdn.kcp_partition(bounds, world)
    return kcp_threads.run_ranks(patch, part, (H, HV), work, **options), contexts


def errors(results: list, contexts: list, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    out = {}
    for name, reference in expected.items():
        if name in ("ht", "dinitial_state"):
            whole = sum(rank[name] for rank in results)
        else:
            whole = torch.empty_like(reference)
            for rank, ctx in zip(results, contexts, strict=True):
                whole[:, ctx.positions] = rank[name]
        out[name] = float((whole - reference).norm() / reference.norm())
    return out


def exact_map(run: launch.DeviceForwardRun, segment: int) -> torch.Tensor:
    """[HV, K, K] in float64 from the tapes the kernel reads: a product of chunk maps on the 16-bit X of the walk."""
    table, plan = run.table.double().view(-1, HV, 5, 64), run.plan
    at, first = plan.segments[segment], plan.segment_chunks[segment]
    k = run.k[0].double().repeat_interleave(HV // H, 1)
    M = torch.eye(K, dtype=torch.float64).expand(HV, -1, -1)
    for chunk in range(-((at.start - at.end) // 64)):
        rows = slice(at.start + 64 * chunk, min(at.end, at.start + 64 * (chunk + 1)))
        n = rows.stop - rows.start
        beta, k_start, k_end = (table[first + chunk, :, i, :n, None] for i in range(3))
        keys, x = k[rows].transpose(0, 1), run.prep[3][0, rows].double().transpose(0, 1)[..., :n]
        E = -k_start * (keys @ M)
        delta = E + x @ (beta * E)
        M = M * table[first + chunk, :, 4, 63, None, None].exp() + keys.mT @ (beta * k_end * delta)
    return M


def map_error(dtype: torch.dtype) -> float:
    """Maps of the kernel against float64, relative to the largest entry."""
    x = case([0, 190], dtype)
    ctx = ple_gdn.build_kcp_context(ple_gdn.kcp_partition([0, 190], 1), None, 0, "cpu", p_rule=3).prepare(H, HV)
    inputs = local.Inputs(*(x[n] for n in kcp_worker.TOKENS), ctx.segments, ctx.chunk_offsets, None, True)
    run = launch.DeviceForwardRun(ctx.plan, inputs, "none")
    chosen = [i for i, s in enumerate(ctx.plan.segments) if needs_map(s)]
    assert chosen
    reference = torch.stack([exact_map(run, i) for i in chosen])
    return float((run.maps(chosen) - reference).abs().max() / reference.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    found = {"maps": {"float32": map_error(torch.float32), "float16": map_error(torch.float16)}, "ranks": []}
    cases = [([0, 3, 3, 200], 3, 1, "light", ("ring", "all_to_all")), ([0, 150], 2, 2, "full", ("ring",))]
    for bounds, world, P, save_mode, exchanges in cases:
        x = case(bounds)
        expected = kcp_worker.run_gdn(x, cu_seqlens=torch.tensor(bounds))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(op_module, "_runs_of", lambda _: (launch.DeviceForwardRun, launch.DeviceBackwardRun))
            runs = []
            for exchange in exchanges:
                # All-to-all also replays as the Hopper walks do, in a launch of its own: the same bits.
                patch.setattr(launch, "uses_hopper", lambda _, apart=exchange == "all_to_all": apart)
                runs.append(over_ranks(patch, x, bounds, world, save_mode, p_rule=P, exchange=exchange))
        first, contexts = runs[0]
        equal = all(
            torch.equal(a[n], b[n]) for other, _ in runs[1:] for a, b in zip(first, other, strict=True) for n in a
        )
        found["ranks"].append({"errors": errors(first, contexts, expected), "equal": equal})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
