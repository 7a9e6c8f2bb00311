"""Adjoint walk for Hopper in Gluon, transposed as in forward_hopper: dS^T, dVn^T and dR^T are accumulators.

Six products a chunk, left operands in registers: dO^T P and dS^T K^T, the two 16-bit terms of (beta dVn)^T X, the
decayed dO^T Q and dZ^T K. dO^T P does not wait for the state, and dO^T Q fills the time in which dVn is weighted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    clear_rows,
    copy_in,
    copy_out,
    end_staging,
    locate,
    locate_piece,
    send_rows,
    split_terms,
    start_staging,
    thread_barrier,
)


@gluon.jit
def feed_adjoint(
    do_desc, q_desc, k_desc, rows_desc, p_desc, x_desc,
    do_tiles, q_tiles, k_tiles, x_tiles, p_tiles, rows_tiles, starts,
    state_full, state_empty, output_full, output_empty, start, chunks, first, head, split,
    H: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp, last chunk first. The ring of dO, P, q is needed first and released first."""
    qk_head = head // (HV // H)
    for j in range(chunks):
        i = chunks - 1 - j
        row = start + i * 64
        table = (first + i) * HV + head
        slot = j % OUTPUT_STAGES
        full = output_full.index(slot)
        mbarrier.wait(output_empty.index(slot), (j // OUTPUT_STAGES & 1) ^ 1)
        mbarrier.expect(full, 64 * 128 * 2 + 2 * 64 * 64 * 2 + 64 * 4)
        copy_in(do_desc, [row, head * 128 + split * 64], full, do_tiles.index(slot))
        copy_in(p_desc, [table * 64, 0], full, p_tiles.index(slot))
        copy_in(q_desc, [row, qk_head * 128], full, q_tiles.index(slot))
        copy_in(rows_desc, [table * 320 + 192], full, starts.index(slot))
        slot = j % STAGES
        full = state_full.index(slot)
        mbarrier.wait(state_empty.index(slot), (j // STAGES & 1) ^ 1)
        mbarrier.expect(full, 64 * 128 * 2 + 64 * 64 * 2 + 4 * 64 * 4)
        copy_in(k_desc, [row, qk_head * 128], full, k_tiles.index(slot))
        copy_in(x_desc, [row, head * 64], full, x_tiles.index(slot))
        for part in gl.static_range(3):
            copy_in(rows_desc, [table * 320 + part * 64], full, rows_tiles.index(slot * 4 + part))
        copy_in(rows_desc, [table * 320 + 256], full, rows_tiles.index(slot * 4 + 3))


@gluon.jit
def walk_adjoint(
    do_tiles, q_tiles, k_tiles, x_tiles, p_tiles, rows_tiles, starts, dh_tile, dr_tile,
    state_full, state_empty, output_full, output_empty,
    dht_ptr, dr_ptr, dh0_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr, states_ptr, dh_desc, dr_desc,
    start, length, chunks, first, head, split, index, document, before, after,
    HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr,
    HAS_DHT: gl.constexpr, STORE_DH0: gl.constexpr, SPAN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The computing warpgroup. dR of a chunk is stored while the next chunk's first products run."""
    dtype: gl.constexpr = k_tiles.dtype
    column = head * 128 + split * 64
    vcol = split * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    state = gl.cast(document * HV + head, gl.int64) * 16384
    inside = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :] * 128 + vcol[:, None]
    own = gl.cast(index * HV + head, gl.int64) * 16384
    dS = gl.zeros([64, 128], gl.float32, WIDE)
    if SPAN:
        end = gl.load(end_ptr + document).to(gl.int64)
        if end <= -3:
            dS = gl.load(carried_ptr + ((-3 - end) * HV + head) * 16384 + inside)
        elif HAS_DHT:
            dS = gl.load(dht_ptr + (gl.maximum(end, 0) * HV + head) * 16384 + inside)
    elif HAS_DHT and after == 0:
        dS = gl.load(dht_ptr + state + inside)
    if KIND == 1 and after > 0:
        dS = gl.load(states_ptr + own + inside)
    dR_low = gl.zeros([64, 64], dtype, NARROW)
    for j in range(chunks):
        i = chunks - 1 - j
        row = start + i * 64
        valid = gl.minimum(length - i * 64, 64)
        slot = j % STAGES
        out_slot = j % OUTPUT_STAGES
        k, x = k_tiles.index(slot), x_tiles.index(slot)
        q, p, do = q_tiles.index(out_slot), p_tiles.index(out_slot), do_tiles.index(out_slot)
        mbarrier.wait(output_full.index(out_slot), j // OUTPUT_STAGES & 1)
        if valid < 64:
            clear_rows(do, valid, 64)
            clear_rows(q, valid, 128)
        # Nothing is in flight, but ptxas follows accumulators through one iteration only: without a wait here it would
        # put one before each product that runs beside the rounding and scaling of dS.
        dS = warpgroup_mma_wait(0, deps=[dS])
        zero = gl.zeros([64, 64], gl.float32, NARROW)
        dO = do.permute((1, 0)).load(NARROW)
        PdO = warpgroup_mma(gl.convert_layout(dO, NARROW_LEFT), p, zero, use_acc=False, is_async=True)
        low = dS.to(dtype)
        mbarrier.wait(state_full.index(slot), j // STAGES & 1)
        if valid < 64:
            clear_rows(k, valid, 128)
            clear_rows(x, valid, 64)
        left = gl.convert_layout(low, NARROW_LEFT)
        KdS = warpgroup_mma(left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dS = dS * chunk_decay(rows_tiles.index(slot * 4 + 3))
        decayed = dO.to(gl.float32) * starts.index(out_slot).load(ACROSS)[None, :]
        left = gl.convert_layout(decayed.to(dtype), WIDE_LEFT)
        dS = warpgroup_mma(left, q, dS, is_async=True)
        if KIND != 2:
            start_staging()
            dh_tile.permute((1, 0)).store(low)
            dr_tile.permute((1, 0)).store(dR_low)
            end_staging()
            copy_out(dh_desc, [((first + i) * HV + head) * 128, split * 64], dh_tile)
            if j > 0:
                send_rows(dr_desc, dr_ptr, dr_tile, row + 64, column, gl.minimum(length - i * 64 - 64, 64), HV * 128)
        beta = rows_tiles.index(slot * 4).load(ACROSS)
        k_end = rows_tiles.index(slot * 4 + 2).load(ACROSS)
        PdO, KdS = warpgroup_mma_wait(1, deps=[PdO, KdS])
        dVn = k_end[None, :] * KdS + PdO
        # Two 16-bit terms: rows cancel with equal keys and beta = 1, where one term loses 2e-2 of dR, two 6e-3.
        high, rest = split_terms(beta[None, :] * dVn, dtype)
        dR = warpgroup_mma(gl.convert_layout(high, NARROW_LEFT), x, dVn, is_async=True)
        dR = warpgroup_mma(gl.convert_layout(rest.to(dtype), NARROW_LEFT), x, dR, is_async=True)
        factor = -(beta * rows_tiles.index(slot * 4 + 1).load(ACROSS))
        # Puts the ordinary reads of dO and the row factors before the copies that overwrite them once released.
        fence_async_shared()
        dS, dR = warpgroup_mma_wait(0, deps=[dS, dR])
        # One thread arrives for all: the barrier before it waits until every warp's products have read the tiles.
        thread_barrier()
        mbarrier.arrive(output_empty.index(out_slot), count=1)
        left = gl.convert_layout((factor[None, :] * dR).to(dtype), WIDE_LEFT)
        dS = warpgroup_mma(left, k, dS, is_async=True)
        dR_low = dR.to(dtype)
        dS = warpgroup_mma_wait(0, deps=[dS])
        thread_barrier()
        mbarrier.arrive(state_empty.index(slot), count=1)
    if KIND != 2 and chunks > 0:
        start_staging()
        dr_tile.permute((1, 0)).store(dR_low)
        end_staging()
        send_rows(dr_desc, dr_ptr, dr_tile, start, column, gl.minimum(length, 64), HV * 128)
        # Shared memory must outlive the copies out of it.
        tma.store_wait(0)
    if SPAN:
        target = gl.load(target_ptr + document).to(gl.int64)
        if target == -1:
            gl.store(carry_ptr + head * 16384 + inside, dS)
        if STORE_DH0:  # noqa: SIM102 (a constexpr guards a store)
            if target >= 0:
                gl.store(dh0_ptr + (target * HV + head) * 16384 + inside, dS)
    elif KIND == 2 and before > 0:
        gl.store(states_ptr + (own - HV * 16384) + inside, dS)
    elif STORE_DH0 and before == 0:
        gl.store(dh0_ptr + state + inside, dS)


@gluon.jit(do_not_specialize=["T", "chunks_per_row"])
def hopper_adjoint_kernel(
    do_desc, q_desc, k_desc, rows_desc, p_desc, x_desc, dh_desc, dr_desc,
    dht_ptr, dr_ptr, dh0_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr, cu_ptr, offsets_ptr, table_ptr,
    windows_ptr, states_ptr, T, chunks_per_row,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, HAS_DHT: gl.constexpr, STORE_DH0: gl.constexpr,
    SPAN: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 1 warps per (document or piece, value head, 64 columns); outputs as scan.adjoint_kernel."""
    pid = gl.program_id(0)
    split = pid % 2
    head = pid // 2 % HV
    index = pid // (2 * HV)
    if KIND == 0:
        start, length, first = locate(index, cu_ptr, offsets_ptr, T, chunks_per_row, VARLEN)
        document = index
        before: gl.constexpr = 0
        after: gl.constexpr = 0
    else:
        start, length, first, document, before, after = locate_piece(index, table_ptr)
    if KIND == 2:
        # The adjoint behind a window is nothing to the one at its start.
        window = gl.load(windows_ptr + (index * HV + head) * 2 + 1)
        length = gl.where(window < 0, length, gl.minimum(length, window * 64))
        length = gl.where(before > 0, length, 0)
        after = gl.where(window < 0, after, 1)
    chunks = (length + 63) // 64
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], k_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], x_desc.layout)
    rows_tiles = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 64], rows_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [OUTPUT_STAGES, 64, 128], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [OUTPUT_STAGES, 64, 64], do_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [OUTPUT_STAGES, 64, 64], p_desc.layout)
    starts = gl.allocate_shared_memory(gl.float32, [OUTPUT_STAGES, 64], rows_desc.layout)
    # What a summary does not use stays a second name of a tile in use.
    dh_tile = k_tiles
    dr_tile = k_tiles
    if KIND != 2:
        dh_tile = gl.allocate_shared_memory(dtype, [128, 64], dh_desc.layout)
        dr_tile = gl.allocate_shared_memory(dtype, [64, 64], dr_desc.layout)
    state_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    state_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    output_full = gl.allocate_shared_memory(gl.int64, [OUTPUT_STAGES, 1], mbarrier.MBarrierLayout())
    output_empty = gl.allocate_shared_memory(gl.int64, [OUTPUT_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(state_full.index(slot), count=1)
        mbarrier.init(state_empty.index(slot), count=1)
    for slot in gl.static_range(OUTPUT_STAGES):
        mbarrier.init(output_full.index(slot), count=1)
        mbarrier.init(output_empty.index(slot), count=1)
    # The copy engine completes on these barriers: their initial values, ordinary stores, must be visible to it.
    fence_async_shared()
    gl.warp_specialize(
        [
            (walk_adjoint, (
                do_tiles, q_tiles, k_tiles, x_tiles, p_tiles, rows_tiles, starts, dh_tile, dr_tile,
                state_full, state_empty, output_full, output_empty,
                dht_ptr, dr_ptr, dh0_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr, states_ptr, dh_desc, dr_desc,
                start, length, chunks, first, head, split, index, document, before, after,
                HV, STAGES, OUTPUT_STAGES, HAS_DHT, STORE_DH0, SPAN, KIND,
            )),
            (feed_adjoint, (
                do_desc, q_desc, k_desc, rows_desc, p_desc, x_desc, do_tiles, q_tiles, k_tiles, x_tiles, p_tiles,
                rows_tiles, starts, state_full, state_empty, output_full, output_empty,
                start, chunks, first, head, split, H, HV, STAGES, OUTPUT_STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
