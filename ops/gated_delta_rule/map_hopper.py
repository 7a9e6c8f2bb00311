"""The map M of pieces for Hopper in Gluon, transposed as in forward_hopper: M^T [64 columns, K] in fp32 accumulators.

A chunk of `kcp/map_kernel.py`: E = -gamma (K M), delta = E + X (beta E), M <- gamma_C M + K^T ((gamma_C / gamma) beta
delta). Each left operand is TERMS 16-bit terms of an accumulator, in registers; k, x and the row factors come as for a
walk. Only pieces in the middle of a document have a map, so every chunk is whole; with a window none is needed.
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

from .device_hopper import (
    ACROSS,
    NARROW,
    NARROW_LEFT,
    WIDE,
    WIDE_LEFT,
    chunk_decay,
    copy_in,
    locate_piece,
    thread_barrier,
)


@gluon.jit
def feed_map(
    k_desc, rows_desc, x_desc, k_tiles, x_tiles, rows_tiles, full, empty, start, chunks, first, head,
    H: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: a tile is refilled as soon as the walk has released it."""
    for i in range(chunks):
        row = start + i * 64
        table = (first + i) * HV + head
        slot = i % STAGES
        filled = full.index(slot)
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(filled, 64 * 128 * 2 + 64 * 64 * 2 + 4 * 64 * 4)
        copy_in(k_desc, [row, head // (HV // H) * 128], filled, k_tiles.index(slot))
        copy_in(x_desc, [row, head * 64], filled, x_tiles.index(slot))
        for part in gl.static_range(3):
            copy_in(rows_desc, [table * 320 + part * 64], filled, rows_tiles.index(slot * 4 + part))
        copy_in(rows_desc, [table * 320 + 256], filled, rows_tiles.index(slot * 4 + 3))


@gluon.jit
def terms(value, dtype: gl.constexpr, LEFT: gl.constexpr):
    """Three terms of `dtype`, as left operands, that add up to value."""
    high = value.to(dtype)
    rest = value - high.to(gl.float32)
    middle = rest.to(dtype)
    low = (rest - middle.to(gl.float32)).to(dtype)
    return gl.convert_layout(high, LEFT), gl.convert_layout(middle, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def product(high, middle, low, right, sums, TERMS: gl.constexpr):
    """sums + (high + middle + low) right."""
    if TERMS == 3:
        sums = warpgroup_mma(low, right, sums, is_async=True)
    sums = warpgroup_mma(middle, right, sums, is_async=True)
    return warpgroup_mma(high, right, sums, is_async=True)


@gluon.jit
def walk_map(
    k_tiles, x_tiles, rows_tiles, full, empty, maps_ptr, chunks, STAGES: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """The computing warpgroup."""
    dtype: gl.constexpr = k_tiles.dtype
    pid = gl.program_id(0)
    column = pid % 2 * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    row = gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    one = gl.zeros([64, 128], gl.float32, WIDE)
    M = gl.where(column[:, None] == row[None, :], one + 1.0, one)
    for i in range(chunks):
        slot = i % STAGES
        k, x = k_tiles.index(slot), x_tiles.index(slot)
        # See walk_adjoint: nothing is in flight, but without this wait ptxas would put one before each product.
        M = warpgroup_mma_wait(0, deps=[M])
        high, middle, low = terms(M, dtype, NARROW_LEFT)
        zero = gl.zeros([64, 64], gl.float32, NARROW)
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        KM = product(high, middle, low, k.permute((1, 0)), zero, TERMS)
        beta = rows_tiles.index(slot * 4).load(ACROSS)
        k_start = rows_tiles.index(slot * 4 + 1).load(ACROSS)
        to_end = beta * rows_tiles.index(slot * 4 + 2).load(ACROSS)
        decay = chunk_decay(rows_tiles.index(slot * 4 + 3))
        KM = warpgroup_mma_wait(0, deps=[KM])
        E = -k_start[None, :] * KM
        high, middle, low = terms(beta[None, :] * E, dtype, NARROW_LEFT)
        delta = product(high, middle, low, x.permute((1, 0)), E, TERMS)
        M = M * decay
        # Puts the ordinary reads of the row factors before the copies that overwrite them once released.
        fence_async_shared()
        delta = warpgroup_mma_wait(0, deps=[delta])
        high, middle, low = terms(to_end[None, :] * delta, dtype, WIDE_LEFT)
        M = product(high, middle, low, k, M, TERMS)
        M = warpgroup_mma_wait(0, deps=[M])
        # One thread arrives for all: the barrier before it waits until every warp's products have read the tiles.
        thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    if chunks > 0:
        at = gl.cast(pid // 2, gl.int64) * 16384
        gl.store(maps_ptr + at + row[None, :] * 128 + column[:, None], M)


@gluon.jit
def hopper_map_kernel(
    k_desc, rows_desc, x_desc, table_ptr, windows_ptr, maps_ptr,
    H: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 1 warps per (piece, value head, block of 64 columns); no map for the end pieces of a document,
    nor for a piece with a window."""
    pid = gl.program_id(0)
    head = pid // 2 % HV
    index = pid // (2 * HV)
    start, length, first, _, before, after = locate_piece(index, table_ptr)
    whole = gl.load(windows_ptr + (index * HV + head) * 2) < 0
    chunks = gl.where((before > 0) & (after > 0) & whole, length // 64, 0)
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], k_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], x_desc.layout)
    rows_tiles = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 64], rows_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # The copy engine completes on these barriers: their initial values, ordinary stores, must be visible to it.
    fence_async_shared()
    gl.warp_specialize(
        [
            (walk_map, (
                k_tiles, x_tiles, rows_tiles, full, empty, maps_ptr, chunks, STAGES, TERMS,
            )),
            (feed_map, (
                k_desc, rows_desc, x_desc, k_tiles, x_tiles, rows_tiles, full, empty, start, chunks, first, head,
                H, HV, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
