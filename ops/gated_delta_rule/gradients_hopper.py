"""Chunk-parallel gradients for Hopper in Gluon: what `gradients.gradient_kernel` computes, 16-bit, K = V = 128.

A CTA stays on its multiprocessor and takes one (chunk, q/k head) after the other, the value heads of each in turn. One
warp copies, and locates the rows and loads the factors of q and k for the others: there the search alone took 2,000 of
an item's 34,000 cycles. One warpgroup has dO, q and dq, the other dR, k and dk (`gradient_sides_hopper.py`): both weigh
their score gradients (D = dO delta^T, M = dR delta^T) in registers. These are left operands in shared memory, as they
stand and transposed: kept in registers they would be spilled. Two warps turn dR into dV and sum dg. Accumulators carry
every row factor (qscale of dq, kappa of dk), so that heads, pairs and states add to one, and the derivative of the
l2norm needs no division.

A box of 64 rows may cross the end of a document: rows of q and k past it are cleared, for they are summed over; rows of
dO, dR and delta only reach rows of results that are masked.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .device_hopper import copy_in, thread_barrier
from .gradient_sides_hopper import (
    BARRIERS,
    DH_FULL,
    H_FULL,
    QK_EMPTY,
    QK_FULL,
    ROWS_EMPTY,
    ROWS_FULL,
    STATES_EMPTY,
    finish_heads,
    key_side,
    query_side,
)

# Arrivals over one: of what both sides read or write, and of rows, which the finishing warps read too.
SECOND = gl.constexpr(1 << 2 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 12 | 1 << 13)
THIRD = gl.constexpr(1 << 8 | 1 << 9)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
PAIR = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def locate_rows(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN: gl.constexpr):
    """First row and valid rows of a chunk, as int32; the search of device.locate_chunk."""
    if VARLEN:
        low = chunk * 0
        high = low + documents
        while high - low > 1:
            middle = (low + high) // 2
            if gl.load(offsets_ptr + middle) <= chunk:
                low = middle
            else:
                high = middle
        row = gl.load(cu_ptr + low).to(gl.int32) + (chunk - gl.load(offsets_ptr + low).to(gl.int32)) * 64
        valid = gl.minimum(gl.load(cu_ptr + low + 1).to(gl.int32) - row, 64)
    else:
        batch = chunk // chunks_per_row
        inner = (chunk - batch * chunks_per_row) * 64
        row = batch * T + inner
        valid = gl.minimum(T - inner, 64)
    return row, valid


@gluon.jit
def load_factor(ptr, row, valid, H: gl.constexpr):
    rows = gl.arange(0, 64, PAIR)
    return gl.load(ptr + row * H + rows * H, mask=rows < valid, other=0.0)


@gluon.jit
def feed_gradients(
    do_desc, dr_desc, delta_desc, h_desc, dh_desc, q_desc, k_desc, rows_desc,
    do_tiles, dr_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, rows_tiles, locations, factors, barriers,
    k_rstd_ptr, qscale_ptr, cu_ptr, offsets_ptr, documents, T, chunks_per_row, first, items, programs,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """The copying warp. q and k come last of their chunk's first tiles: they are released and needed last."""
    GROUP: gl.constexpr = HV // H
    lanes = gl.arange(0, 32, LANES)
    step = 0
    next_row, next_valid = locate_rows(first // H, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
    for item in range(first, items, programs):
        turn = (item - first) // programs
        chunk = item // H
        qk_head = item - chunk * H
        row, location = next_row, gl.where(lanes < 16, next_row, next_valid).to(gl.int32)
        qscale = load_factor(qscale_ptr + qk_head, row, next_valid, H)
        k_rstd = load_factor(k_rstd_ptr + qk_head, row, next_valid, H)
        # The next item's, its loads beside this one's waits. Past the last item, in the last document, it is not used.
        next_chunk = (item + programs) // H
        next_row, next_valid = locate_rows(next_chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
        for member in range(GROUP):
            head = qk_head * GROUP + member
            table = chunk * HV + head
            slot = step % 2
            full = barriers.index(ROWS_FULL + slot)
            mbarrier.wait(barriers.index(ROWS_EMPTY + slot), (step // 2 & 1) ^ 1)
            # Every lane has stored before one arrives: location and factors go with the head's rows.
            if member == 0:
                locations.index(slot).store(location)
                factors.index(slot * 2).store(qscale)
                factors.index(slot * 2 + 1).store(k_rstd)
                thread_barrier()
            mbarrier.expect(full, 3 * 64 * 128 * 2 + 5 * 64 * 4)
            copy_in(delta_desc, [chunk * 64 if SPAN else row, head * 128], full, delta_tiles.index(slot))
            copy_in(do_desc, [row, head * 128], full, do_tiles.index(slot))
            copy_in(dr_desc, [row, head * 128], full, dr_tiles.index(slot))
            for part in gl.static_range(5):
                copy_in(rows_desc, [table * 320 + part * 64], full, rows_tiles.index(slot * 5 + part))
            mbarrier.wait(barriers.index(STATES_EMPTY), (step & 1) ^ 1)
            mbarrier.expect(barriers.index(H_FULL), 128 * 128 * 2)
            copy_in(h_desc, [table * 128, 0], barriers.index(H_FULL), h_tile.index(0))
            mbarrier.expect(barriers.index(DH_FULL), 128 * 128 * 2)
            copy_in(dh_desc, [table * 128, 0], barriers.index(DH_FULL), dh_tile.index(0))
            if member == 0:
                mbarrier.wait(barriers.index(QK_EMPTY), (turn & 1) ^ 1)
                mbarrier.expect(barriers.index(QK_FULL), 2 * 64 * 128 * 2)
                copy_in(q_desc, [row, qk_head * 128], barriers.index(QK_FULL), q_tile.index(0))
                copy_in(k_desc, [row, qk_head * 128], barriers.index(QK_FULL), k_tile.index(0))
            step += 1


@gluon.jit(do_not_specialize=["inverse_scale", "documents", "T", "chunks", "chunks_per_row"])
def hopper_gradient_kernel(
    do_desc, dr_desc, delta_desc, h_desc, dh_desc, q_desc, k_desc, rows_desc,
    k_rstd_ptr, qscale_ptr, cu_ptr, offsets_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr,
    inverse_scale, documents, T, chunks, chunks_per_row,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, SPAN: gl.constexpr, L2NORM: gl.constexpr,
    SIDE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """CTAs of 4 + 4 + 2 + 1 warps; `dr_desc` and `dv_ptr` are one tensor: dR on entry, dV on exit.

    SPAN: delta is by chunk, and the first chunk may not be 0.
    """
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    if VARLEN:
        first += gl.load(offsets_ptr).to(gl.int32) * H
        items = gl.load(offsets_ptr + documents).to(gl.int32) * H
    else:
        items = chunks * H
    dtype: gl.constexpr = q_desc.dtype
    delta_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], delta_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], do_desc.layout)
    dr_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], dr_desc.layout)
    h_tile = gl.allocate_shared_memory(dtype, [1, 128, 128], h_desc.layout)
    dh_tile = gl.allocate_shared_memory(dtype, [1, 128, 128], dh_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [1, 64, 128], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 64, 128], k_desc.layout)
    query_pairs = gl.allocate_shared_memory(dtype, [2, 64, 64], q_desc.layout)
    key_pairs = gl.allocate_shared_memory(dtype, [1, 64, 64], q_desc.layout)
    rows_tiles = gl.allocate_shared_memory(gl.float32, [10, 64], rows_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [18, 64], rows_desc.layout)
    locations = gl.allocate_shared_memory(gl.int32, [2, 32], rows_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [4, 64], rows_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(i), count=1 + (SECOND >> i & 1) + (THIRD >> i & 1))
    # The copy engine completes on these barriers: their initial values, ordinary stores, must be visible to it.
    fence_async_shared()
    gl.warp_specialize(
        [
            (query_side, (
                do_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, query_pairs, rows_tiles, vectors, locations,
                factors, barriers, dq_ptr, inverse_scale, first, items, programs, H, HV, L2NORM,
            )),
            (key_side, (
                dr_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, query_pairs, key_pairs, rows_tiles, vectors,
                locations, factors, barriers, dk_ptr, first, items, programs, H, HV, L2NORM,
            )),
            (finish_heads, (
                dr_tiles, rows_tiles, vectors, locations, barriers, dv_ptr, dg_ptr, dbeta_ptr,
                first, items, programs, H, HV,
            )),
            (feed_gradients, (
                do_desc, dr_desc, delta_desc, h_desc, dh_desc, q_desc, k_desc, rows_desc,
                do_tiles, dr_tiles, delta_tiles, h_tile, dh_tile, q_tile, k_tile, rows_tiles, locations, factors,
                barriers, k_rstd_ptr, qscale_ptr, cu_ptr, offsets_ptr,
                documents, T, chunks_per_row, first, items, programs, H, HV, VARLEN, SPAN,
            )),
        ],
        [4, 2, 1],
        [SIDE_REGISTERS, 24, 24],
    )  # fmt: skip
