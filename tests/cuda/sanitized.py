"""Small calls of each op, forward and backward, for compute-sanitizer: `python sanitized.py OP... [--device cpu]`.

Two dtypes, documents and none: every kernel of an op runs, with tails in each dimension. What the tools have to find
or to leave alone is in `PLANTED`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from oracles.gdn import Case, make_case, run_front
from oracles.ple import ple_inputs
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import ple_gdn
from ple_gdn.ops.gated_delta_rule.device_hopper import thread_barrier

DTYPES = (torch.float32, torch.bfloat16)


def _random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


def ple(device: str) -> list[Tensor]:
    """300 rows are two spans, 320 channels a block of 256 and a tail."""
    results, tokens = [], 300
    mask = (torch.arange(tokens)[None] % 4 != 1).to(device)
    cu = torch.tensor([0, 1, 1, 170, 290], device=device)
    for dtype in DTYPES:
        leaves = [x.to(device).requires_grad_() for x in ple_inputs(1, tokens, 4, 320, 4, dtypes=dtype)]
        dout = _random(*leaves[0].shape, dtype=dtype, device=device)
        for boundaries, rows, residual in ((None, None, False), (None, mask, False), (cu, mask, True)):
            out, _ = torch.ops.ple_gdn.ple_gate_conv(*leaves, boundaries, rows, dilation=3, residual=residual)
            results += [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return results


def gated_delta_rule(device: str) -> list[Tensor]:
    """Both tape modes; a whole chunk, a tail, an empty and a one-token document; rows of no document; keys that are
    alike, which have a kernel of their own."""
    results = []
    cases = ((torch.float32, 32, "plain"), (torch.bfloat16, 128, "plain"), (torch.bfloat16, 128, "near_equal_keys"))
    for dtype, width, mode in cases:
        case = make_case((70, 0, 1, 64), value_heads=2, heads=1, key_width=width, value_width=width, dtype=dtype,
                         mode=mode, trailing=3)  # fmt: skip
        case = Case(*(x.to(device) if isinstance(x, Tensor) else x for x in case))
        for save_mode in ("light", "full"):
            results += run_front(case, save_mode=save_mode).values()
    return results


def causal_conv1d(device: str) -> list[Tensor]:
    results = []
    cu = torch.tensor([0, 1, 1, 100, 145], device=device)
    for dtype in DTYPES:
        *leaves, dy = (
            _random(*shape, dtype=dtype, device=device) for shape in ((1, 150, 72), (72, 4), (72,), (1, 150, 72))
        )
        leaves = [x.requires_grad_() for x in leaves]
        for boundaries in (None, cu):
            y = ple_gdn.causal_conv1d(*leaves, activation="silu", cu_seqlens=boundaries)
            results += [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    return results


def gated_residual(device: str) -> list[Tensor]:
    results, streams = [], 4
    for dtype in DTYPES:
        shapes = [(37, 320), (37, 384), (37, 384), (37, 96), (37, 384), (37, streams)]
        leaves = [_random(*s, dtype=dtype, device=device).requires_grad_() for s in shapes]
        x, up, normed, hidden, hyper, weights = leaves
        outs = (
            ple_gdn.gated_residual_down(x, streams),
            ple_gdn.gated_residual_mix(up, normed, streams),
            ple_gdn.gated_residual_inject(hidden, hyper, weights),
        )
        upstream = [torch.randn_like(out) for out in outs]
        results += [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, upstream)]
    return results


@triton.jit
def read_past_the_end(x, y):
    tl.store(y, tl.load(x + (1 << 24)))


def planted(device: str) -> list[Tensor]:
    """What the tool has to find: a read 64 MiB past the end of 4 bytes."""
    x, y = torch.zeros(1, device=device), torch.zeros(1, device=device)
    read_past_the_end[(1,)](x, y)
    return [y]


# Wide enough for ordinary loads and stores instead of those of whole matrices.
ONE_WARP = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
def give(tile, full, x, SYNCHRONISE: gl.constexpr):
    tile.store(gl.load(x + gl.arange(0, 256, FOUR_WARPS)))
    if SYNCHRONISE:
        # One thread arrives for all, after every thread's store.
        thread_barrier()
        mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def take(tile, full, y, SYNCHRONISE: gl.constexpr):
    if SYNCHRONISE:
        mbarrier.wait(full.index(0), 0)
    gl.store(y + gl.arange(0, 256, ONE_WARP), tile.load(ONE_WARP))


@gluon.jit
def hand_over_kernel(x, y, SYNCHRONISE: gl.constexpr):
    """Two partitions and one tile in shared memory, ordered by a barrier of the copy engine's kind or by nothing."""
    tile = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    gl.warp_specialize([(give, (tile, full, x, SYNCHRONISE)), (take, (tile, full, y, SYNCHRONISE))], [1], [24])


@gluon.jit
def store_scalar(y, value):
    gl.store(y, value)


@gluon.jit
def dispatch_kernel(x, y):
    """Two partitions without shared memory but for what Triton's dispatch takes: a number read, so captured."""
    value = gl.load(x)
    gl.warp_specialize([(store_scalar, (y, value)), (store_scalar, (y + 1, value))], [1], [24])


# One store and one load of shared memory, of neighbouring warps: as text, since Triton puts a barrier between its own.
UNORDERED = gl.constexpr("""{
.shared .align 4 .b32 cells[128];
.reg .b32 first, at;
mov.b32 first, cells;
mad.lo.u32 at, $1, 4, first;
st.shared.b32 [at], $1;
xor.b32 at, $1, 32;
mad.lo.u32 at, at, 4, first;
ld.shared.b32 $0, [at];
}""")
CELLS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def swap_warps(y):
    threads = gl.arange(0, 128, CELLS)
    found = gl.inline_asm_elementwise(UNORDERED, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(y + threads, found.to(gl.float32))


@gluon.jit
def swap_kernel(x, y, z):
    gl.warp_specialize([(swap_warps, (y,)), (store_scalar, (z, gl.load(x)))], [1], [24])


def planted_race(device: str) -> list[Tensor]:
    """What racecheck has to find, but cannot tell from `handed_over`: a tile one partition writes and another reads."""
    x, y = torch.ones(256, device=device), torch.zeros(256, device=device)
    hand_over_kernel[(8,)](x, y, False, num_warps=4, maxnreg=64)
    return [x]  # y is anything


def planted_race_within(device: str) -> list[Tensor]:
    """What racecheck has to find: warps of one partition that write and read shared memory in any order."""
    x, y = torch.ones(1, device=device), torch.zeros(128, device=device)
    swap_kernel[(8,)](x, y, torch.zeros_like(x), num_warps=4, maxnreg=64)
    return [x]  # y is anything


def handed_over(device: str) -> list[Tensor]:
    """What racecheck reports, though an mbarrier orders it."""
    x, y = torch.ones(256, device=device), torch.zeros(256, device=device)
    hand_over_kernel[(8,)](x, y, True, num_warps=4, maxnreg=64)
    assert bool((y == 1).all())
    return [y]


def dispatch(device: str) -> list[Tensor]:
    """Where racecheck may find only Triton's dispatch."""
    x, y = torch.ones(1, device=device), torch.zeros(2, device=device)
    dispatch_kernel[(8,)](x, y, num_warps=4, maxnreg=64)
    assert bool((y == 1).all())
    return [y]


OPS: dict[str, Callable[[str], list[Tensor]]] = {
    f.__name__: f for f in (ple, gated_delta_rule, causal_conv1d, gated_residual)
}
PLANTED: dict[str, Callable[[str], list[Tensor]]] = {
    f.__name__: f for f in (planted, planted_race, planted_race_within, handed_over, dispatch)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="+", choices=[*OPS, *PLANTED])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.ops:
        results = {**OPS, **PLANTED}[name](options.device)
        assert all(bool(x.isfinite().all()) for x in results), name
        print(f"{name}: {len(results)} results", flush=True)


if __name__ == "__main__":
    main()
