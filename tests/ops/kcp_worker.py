"""What each gloo process of the context-parallel tests runs; failures come back as text."""

from __future__ import annotations

import itertools
import os
import traceback
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist

import ple_gdn
from ple_gdn.ops.kcp import exchange as exchange_module
from ple_gdn.ops.kcp.exchange import exchanged_bytes
from ple_gdn.ops.kcp.partition import LAYOUTS

H, HV, K, V = 2, 4, 16, 32
BOUNDS = [0, 70, 70, 333, 400]  # the third document crosses ranks; one is empty


def case(seed: int = 0, bounds=BOUNDS, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    T, N = bounds[-1], len(bounds) - 1
    decay = torch.tensor([-0.01, -0.5, -3.0, -0.1])  # a different decay per head: equal ones hide offset faults
    return {
        "q": rand(1, T, H, K).to(dtype),
        "k": rand(1, T, H, K).to(dtype),
        "v": rand(1, T, HV, V).to(dtype),
        "g": decay * torch.rand(1, T, HV, generator=generator),
        "beta": torch.sigmoid(rand(1, T, HV)),
        "initial_state": rand(N, HV, K, V),
        "do": rand(1, T, HV, V).to(dtype),
        "dht": rand(N, HV, K, V),
    }


TOKENS = ("q", "k", "v", "g", "beta")


def run_gdn(x: dict[str, torch.Tensor], **kwargs) -> dict[str, torch.Tensor]:
    leaves = {n: x[n].clone().requires_grad_() for n in (*TOKENS, "initial_state")}
    o, ht = ple_gdn.gated_delta_rule(**leaves, output_final_state=True, use_qk_l2norm=True, **kwargs)
    torch.autograd.backward([o, ht], [x["do"], x["dht"]])
    return {"o": o.detach(), "ht": ht.detach(), **{f"d{n}": leaf.grad for n, leaf in leaves.items()}}


def shard(x: dict[str, torch.Tensor], ctx) -> dict[str, torch.Tensor]:
    out = dict(x)
    for name in (*TOKENS, "do"):
        out[name] = x[name].index_select(1, ctx.positions)
    return out


def close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape, f"{name}: {got.shape} {expected.shape}"
    if expected.numel():
        error = (got - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def summed(x: torch.Tensor, group) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def check_gdn(group, rank: int, world: int) -> None:
    x = case()
    expected = run_gdn(x, cu_seqlens=torch.tensor(BOUNDS))
    for layout in LAYOUTS:
        for P in (1, 2, 3):
            results = {}
            for exchange in ("ring", "all_to_all"):
                part = ple_gdn.kcp_partition(BOUNDS, world, layout)
                ctx = ple_gdn.build_kcp_context(part, group, rank, "cpu", p_rule=P, exchange=exchange).prepare(H, HV)
                got = run_gdn(shard(x, ctx), cp=ctx)
                again = run_gdn(shard(x, ctx), cp=ctx, save_mode="full")
                where = f"{layout} W={world} P={P} {exchange}"
                for name, value in got.items():
                    assert torch.equal(value, again[name]), f"{where}: {name} differs in a second run, with full tapes"
                    if name in ("ht", "dinitial_state"):
                        close(f"{where} {name}", summed(value, group), expected[name])
                    else:
                        close(f"{where} {name}", value, expected[name].index_select(1, ctx.positions))
                results[exchange] = got
            for name, value in results["ring"].items():
                assert torch.equal(value, results["all_to_all"][name]), f"{layout} P={P}: {name} ring != all_to_all"


def check_bytes(group, rank: int, world: int) -> None:
    counted = []
    original = exchange_module.issue

    def counting(plan, sends, *rest):
        counted.append(sum(t.numel() * t.element_size() for parts in sends.values() for t in parts))
        return original(plan, sends, *rest)

    exchange_module.issue = counting
    try:
        for scale in (1, 2):
            bounds = [b * scale for b in BOUNDS]
            x = case(bounds=bounds)
            for layout in LAYOUTS:
                for exchange in ("ring", "all_to_all"):
                    part = ple_gdn.kcp_partition(bounds, world, layout)
                    ctx = ple_gdn.build_kcp_context(part, group, rank, "cpu", p_rule=1, exchange=exchange)
                    ctx.prepare(H, HV)
                    counted.clear()
                    run_gdn(shard(x, ctx), cp=ctx)
                    expected = sum(exchanged_bytes(ctx.plan, HV, K, V, exchange, adjoint=a) for a in (False, True))
                    assert sum(counted) == expected, f"{layout} {exchange}: sent {sum(counted)}, formula {expected}"
    finally:
        exchange_module.issue = original


class _ConvCase:
    """PLE and the short convolution on a pack, or on the shard that `take` selects."""

    def __init__(self, bounds: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        T, N, C = bounds[-1], 2, 8
        self.tokens = [torch.randn(1, T, width, generator=generator) for width in (N * C, N * C, C)]
        self.douts = [torch.randn(1, T, N * C, generator=generator) for _ in range(2)]
        self.mask = (torch.rand(1, T, generator=generator) > 0.2).float()
        shapes = [(N * C,)] * 3 + [(N * C, 1, 4), (N * C, 4)]
        self.weights = [0.3 * torch.randn(shape, generator=generator) for shape in shapes]

    def run(self, take, **where) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tokens = [take(t).clone().requires_grad_() for t in self.tokens]
        weights = [w.clone().requires_grad_() for w in self.weights]
        out = ple_gdn.ple_gate_conv(*tokens, *weights[:4], dilation=3, conv_mask=take(self.mask), **where)
        y = ple_gdn.causal_conv1d(tokens[0], weights[4], activation="silu", **where)
        torch.autograd.backward([out, y], [take(d) for d in self.douts])
        return [out.detach(), y.detach(), *(t.grad for t in tokens)], [w.grad for w in weights]


def check_short_convolutions(group, rank: int, world: int) -> None:
    """9 and 3 rows of history, also where a history spans several ranks (shards of 4 tokens), and with empty shards."""
    for bounds in (BOUNDS, [0, 3, 16], [0, 1, 2, 2]):
        case = _ConvCase(bounds)
        tokens, weights = case.run(lambda t: t, cu_seqlens=torch.tensor(bounds))
        for layout in LAYOUTS:
            part = ple_gdn.kcp_partition(bounds, world, layout)
            ctx = ple_gdn.build_kcp_context(part, group, rank, "cpu").prepare(H, HV)
            mine, grads = case.run(lambda t, ctx=ctx: t.index_select(1, ctx.positions), cp=ctx)
            for i, (got, expected) in enumerate(zip(mine, tokens, strict=True)):
                close(f"{layout} {bounds} token tensor {i}", got, expected.index_select(1, ctx.positions))
            for i, (got, expected) in enumerate(zip(grads, weights, strict=True)):
                close(f"{layout} {bounds} weight gradient {i}", summed(got, group), expected)


def check_scatter_gather(group, rank: int, world: int) -> None:
    # [0, 1, 2, 2]: ranks that own nothing; [0, 0]: nobody does.
    for bounds, layout in itertools.product((BOUNDS, [0, 1, 2, 2], [0, 0]), LAYOUTS):
        pack = torch.arange(bounds[-1] * 3.0).view(1, bounds[-1], 3)
        ctx = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(bounds, world, layout), group, rank, "cpu").prepare(H, HV)
        x = pack.clone().requires_grad_()
        mine = ple_gdn.kcp_scatter(x, ctx)
        assert torch.equal(ple_gdn.kcp_gather(mine, ctx), pack)
        (2 * mine).sum().backward()
        assert torch.equal(summed(x.grad, group), torch.full_like(pack, 2.0))
        local = mine.detach().requires_grad_()
        (ple_gdn.kcp_gather(local, ctx) * pack).sum().backward()
        assert torch.equal(local.grad, mine.detach())


class _Block(torch.nn.Module):
    """A token-mixing block as a model would have it: PLE, short convolution and gated delta rule, all on a shard."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.width = 2 * H * K + HV * V  # 96: two streams of 48 for PLE
        shapes = {"conv": (self.width, 4), "ple": (self.width, 1, 4), "norm": (self.width,)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(0.3 * torch.randn(shape, generator=generator)))

    def forward(self, pack: torch.Tensor, gates: torch.Tensor, cp) -> torch.Tensor:
        x, g = ple_gdn.kcp_scatter(pack, cp), ple_gdn.kcp_scatter(gates, cp)
        norms = (self.norm, 0.5 * self.norm, 0.1 + self.norm)
        x = x + ple_gdn.ple_gate_conv(x, x.sin(), x[..., : self.width // 2], *norms, self.ple, dilation=3, cp=cp)
        y = ple_gdn.causal_conv1d(x, self.conv, activation="silu", cp=cp)
        q, k, v = y.split([H * K, H * K, HV * V], -1)
        heads = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        o, _ = ple_gdn.gated_delta_rule(*heads, -g.exp(), torch.sigmoid(g), use_qk_l2norm=True, cp=cp)
        return ple_gdn.kcp_gather(o.flatten(2).tanh(), cp)


def check_compiled(group, rank: int, world: int) -> None:
    """The same block in one graph, forward and backward, on two ranks; a third pack is not a third graph."""
    if world != 2:
        return
    block = _Block()

    def run(fn, bounds: list[int]) -> list[torch.Tensor]:
        ctx = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(bounds, world, "zigzag"), group, rank, "cpu", p_rule=2)
        ctx.prepare(H, HV)
        generator = torch.Generator().manual_seed(bounds[-1])
        leaves = [torch.randn(1, bounds[-1], n, generator=generator).requires_grad_() for n in (block.width, HV)]
        block.zero_grad()
        out = fn(*leaves, ctx)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in (*leaves, *block.parameters()))]

    for backend, tolerance in (("aot_eager", 0.0), ("inductor", 1e-5), ("ple_gdn", 1e-5)):
        torch._dynamo.reset()
        graphs = torch._dynamo.utils.counters["stats"]
        before = graphs["unique_graphs"]
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        packs = (BOUNDS, [0, 65, 90, 380], [0, 130, 131, 200, 390]) if backend == "aot_eager" else (BOUNDS,)
        for bounds in packs:
            for i, (got, expected) in enumerate(zip(run(compiled, bounds), run(block, bounds), strict=True)):
                close(f"{backend} {bounds} {i}", got, expected, tolerance)
        assert graphs["unique_graphs"] - before <= 2, f"{backend}: {graphs['unique_graphs'] - before} graphs"


def check_row(group, rank: int, world: int) -> None:
    """Every rank plans the same row."""
    bounds = [0, 40961, 43961, 108961, 108978, 117978, 237978, 261987]
    for layout, rule in itertools.product(LAYOUTS, ("row_cost_lpt", "wave_fill1")):
        part = ple_gdn.kcp_partition(torch.tensor(bounds), world, layout)
        ctx = ple_gdn.build_kcp_context(part, group, rank, "cpu", p_rule=rule).prepare(16, 48)
        rows = [None] * world
        dist.all_gather_object(rows, (ctx.plan.row, ctx.plan.fragments), group=group)
        assert rows == [rows[0]] * world, rows


CHECKS = {
    f.__name__: f
    for f in (check_row, check_gdn, check_bytes, check_short_convolutions, check_scatter_gather, check_compiled)
}


def worker(rank: int, world: int, port: int, queue) -> None:
    """One process of a `world`-process run: every check for every group size 1..world, on the first ranks."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    groups = [dist.new_group(list(range(size))) for size in range(1, world + 1)]
    for name, check in CHECKS.items():
        try:
            for size, group in enumerate(groups, 1):
                if rank < size:
                    check(group, rank, size)
            queue.put((name, rank, None))
        except Exception:
            queue.put((name, rank, traceback.format_exc()))
            break  # the other ranks may be inside a collective: stop here, they time out
    dist.destroy_process_group()
