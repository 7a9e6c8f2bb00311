"""Kernels over the pieces of documents: the table of pieces, and the fold of their summaries and maps in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "documents", "steps", "T", "chunks_per_row", "length"])
def piece_table_kernel(
    cu_ptr, offsets_ptr, table_ptr, slots, documents, steps, T, chunks_per_row, length,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for each slot; 2^steps documents at least. See pieces.py for slots and columns."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    low = tl.zeros([BLOCK], tl.int32)
    high = low + documents
    for _ in range(steps):
        middle = (low + high) // 2
        if VARLEN:
            chunks = tl.load(offsets_ptr + middle).to(tl.int64)
        else:
            chunks = middle.to(tl.int64) * chunks_per_row
        holds = chunks // length + middle <= slot
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle)
    if VARLEN:
        first = tl.load(offsets_ptr + low).to(tl.int64)
        start, end = tl.load(cu_ptr + low).to(tl.int64), tl.load(cu_ptr + low + 1).to(tl.int64)
    else:
        first = low.to(tl.int64) * chunks_per_row
        start = low.to(tl.int64) * T
        end = start + T
    before = slot - (first // length + low)
    pieces = tl.maximum((end - start + 64 * length - 1) // (64 * length), 1)
    used = before < pieces
    begin = tl.minimum(start + before * (64 * length), end)
    rows = tl.where(used, tl.minimum(end - begin, 64 * length), 0)
    row = table_ptr + slot * 8
    tl.store(row, begin, mask=inside)
    tl.store(row + 1, rows, mask=inside)
    tl.store(row + 2, first + before * length, mask=inside)
    tl.store(row + 3, low.to(tl.int64), mask=inside)
    tl.store(row + 4, tl.where(used, before, -1).to(tl.int64), mask=inside)
    tl.store(row + 5, tl.where(used, pieces - 1 - before, -1), mask=inside)


@triton.jit(do_not_specialize=["chunks_per_row", "length"])
def fold_kernel(
    cu_ptr, offsets_ptr, table_ptr, maps_ptr, states_ptr, chunks_per_row, length,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    VARLEN: tl.constexpr, ADJOINT: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per (document, value head, block of BN columns), in order: states[s + 1] += M_s states[s] from the second
    piece s on. The adjoint runs from the last but one to the front: states[s - 1] += M_s^T states[s]."""
    SPLITS: tl.constexpr = (V + BN - 1) // BN
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = pid // SPLITS % HV
    document = pid // (SPLITS * HV)
    if VARLEN:
        chunks = tl.load(offsets_ptr + document).to(tl.int64)
    else:
        chunks = document.to(tl.int64) * chunks_per_row
    base = chunks // length + document
    pieces = tl.load(table_ptr + base * 8 + 5).to(tl.int32) + 1
    krow = tl.arange(0, BK)
    column = split * BN + tl.arange(0, BN)
    inside = (krow < K)[:, None] & (column < V)[None, :]
    square = (krow < K)[:, None] & (krow < K)[None, :]
    where = krow[:, None] * V + column[None, :]
    if ADJOINT:
        entry = krow[:, None] + krow[None, :] * K
        slot = base + pieces - 2
        step = -1
    else:
        entry = krow[:, None] * K + krow[None, :]
        slot = base + 1
        step = 1
    if pieces > 2:
        S = tl.load(states_ptr + (slot * HV + head) * K * V + where, mask=inside, other=0.0)
        for _ in tl.range(0, pieces - 2, num_stages=STAGES):
            M = tl.load(maps_ptr + (slot * HV + head) * K * K + entry, mask=square, other=0.0)
            slot += step
            state = states_ptr + (slot * HV + head) * K * V + where
            value = tl.load(state, mask=inside, other=0.0)
            S = tl.dot(M, S, value, input_precision=DOT)
            tl.store(state, S, mask=inside)
