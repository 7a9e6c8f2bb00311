"""The computing warps of the Hopper gradient kernel: dq's side (dO, q), dk's side (dR, k, dh), two that finish heads.

Sides meet in three places. D and the diagonal go from dq's side to dk's, both sides' shares of dG to the finishing
warps, through two slots of shared memory. The rows of q and k past a document are cleared by dq's side, which then says
so. Tiles that several read are released by all of them, h and dh as early as registers allow: they have one stage, and
the next 64 KB take 2 us, most of what is left of a head.

dk's side weighs M while h is still on its way and never has two 64 x 128 results beside the sum and what weighs scores:
accumulators are spilled then, or the assembler runs products one by one.

Every arrival is one thread's, behind a barrier of its warpgroup: by then every warp has waited for its products, and
the fence before it puts ordinary reads of a tile before the copy that overwrites it, and shows ordinary stores to the
tensor cores, which read shared memory through the asynchronous proxy.

`none = step >> 30` is 0, which the compiler does not know: the addresses of tiles with one stage are computed where
they are used. Kept in registers over the loop they were spilled, and beside 224 KB of tiles spills miss the L1 cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .device_hopper import ACROSS, NARROW, WIDE, clear_rows, thread_barrier

DOWN = gl.constexpr(gl.SliceLayout(1, NARROW))
WIDE_DOWN = gl.constexpr(gl.SliceLayout(1, WIDE))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [2], [0]))  # both warps hold all 64
PIECE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))
# Barriers, by index. Two stages where a slot is added; both sides release what both read.
QK_FULL = gl.constexpr(0)
QK_CLEARED = gl.constexpr(1)
QK_EMPTY = gl.constexpr(2)
H_FULL = gl.constexpr(3)
DH_FULL = gl.constexpr(4)
STATES_EMPTY = gl.constexpr(5)
ROWS_FULL = gl.constexpr(6)
ROWS_EMPTY = gl.constexpr(8)
PAIRS_FULL = gl.constexpr(10)
SHARES_FULL = gl.constexpr(12)
BARRIERS = gl.constexpr(14)
# Vectors in shared memory: four of each side in two slots, then both sides' k_rstd.
VECTORS = gl.constexpr(16)


@gluon.jit
def located(locations, barriers, step, LAYOUT: gl.constexpr):
    """First row and valid rows of the item whose first head is this one, put down by the copying warp.

    They and the item's factors are part of that head's rows: written before the arrival that this waits for, which
    releases them as the wait acquires them (ordinary stores and loads, one proxy: no fence), read before the slot is
    released.
    """
    slot = step % 2
    mbarrier.wait(barriers.index(ROWS_FULL + slot), step // 2 & 1)
    location = locations.index(slot)
    return gl.sum(location.slice(0, 1).load(LAYOUT), 0), gl.sum(location.slice(16, 1).load(LAYOUT), 0)


@gluon.jit
def here(index):
    """The index, not computed ahead of the loop: comparisons with it would fill registers all the way."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def power(x):
    """e^x, 0 below 2^-126: without the three instructions that gl.exp spends on what is less."""
    x = x * 1.4426950408889634
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def weigh(scores, G_tile, row_factor, column_factor, valid):
    """Score gradients strictly below the diagonal, decayed, all factors in.

    The selection drops what overflows above the diagonal and what rows past the document hold. The diagonal's shares
    in dG cancel exactly: they are left out.
    """
    rows = here(gl.arange(0, 64, DOWN))[:, None]
    low = (rows > gl.arange(0, 64, ACROSS)[None, :]) & (rows < valid)
    difference = G_tile.load(DOWN)[:, None] - G_tile.load(ACROSS)[None, :]
    return gl.where(low, scores * (power(difference) * column_factor[None, :]) * row_factor[:, None], 0.0)


@gluon.jit
def diagonal_of(scores, valid):
    rows = here(gl.arange(0, 64, DOWN))
    same = rows[:, None] == gl.arange(0, 64, ACROSS)[None, :]
    return gl.where(rows < valid, gl.sum(gl.where(same, scores, 0.0), 1), 0.0)


@gluon.jit
def store_gradient(
    out_ptr, total, tile, other, shares, norm, released, row, valid, STRIDE: gl.constexpr, L2NORM: gl.constexpr
):
    """Adds the diagonal, applies d/dx of x (sum x^2 + 1e-6)^-1/2 and stores the valid rows.

    q and k are released as soon as they are in registers: the next ones are loaded beside the rest.
    """
    rows = gl.arange(0, 64, WIDE_DOWN)
    total += gl.convert_layout(shares, WIDE_DOWN)[:, None] * other.load(WIDE).to(gl.float32)
    normed = tile.load(WIDE)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(released, count=1)
    if L2NORM:
        normed = normed.to(gl.float32) * gl.convert_layout(norm, WIDE_DOWN)[:, None]
        total -= gl.sum(total * normed, 1)[:, None] * normed
    out = out_ptr + rows[:, None] * STRIDE + gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :]
    inside = (rows < valid)[:, None] & (gl.arange(0, 128, gl.SliceLayout(0, WIDE)) < 128)[None, :]
    gl.store(out, total.to(tile.dtype), mask=inside)


@gluon.jit
def query_side(
    do_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, pair_tiles, rows_tiles, vectors, locations,
    factors, barriers, dq_ptr,
    inverse_scale, first, items, programs, H: gl.constexpr, HV: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """dq = gamma dO h^T + D K over the heads; D, its shares of dG, <h, dh> and the diagonal for dk's side."""
    GROUP: gl.constexpr = HV // H
    dtype: gl.constexpr = q_tile.dtype
    step = 0
    for item in range(first, items, programs):
        turn = (item - first) // programs
        chunk = item // H
        qk_head = item - chunk * H
        row, valid = located(locations, barriers, step, DOWN)
        if valid < 64:
            mbarrier.wait(barriers.index(QK_FULL), turn & 1)
            clear_rows(q_tile.index(0), valid, 128)
            clear_rows(k_tile.index(0), valid, 128)
            mbarrier.arrive(barriers.index(QK_CLEARED), count=1)
        qscale = factors.index(step % 2 * 2).load(DOWN)
        k_rstd = factors.index(step % 2 * 2 + 1).load(DOWN)
        vectors.index(VECTORS).store(k_rstd)
        total = gl.zeros([64, 128], gl.float32, WIDE)
        same = gl.zeros([64], gl.float32, DOWN)
        for _ in range(GROUP):
            slot = step % 2
            none = step >> 30
            q, k, h, dh = q_tile.index(none), k_tile.index(none), h_tile.index(none), dh_tile.index(none)
            do, delta, table = do_tiles.index(slot), delta_tiles.index(slot), slot * 5
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.wait(barriers.index(ROWS_FULL + slot), step // 2 & 1)
            mbarrier.wait(barriers.index(H_FULL), step & 1)
            wide = gl.zeros([64, 128], gl.float32, WIDE)
            part = warpgroup_mma(do, h.permute((1, 0)), wide, use_acc=False, is_async=True)
            # <h, dh> is the trace of h dh^T, both halves of its diagonal on one.
            mbarrier.wait(barriers.index(DH_FULL), step & 1)
            zero = gl.zeros([64, 64], gl.float32, NARROW)
            right = dh.slice(0, 64, dim=0).permute((1, 0))
            trace = warpgroup_mma(h.slice(0, 64, dim=0), right, zero, use_acc=False, is_async=True)
            right = dh.slice(64, 64, dim=0).permute((1, 0))
            trace = warpgroup_mma(h.slice(64, 64, dim=0), right, trace, is_async=True)
            part, trace = warpgroup_mma_wait(0, deps=[part, trace])
            thread_barrier()
            mbarrier.arrive(barriers.index(STATES_EMPTY), count=1)
            scores = warpgroup_mma(do, delta.permute((1, 0)), zero, use_acc=False, is_async=True)
            vectors.index(slot * 4 + 3).store(diagonal_of(trace, 64))
            mbarrier.wait(barriers.index(QK_FULL), turn & 1)
            start = rows_tiles.index(table + 3).load(WIDE_DOWN)
            dots = gl.convert_layout(gl.sum(part * q.load(WIDE).to(gl.float32), 1) * start, DOWN)
            total += part * start[:, None]
            factor = rows_tiles.index(table).load(ACROSS) * vectors.index(VECTORS).load(ACROSS)
            scores = warpgroup_mma_wait(0, deps=[scores])
            diagonal = rows_tiles.index(table).load(DOWN) * diagonal_of(scores, valid)
            same += diagonal
            low = weigh(scores, rows_tiles.index(table + 4), qscale, factor, valid).to(dtype)
            # Free since dk's side, done with both two heads ago, released the rows before these.
            pair_tiles.index(slot).store(low)
            vectors.index(slot * 4 + 2).store(diagonal)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(barriers.index(PAIRS_FULL + slot), count=1)
            products = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            total = warpgroup_mma(pair_tiles.index(slot), k, total, is_async=True)
            products = warpgroup_mma_wait(1, deps=[products])
            pairs = pair_tiles.index(slot).load(NARROW).to(gl.float32) * products
            vectors.index(slot * 4).store(dots + gl.sum(pairs, 1))
            vectors.index(slot * 4 + 1).store(gl.sum(pairs, 0))
            total = warpgroup_mma_wait(0, deps=[total])
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(barriers.index(SHARES_FULL + slot), count=1)
            mbarrier.arrive(barriers.index(ROWS_EMPTY + slot), count=1)
            step += 1
        out = dq_ptr + (gl.cast(row, gl.int64) * H + qk_head) * 128
        shares = same * k_rstd * qscale
        store_gradient(
            out,
            total,
            q_tile.index(0),
            k_tile.index(0),
            shares,
            qscale * inverse_scale,
            barriers.index(QK_EMPTY),
            row,
            valid,
            H * 128,
            L2NORM,
        )


@gluon.jit
def key_side(
    dr_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, pair_tiles, own_tile, rows_tiles, vectors, locations,
    factors, barriers, dk_ptr,
    first, items, programs, H: gl.constexpr, HV: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """dk = M K - gamma beta dR h^T + M^T K + D^T Q + decayed beta delta dh^T over the heads; shares of dG, dbeta."""
    GROUP: gl.constexpr = HV // H
    dtype: gl.constexpr = k_tile.dtype
    step = 0
    partial = 0
    for item in range(first, items, programs):
        turn = (item - first) // programs
        chunk = item // H
        qk_head = item - chunk * H
        row, valid = located(locations, barriers, step, DOWN)
        if valid < 64:
            # Once for each partial chunk. The next one is cleared only after this side has released q and k.
            mbarrier.wait(barriers.index(QK_CLEARED), partial & 1)
            partial += 1
        qscale = factors.index(step % 2 * 2).load(DOWN)
        k_rstd = factors.index(step % 2 * 2 + 1).load(DOWN)
        vectors.index(VECTORS + 1).store(k_rstd)
        total = gl.zeros([64, 128], gl.float32, WIDE)
        same = gl.zeros([64], gl.float32, DOWN)
        for _ in range(GROUP):
            slot = step % 2
            none = step >> 30
            q, k, h, dh = q_tile.index(none), k_tile.index(none), h_tile.index(none), dh_tile.index(none)
            own = own_tile.index(none)
            dr, delta, table = dr_tiles.index(slot), delta_tiles.index(slot), slot * 5
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.wait(barriers.index(ROWS_FULL + slot), step // 2 & 1)
            zero = gl.zeros([64, 64], gl.float32, NARROW)
            scores = warpgroup_mma(dr, delta.permute((1, 0)), zero, use_acc=False, is_async=True)
            factor = rows_tiles.index(table).load(ACROSS) * vectors.index(VECTORS + 1).load(ACROSS)
            down = -rows_tiles.index(table).load(DOWN) * k_rstd
            scores = warpgroup_mma_wait(0, deps=[scores])
            vectors.index(slot * 4 + 11).store(diagonal_of(scores, valid))
            low = weigh(scores, rows_tiles.index(table + 4), down, factor, valid).to(dtype)
            # Only now: with 64 more registers in flight, what weighs the scores would be spilled.
            mbarrier.wait(barriers.index(H_FULL), step & 1)
            wide = gl.zeros([64, 128], gl.float32, WIDE)
            part = warpgroup_mma(dr, h.permute((1, 0)), wide, use_acc=False, is_async=True)
            # All products that read the tile before were waited for ahead of the last barrier.
            own.store(low)
            fence_async_shared()
            thread_barrier()
            mbarrier.wait(barriers.index(QK_FULL), turn & 1)
            part = warpgroup_mma_wait(0, deps=[part])
            beta = rows_tiles.index(table).load(WIDE_DOWN)
            start = -(beta * rows_tiles.index(table + 1).load(WIDE_DOWN))
            dots = gl.convert_layout(gl.sum(part * k.load(WIDE).to(gl.float32), 1) * start, DOWN)
            total += part * start[:, None]
            mbarrier.wait(barriers.index(DH_FULL), step & 1)
            states = warpgroup_mma(delta, dh.permute((1, 0)), wide, use_acc=False, is_async=True)
            total = warpgroup_mma(own, k, total, is_async=True)
            total = warpgroup_mma(own.permute((1, 0)), k, total, is_async=True)
            products = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            states = warpgroup_mma_wait(3, deps=[states])
            thread_barrier()
            mbarrier.arrive(barriers.index(STATES_EMPTY), count=1)
            end = rows_tiles.index(table).load(WIDE_DOWN) * rows_tiles.index(table + 2).load(WIDE_DOWN)
            through = gl.convert_layout(gl.sum(states * k.load(WIDE).to(gl.float32), 1) * end, DOWN)
            # The last row's share enters dG twice, with opposite signs: left out, or it would drown a decayed one.
            vectors.index(slot * 4 + 10).store(gl.where(here(gl.arange(0, 64, DOWN)) < valid - 1, through, 0.0))
            mbarrier.wait(barriers.index(PAIRS_FULL + slot), step // 2 & 1)
            total = warpgroup_mma(pair_tiles.index(slot).permute((1, 0)), q, total, is_async=True)
            products = warpgroup_mma_wait(1, deps=[products])
            # Each pair adds to dG at r what it takes away at i: one fp32 tile for both, so they cancel to fp32.
            pairs = own.load(NARROW).to(gl.float32) * products
            vectors.index(slot * 4 + 8).store(dots + gl.sum(pairs, 1))
            vectors.index(slot * 4 + 9).store(gl.sum(pairs, 0))
            same += vectors.index(slot * 4 + 2).load(DOWN)
            total = warpgroup_mma_wait(0, deps=[total])
            total += states * end[:, None]
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(barriers.index(SHARES_FULL + slot), count=1)
            mbarrier.arrive(barriers.index(ROWS_EMPTY + slot), count=1)
            step += 1
        shares = same * k_rstd * qscale
        out = dk_ptr + (gl.cast(row, gl.int64) * H + qk_head) * 128
        store_gradient(
            out, total, k_tile.index(0), q_tile.index(0), shares, k_rstd, barriers.index(QK_EMPTY),
            row, valid, H * 128, L2NORM,
        )  # fmt: skip


@gluon.jit
def finish_heads(
    dr_tiles, rows_tiles, vectors, locations, barriers, dv_ptr, dg_ptr, dbeta_ptr,
    first, items, programs, H: gl.constexpr, HV: gl.constexpr,
):  # fmt: skip
    """Two warps: dV = beta dR; dg from the sides' shares; dbeta. Latencies that no product waits for."""
    GROUP: gl.constexpr = HV // H
    line = gl.arange(0, 64, LINE)
    pieces = gl.arange(0, 16, gl.SliceLayout(1, PIECE))
    columns = gl.arange(0, 64, gl.SliceLayout(0, PIECE))
    step = 0
    for item in range(first, items, programs):
        chunk = item // H
        row, valid = located(locations, barriers, step, LINE)
        for member in range(GROUP):
            slot = step % 2
            table = slot * 5
            head = gl.cast(row, gl.int64) * HV + (item - chunk * H) * GROUP + member
            mbarrier.wait(barriers.index(ROWS_FULL + slot), step // 2 & 1)
            for part in gl.static_range(4):
                beta = rows_tiles.index(table).slice(part * 16, 16).load(gl.SliceLayout(1, PIECE))[:, None]
                inside = (pieces < valid - part * 16)[:, None] & (columns < 64)[None, :]
                out = dv_ptr + (head + part * 16 * HV) * 128 + pieces[:, None] * (HV * 128) + columns[None, :]
                for half in gl.static_range(2):
                    tile = dr_tiles.index(slot).slice(part * 16, 16, dim=0).slice(half * 64, 64, dim=1)
                    value = tile.load(PIECE).to(gl.float32) * beta
                    gl.store(out + half * 64, value.to(dv_ptr.dtype.element_ty), mask=inside)
            mbarrier.wait(barriers.index(SHARES_FULL + slot), step // 2 & 1)
            shares = slot * 4
            dG = vectors.index(shares).load(LINE) - vectors.index(shares + 1).load(LINE)
            dG += vectors.index(shares + 8).load(LINE) - vectors.index(shares + 9).load(LINE)
            through = vectors.index(shares + 10).load(LINE)
            dG = gl.where(line < valid, dG, 0.0) - through
            # <S, dS> at the chunk's end, which is dG of its last row.
            at_end = gl.sum(vectors.index(shares + 3).load(LINE), 0)
            at_end = at_end * power(rows_tiles.index(table + 4).slice(63, 1).load(LINE)) + gl.sum(through, 0)
            dbeta = vectors.index(shares + 11).load(LINE)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(barriers.index(ROWS_EMPTY + slot), count=1)
            dg = gl.associative_scan(dG, 0, add, reverse=True) + at_end
            gl.store(dg_ptr + head + line * HV, dg, mask=line < valid)
            gl.store(dbeta_ptr + head + line * HV, dbeta.to(dbeta_ptr.dtype.element_ty), mask=line < valid)
            step += 1
