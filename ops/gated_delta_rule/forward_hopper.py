"""Forward walk for Hopper in Gluon: 16-bit operands, K = V = 128, blocks of 64 columns of V.

Everything is transposed: the state is S^T [64 of V, K] in fp32 accumulators; E^T, delta^T, O^T are [64 of V, 64 rows].
A 16-bit accumulator tile has the registers of a left operand, so each of the five products takes its left operand
from registers and its right one from a tile the copy engine has brought: nothing computed passes through shared memory,
and the chain from one state to the next holds no barrier of the threads. One warp feeds two rings of tiles (k, v, x and
the row factors of the state; q, p and theirs), one warpgroup computes.

A box of 64 rows may cross the end of a document. The last chunk then clears those rows in shared memory, because
0 x NaN is NaN; only a whole chunk is stored by the copy engine, the rows of a last one by masked stores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
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
    round_twice,
    send_rows,
    split_terms,
    start_staging,
    thread_barrier,
)


@gluon.jit
def feed(
    q_desc, k_desc, v_desc, rows_desc, p_desc, x_desc, q_tiles, k_tiles, v_tiles, x_tiles, p_tiles, rows_tiles, starts,
    state_full, state_empty, output_full, output_empty, start, chunks, first, head, split,
    H: gl.constexpr, HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The copying warp: a tile is refilled as soon as the walk has released it."""
    qk_head = head // (HV // H)
    for i in range(chunks):
        row = start + i * 64
        table = (first + i) * HV + head
        slot = i % STAGES
        full = state_full.index(slot)
        mbarrier.wait(state_empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full, 64 * 128 * 2 + 2 * 64 * 64 * 2 + 4 * 64 * 4)
        copy_in(k_desc, [row, qk_head * 128], full, k_tiles.index(slot))
        copy_in(v_desc, [row, head * 128 + split * 64], full, v_tiles.index(slot))
        copy_in(x_desc, [row, head * 64], full, x_tiles.index(slot))
        for part in gl.static_range(3):
            copy_in(rows_desc, [table * 320 + part * 64], full, rows_tiles.index(slot * 4 + part))
        copy_in(rows_desc, [table * 320 + 256], full, rows_tiles.index(slot * 4 + 3))
        if OUTPUT:
            slot = i % OUTPUT_STAGES
            full = output_full.index(slot)
            mbarrier.wait(output_empty.index(slot), (i // OUTPUT_STAGES & 1) ^ 1)
            mbarrier.expect(full, 64 * 128 * 2 + 64 * 64 * 2 + 64 * 4)
            copy_in(q_desc, [row, qk_head * 128], full, q_tiles.index(slot))
            copy_in(p_desc, [table * 64, 0], full, p_tiles.index(slot))
            copy_in(rows_desc, [table * 320 + 192], full, starts.index(slot))


@gluon.jit
def alike(row):
    """What the operand kernel left in the lowest bit of the last G: the keys of the chunk point one way."""
    last = row.slice(63, 1).load(gl.SliceLayout(0, WIDE))
    return (gl.max(gl.cast(last, gl.int32, bitcast=True), axis=0) & 1) != 0


@gluon.jit
def start_state(
    h0_ptr, starts_ptr, source_ptr, states_ptr, state, own, inside, turned, document, head, before,
    HV: gl.constexpr, HAS_H0: gl.constexpr, SPAN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    S = gl.zeros([64, 128], gl.float32, WIDE)
    if SPAN:
        source = gl.load(source_ptr + document).to(gl.int64)
        if source >= 0:
            S = gl.load(starts_ptr + (source * HV + head) * 16384 + turned)
        elif HAS_H0:
            S = gl.load(h0_ptr + ((-1 - source) * HV + head) * 16384 + inside)
    elif HAS_H0 and before == 0:
        S = gl.load(h0_ptr + state + inside)
    if KIND == 1 and before > 0:
        S = gl.load(states_ptr + own + inside)
    return S


@gluon.jit
def keep_start(starts_ptr, S, turned, start, chunk, head, HV: gl.constexpr, LEG: gl.constexpr):
    """The state in front of a leg."""
    kept = gl.cast(start // (64 * LEG) - 1 + chunk // LEG, gl.int64)
    gl.store(starts_ptr + (kept * HV + head) * 16384 + turned, S)


@gluon.jit
def store_state(
    ht_ptr, starts_ptr, end_ptr, states_ptr, S, state, own, inside, turned, start, chunks, document, head, after,
    HV: gl.constexpr, STORE_HT: gl.constexpr, SPAN: gl.constexpr, LEG: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The last state, where it is wanted."""
    if KIND == 2 and after > 0:
        gl.store(states_ptr + own + HV * 16384 + inside, S)
    elif STORE_HT and after == 0:
        gl.store(ht_ptr + state + inside, S)
    if SPAN and LEG:  # noqa: SIM102 (a constexpr guards a load)
        if gl.load(end_ptr + document) == -3:
            keep_start(starts_ptr, S, turned, start, chunks, head, HV, LEG)


@gluon.jit
def send_last(
    o_desc, o_ptr, o_tile, O_low, delta_desc, delta_ptr, delta_tile, delta_low,
    start, length, chunks, first, column,
    HV: gl.constexpr, OUTPUT: gl.constexpr, STORE_H: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """O and delta of the last chunk."""
    row = start + (chunks - 1) * 64
    valid = length - (chunks - 1) * 64
    start_staging()
    if OUTPUT:
        o_tile.permute((1, 0)).store(O_low)
    if STORE_H:
        delta_tile.permute((1, 0)).store(delta_low)
    end_staging()
    if OUTPUT:
        send_rows(o_desc, o_ptr, o_tile, row, column, valid, HV * 128)
    if STORE_H:
        at = (first + chunks - 1) * 64 if SPAN else row
        send_rows(delta_desc, delta_ptr, delta_tile, at, column, valid, HV * 128)
    # Shared memory must outlive the copies out of it.
    tma.store_wait(0)


@gluon.jit
def walk(
    q_tiles, k_tiles, v_tiles, x_tiles, p_tiles, rows_tiles, starts, h_tile, delta_tile, o_tile,
    state_full, state_empty, output_full, output_empty,
    h0_ptr, ht_ptr, o_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, states_ptr, o_desc, h_desc, delta_desc,
    start, length, chunks, first, head, split, index, document, before, after,
    HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr,
    STORE_H: gl.constexpr, OUTPUT: gl.constexpr, SPAN: gl.constexpr, LEG: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The computing warpgroup. O and delta of a chunk are stored while the next chunk's first products run."""
    dtype: gl.constexpr = k_tiles.dtype
    column = head * 128 + split * 64
    vcol = split * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    state = gl.cast(document * HV + head, gl.int64) * 16384
    inside = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :] * 128 + vcol[:, None]
    # Start states are kept as they lie, [V, K]: pairs at immediate offsets; `inside` would cost the loop 28 registers.
    turned = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :] + vcol[:, None] * 128
    own = gl.cast(index * HV + head, gl.int64) * 16384
    S = start_state(
        h0_ptr, starts_ptr, source_ptr, states_ptr, state, own, inside, turned, document, head, before,
        HV, HAS_H0, SPAN, KIND,
    )  # fmt: skip
    if OUTPUT:
        O = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, NARROW))
        S_low = S.to(dtype)
    O_low = gl.zeros([64, 64], dtype, NARROW)
    delta_low = gl.zeros([64, 64], dtype, NARROW)
    for i in range(chunks):
        row = start + i * 64
        valid = gl.minimum(length - i * 64, 64)
        slot = i % STAGES
        k, v, x = k_tiles.index(slot), v_tiles.index(slot), x_tiles.index(slot)
        mbarrier.wait(state_full.index(slot), i // STAGES & 1)
        if valid < 64:
            clear_rows(k, valid, 128)
            clear_rows(v, valid, 64)
            clear_rows(x, valid, 64)
        if OUTPUT:
            # The last chunk's: its product runs beside the rounding of S.
            O_last = warpgroup_mma_wait(0, deps=[O])
        if LEG:  # noqa: SIM102 (a constexpr guards a store)
            if ((i > 0) | (before > 0)) & (i % LEG == 0):
                keep_start(starts_ptr, S, turned, start, i, head, HV, LEG)
        if not OUTPUT:
            S_low = S.to(dtype)
        zero = gl.zeros([64, 64], gl.float32, NARROW)
        left = gl.convert_layout(S_low, NARROW_LEFT)
        KS = warpgroup_mma(left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        start_staging()
        if OUTPUT:
            mbarrier.arrive(output_empty.index((i + OUTPUT_STAGES - 1) % OUTPUT_STAGES), count=1, pred=i > 0)
        if STORE_H:
            h_tile.permute((1, 0)).store(S_low)
            delta_tile.permute((1, 0)).store(delta_low)
        if OUTPUT:
            o_tile.permute((1, 0)).store(O_last.to(dtype))
        end_staging()
        if OUTPUT:
            out_slot = i % OUTPUT_STAGES
            q, p = q_tiles.index(out_slot), p_tiles.index(out_slot)
            mbarrier.wait(output_full.index(out_slot), i // OUTPUT_STAGES & 1)
            if valid < 64:
                clear_rows(q, valid, 128)
            QS = warpgroup_mma(left, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        if STORE_H:
            copy_out(h_desc, [((first + i) * HV + head) * 128, split * 64], h_tile)
        if i > 0:
            if OUTPUT:
                copy_out(o_desc, [row - 64, column], o_tile)
            if STORE_H:
                copy_out(delta_desc, [((first + i) * 64 if SPAN else row) - 64, column], delta_tile)
        beta = rows_tiles.index(slot * 4).load(ACROSS)
        k_start = rows_tiles.index(slot * 4 + 1).load(ACROSS)
        V = v.permute((1, 0)).load(NARROW).to(gl.float32)
        KS = warpgroup_mma_wait(1 if OUTPUT else 0, deps=[KS])
        E = V - k_start[None, :] * KS
        high, rounded = round_twice(beta[None, :] * E, dtype)
        left = gl.convert_layout(high, NARROW_LEFT)
        mixed = warpgroup_mma(left, x.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = S * chunk_decay(rows_tiles.index(slot * 4 + 3))
        k_end = rows_tiles.index(slot * 4 + 2).load(ACROSS)
        if OUTPUT:
            O = warpgroup_mma_wait(1, deps=[QS]) * starts.index(out_slot).load(ACROSS)[None, :]
        # Puts the ordinary reads of v and the row factors before the copies that overwrite them once released.
        fence_async_shared()
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        # beta delta, of beta E as X has seen it. With equal keys and beta = 1 all rows of the update cancel but the
        # last, and 64 roundings that X does not know of would add up along one key.
        update = beta[None, :] * mixed + rounded
        scaled = k_end[None, :] * update
        S = warpgroup_mma(gl.convert_layout(scaled.to(dtype), WIDE_LEFT), k, S, is_async=True)
        if STORE_H:
            delta_low = (E + mixed).to(dtype)
        two_terms = alike(rows_tiles.index(slot * 4 + 3))
        if OUTPUT:
            left = gl.convert_layout(update.to(dtype), NARROW_LEFT)
            O = warpgroup_mma(left, p.permute((1, 0)), O, is_async=True)
            S = warpgroup_mma_wait(1, deps=[S])
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        if two_terms:
            _, rest = split_terms(scaled, dtype)
            S = warpgroup_mma(gl.convert_layout(rest.to(dtype), WIDE_LEFT), k, S, is_async=True)
            S = warpgroup_mma_wait(0, deps=[S])
        # One thread arrives for all: the barrier before it waits until every warp's products have read the tiles.
        thread_barrier()
        mbarrier.arrive(state_empty.index(slot), count=1)
        if OUTPUT:
            # Not where it is used: behind the wait for O none of it would run beside that product.
            S_low = S.to(dtype)
    if OUTPUT:
        O_low = warpgroup_mma_wait(0, deps=[O]).to(dtype)
    if chunks > 0:
        send_last(
            o_desc, o_ptr, o_tile, O_low, delta_desc, delta_ptr, delta_tile, delta_low,
            start, length, chunks, first, column, HV, OUTPUT, STORE_H, SPAN,
        )  # fmt: skip
    store_state(
        ht_ptr, starts_ptr, end_ptr, states_ptr, S, state, own, inside, turned, start, chunks, document, head, after,
        HV, STORE_HT, SPAN, LEG, KIND,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "chunks_per_row"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, rows_desc, p_desc, x_desc, o_desc, h_desc, delta_desc,
    h0_ptr, ht_ptr, o_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, cu_ptr, offsets_ptr, table_ptr, windows_ptr,
    states_ptr, T, chunks_per_row,
    H: gl.constexpr, HV: gl.constexpr, VARLEN: gl.constexpr, HAS_H0: gl.constexpr, STORE_HT: gl.constexpr,
    STORE_H: gl.constexpr, OUTPUT: gl.constexpr, SPAN: gl.constexpr, LEG: gl.constexpr, KIND: gl.constexpr,
    STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 1 warps per (document or piece, value head, 64 columns); outputs as scan.forward_kernel."""
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
        # The state before a window is nothing to the one at its end: the window is walked from zero.
        window = gl.load(windows_ptr + (index * HV + head) * 2)
        skipped = gl.maximum(window, 0)
        start += skipped * 64
        first += skipped
        length = gl.where(after > 0, length - skipped * 64, 0)
        before = gl.where(window < 0, before, 1)
    chunks = (length + 63) // 64
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 128], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], v_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], x_desc.layout)
    rows_tiles = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 64], rows_desc.layout)
    state_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    state_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # What a form does not use stays a second name of a tile in use.
    q_tiles = k_tiles
    p_tiles = k_tiles
    starts = rows_tiles
    o_tile = k_tiles
    h_tile = k_tiles
    delta_tile = k_tiles
    output_full = state_full
    output_empty = state_empty
    if OUTPUT:
        q_tiles = gl.allocate_shared_memory(dtype, [OUTPUT_STAGES, 64, 128], q_desc.layout)
        p_tiles = gl.allocate_shared_memory(dtype, [OUTPUT_STAGES, 64, 64], p_desc.layout)
        starts = gl.allocate_shared_memory(gl.float32, [OUTPUT_STAGES, 64], rows_desc.layout)
        o_tile = gl.allocate_shared_memory(dtype, [64, 64], o_desc.layout)
        output_full = gl.allocate_shared_memory(gl.int64, [OUTPUT_STAGES, 1], mbarrier.MBarrierLayout())
        output_empty = gl.allocate_shared_memory(gl.int64, [OUTPUT_STAGES, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(OUTPUT_STAGES):
            mbarrier.init(output_full.index(slot), count=1)
            mbarrier.init(output_empty.index(slot), count=1)
    if STORE_H:
        h_tile = gl.allocate_shared_memory(dtype, [128, 64], h_desc.layout)
        delta_tile = gl.allocate_shared_memory(dtype, [64, 64], delta_desc.layout)
    for slot in gl.static_range(STAGES):
        mbarrier.init(state_full.index(slot), count=1)
        mbarrier.init(state_empty.index(slot), count=1)
    # The copy engine completes on these barriers: their initial values, ordinary stores, must be visible to it.
    fence_async_shared()
    gl.warp_specialize(
        [
            (walk, (
                q_tiles, k_tiles, v_tiles, x_tiles, p_tiles, rows_tiles, starts, h_tile, delta_tile, o_tile,
                state_full, state_empty, output_full, output_empty,
                h0_ptr, ht_ptr, o_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, states_ptr,
                o_desc, h_desc, delta_desc,
                start, length, chunks, first, head, split, index, document, before, after,
                HV, STAGES, OUTPUT_STAGES, HAS_H0, STORE_HT, STORE_H, OUTPUT, SPAN, LEG, KIND,
            )),
            (feed, (
                q_desc, k_desc, v_desc, rows_desc, p_desc, x_desc,
                q_tiles, k_tiles, v_tiles, x_tiles, p_tiles, rows_tiles, starts,
                state_full, state_empty, output_full, output_empty, start, chunks, first, head, split,
                H, HV, STAGES, OUTPUT_STAGES, OUTPUT,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
