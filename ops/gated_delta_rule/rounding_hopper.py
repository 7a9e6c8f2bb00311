"""Rounds X of chunks with keys of one direction anew, carrying errors down its columns (`inverse_rounding`), in Gluon.

`operands_hopper` leaves a mark with such chunks, the lowest bit of the last G in the row table, and this looks at all
marks: 2 us at 8,192 tokens and 16 heads, 3 us at 32,768. It makes X as that kernel does, but in shared memory and fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .device_hopper import thread_barrier
from .inverse_hopper import FP32_HEADS, PLAIN_2D, PLAIN_3D, exp, merge_blocks, reinterpret, solve_diagonals
from .operands_hopper import GATE, TILE, VECTOR, WIDE, _fetch, _gates, _locate, _share

# Marks a CTA looks at: 8,192 at 32,768 tokens and 16 heads are 512 CTAs, two to a multiprocessor at a time.
MARKS = 16
MARK = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _more(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _carried(KK, k_factor, beta_ptr, gcum_ptr, base, count, valid, beta, G, HV: gl.constexpr):
    """(k_i k_(i-1)) / (k_i k_i) e^(g_i) beta_(i-1) / beta_i [4 heads, 64 rows], at most 2 (a beta near 0)."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, WIDE))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, WIDE))[None, :]
    L = KK * k_factor.load(gl.SliceLayout(1, WIDE))[:, None] * k_factor.load(gl.SliceLayout(0, WIDE))[None, :]
    own = gl.sum(gl.where(rows == columns, L, 0.0), 1)
    along = gl.sum(gl.where(rows == columns + 1, L, 0.0), 1) / gl.maximum(own, 1e-6)
    along = gl.convert_layout(along, gl.SliceLayout(0, GATE))[None, :]
    heads = gl.arange(0, 4, gl.SliceLayout(1, GATE))
    index = gl.arange(0, 64, gl.SliceLayout(0, GATE))
    live = (heads < count)[:, None] & ((index > 0) & (index < valid))[None, :]
    above = base + (index - 1)[None, :] * HV + heads[:, None]
    beta_above = gl.load(beta_ptr + above, mask=live, other=0.0).to(gl.float32)
    G_above = gl.load(gcum_ptr + above, mask=live, other=0.0)
    ratio = along * exp(gl.minimum(G - G_above, 0.0)) * beta_above / gl.maximum(beta, 1e-6)
    return gl.minimum(gl.maximum(ratio, -2.0), 2.0)


@gluon.jit
def _round_rows(x_ptr, tile, carried, count, valid, HV: gl.constexpr):
    """Row by row of 16 columns: a warp to a head, a column to a lane and its double."""
    heads = gl.arange(0, 4, gl.SliceLayout(1, GATE))[:, None]
    columns = gl.arange(0, 16, gl.SliceLayout(0, GATE))[None, :]
    tile = reinterpret(tile, gl.float32, [256, 4, 16], PLAIN_2D)
    for block in gl.static_range(4):
        at = x_ptr + heads * 64 + (block * 16 + columns)
        error = gl.zeros([4, 16], gl.float32, GATE)
        for row in range(block * 16, valid):
            x = tile.index((row // 16 * 4 + block) * 16 + row % 16).load(GATE)
            x += carried.index(row).load(gl.SliceLayout(1, GATE))[:, None] * error
            rounded = x.to(x_ptr.dtype.element_ty)
            error = x - rounded.to(gl.float32)
            gl.store(at + row * (HV * 64), rounded, mask=(heads < count) & (columns < 16))


@gluon.jit
def _round_chunk(
    k_ptr, beta_ptr, gcum_ptr, k_rstd_ptr, x_ptr, start, valid, qk_head, part, H: gl.constexpr, HV: gl.constexpr
):  # fmt: skip
    GROUP: gl.constexpr = HV // H
    count = gl.minimum(GROUP - part * 4, 4)
    head = qk_head * GROUP + part * 4
    k_tile = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [64, 128], TILE)
    base = start * H + qk_head
    _fetch(k_tile, k_ptr + base * 128, H * 128, valid)
    async_copy.commit_group()
    beta, G, _ = _gates(gcum_ptr, beta_ptr, gcum_ptr, start * HV + head, count, valid, HV, False)
    index = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    k_rstd = gl.load(k_rstd_ptr + base + index * H, mask=index < valid, other=0.0)
    k_factor = gl.allocate_shared_memory(gl.float32, [64], VECTOR, k_rstd)
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    zero = gl.zeros([64, 64], gl.float32, WIDE)
    KK = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    KK = warpgroup_mma_wait(0, deps=[KK])
    k_tile._keep_alive()
    thread_barrier()
    ratio = _carried(KK, k_factor, beta_ptr, gcum_ptr, start * HV + head, count, valid, beta, G, HV)
    carried = gl.allocate_shared_memory(gl.float32, [64, 4], PLAIN_2D, gl.permute(ratio, (1, 0)))
    carried = reinterpret(carried, gl.float32, [64, 4], VECTOR)
    blocks, diagonals, betas, gates = _share(KK, k_factor, G, beta)
    solved = gl.allocate_shared_memory(gl.float32, [4, 4, 16, 16], FP32_HEADS, solve_diagonals(diagonals, betas))
    tile = gl.allocate_shared_memory(gl.float32, [256, 4, 16], PLAIN_3D)
    merge_blocks(tile, solved, blocks, gates, betas, count, valid, HV, True)
    thread_barrier()
    _round_rows(x_ptr + (start * HV + head) * 64, tile, carried, count, valid, HV)
    # The next chunk's are laid out in the same place.
    thread_barrier()


@gluon.jit(do_not_specialize=["documents", "T", "chunks_per_row", "chunks"])
def hopper_rounding_kernel(
    k_ptr, beta_ptr, gcum_ptr, k_rstd_ptr, rows_ptr, x_ptr, cu_ptr, offsets_ptr, documents, T, chunks_per_row, chunks,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, ITEMS: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for ITEMS pairs of a chunk and a q/k head."""
    GROUP: gl.constexpr = HV // H
    if VARLEN:
        chunks = gl.load(offsets_ptr + documents).to(gl.int32)
    first = gl.program_id(0) * ITEMS
    end = gl.minimum(first + ITEMS, chunks * H)
    items = first + gl.arange(0, ITEMS, MARK)
    # The last G of the first value head.
    marks = gl.load(rows_ptr + items.to(gl.int64) * (GROUP * 320) + 319, mask=items < end, other=0.0)
    if gl.reduce(marks.to(gl.int32, bitcast=True) & 1, 0, _more) == 0:
        return
    for item in range(first, end):
        mark = gl.load(rows_ptr + item.to(gl.int64) * (GROUP * 320) + 319).to(gl.int32, bitcast=True)
        if mark & 1 != 0:
            chunk = item // H
            start, valid = _locate(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
            for part in range((GROUP + 3) // 4):
                _round_chunk(k_ptr, beta_ptr, gcum_ptr, k_rstd_ptr, x_ptr, start, valid, item - chunk * H, part, H, HV)
