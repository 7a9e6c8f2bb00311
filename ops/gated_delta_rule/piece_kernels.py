"""Kernels over the pieces of documents: table and windows, and the fold of their summaries and maps in order."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import load_rows


@triton.jit
def _excess(factor):
    """log max(1, factor), NaN of a NaN."""
    return tl.where(factor <= 1.0, 0.0, tl.log(factor))


@triton.jit
def _transitions(
    k_ptr, k_rstd_ptr, rows_ptr, begin, rows, first, count, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """[BLOCK]: log of a bound on the norm of each chunk's transition, prod_t e^g_t (I - beta_t k_t k_t^T); 0 past the
    last. A factor's norm is max(1, |1 - beta |k|^2|), at most max(1, |1 - beta|) for a normed key."""
    index = tl.arange(0, BLOCK)
    bound = tl.zeros([BLOCK], tl.float32)
    qk_head = head // (HV // H)
    table = rows_ptr + ((first + index) * HV + head) * 320
    if L2NORM:
        for part in range(0, 64, 16):
            inner = part + tl.arange(0, 16)[None, :]
            beta = tl.load(table[:, None] + inner, mask=(index < count)[:, None], other=0.0)
            row = index[:, None] * 64 + inner
            k_rstd = tl.load(k_rstd_ptr + begin * H + qk_head + row * H, mask=row < rows, other=1.0)
            # A key that is not finite has a factor of NaN or 0.
            bound += tl.sum(tl.where(k_rstd > 0.0, _excess(tl.abs(1.0 - beta)), float("nan")), 1)
    else:
        inner = tl.arange(0, 64)
        columns = tl.arange(0, BK)
        for i in tl.range(0, count, num_stages=3):
            at = k_ptr + ((begin + i * 64) * H + qk_head) * K
            k = load_rows(at, H * K, inner, columns, rows - i * 64, K, BK).to(tl.float32)
            beta = tl.load(rows_ptr + ((first + i) * HV + head) * 320 + inner)
            excess = tl.sum(_excess(tl.abs(1.0 - beta * tl.sum(k * k, 1))), 0)
            bound = tl.where(index == i, excess, bound)
    return bound + tl.load(table + 256 + 63, mask=index < count, other=0.0)


@triton.jit(do_not_specialize=["threshold", "documents", "steps", "T", "chunks_per_row"])
def piece_kernel(
    k_ptr, k_rstd_ptr, rows_ptr, cu_ptr, offsets_ptr, table_ptr, windows_ptr,
    threshold, documents, steps, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
    VARLEN: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """One CTA per (slot, value head): the windows of both summaries, and once the table row; 2^steps documents at
    least. See pieces.py for slots, columns and windows."""
    pid = tl.program_id(0)
    slot = (pid // HV).to(tl.int64)
    head = pid % HV
    low = 0
    high = documents
    for _ in range(steps):
        middle = (low + high) // 2
        if VARLEN:
            chunks = tl.load(offsets_ptr + middle).to(tl.int64)
        else:
            chunks = middle.to(tl.int64) * chunks_per_row
        holds = chunks // LENGTH + middle <= slot
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle)
    if VARLEN:
        first = tl.load(offsets_ptr + low).to(tl.int64)
        start, end = tl.load(cu_ptr + low).to(tl.int64), tl.load(cu_ptr + low + 1).to(tl.int64)
    else:
        first = low.to(tl.int64) * chunks_per_row
        start = low.to(tl.int64) * T
        end = start + T
    before = slot - (first // LENGTH + low)
    pieces = tl.maximum((end - start + 64 * LENGTH - 1) // (64 * LENGTH), 1)
    used = before < pieces
    begin = tl.minimum(start + before * (64 * LENGTH), end)
    rows = tl.where(used, tl.minimum(end - begin, 64 * LENGTH), 0).to(tl.int32)
    first += before * LENGTH
    if head == 0:
        row = table_ptr + slot * 8
        tl.store(row, begin)
        tl.store(row + 1, rows.to(tl.int64))
        tl.store(row + 2, first)
        tl.store(row + 3, low.to(tl.int64))
        tl.store(row + 4, tl.where(used, before, -1))
        tl.store(row + 5, tl.where(used, pieces - 1 - before, -1))
    count = tl.where(pieces > 1, (rows + 63) // 64, 0)  # a document of one piece has no summary
    index = tl.arange(0, BLOCK)
    bound = _transitions(
        k_ptr, k_rstd_ptr, rows_ptr, begin, rows, first, count, head, H, HV, K, BK, BLOCK, L2NORM
    )  # fmt: skip
    through = tl.cumsum(bound, 0)
    total = tl.sum(tl.where(index == count - 1, through, 0.0), 0)
    # A NaN is below nothing.
    faint = (total - (through - bound)) <= threshold
    window = windows_ptr + (slot * HV + head) * 2
    tl.store(window, tl.min(tl.where((index < count) & (faint == 0), index, count), 0) - 1)
    loud = tl.max(tl.where((index < count) & ((through <= threshold) == 0), index, -1), 0)
    tl.store(window + 1, tl.where(loud == count - 1, -1, loud + 2))


@triton.jit
def fold_kernel(
    table_ptr, windows_ptr, maps_ptr, states_ptr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    ADJOINT: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per (slot, value head, block of BN columns), of which those at the start of a run of maps work on, in
    order: states[s + 1] += M_s states[s]. The adjoint runs to the front: states[s - 1] += M_s^T states[s]. A run begins
    behind an end piece of the document or a piece with a window, through which nothing comes."""
    SPLITS: tl.constexpr = (V + BN - 1) // BN
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = pid // SPLITS % HV
    slot = (pid // (SPLITS * HV)).to(tl.int64)
    before = tl.load(table_ptr + slot * 8 + 4).to(tl.int32)
    after = tl.load(table_ptr + slot * 8 + 5).to(tl.int32)
    if (before <= 0) | (after <= 0):
        return
    step: tl.constexpr = -1 if ADJOINT else 1
    left = before if ADJOINT else after  # pieces with a map from here on
    passed = after if ADJOINT else before  # pieces behind
    window = windows_ptr + (slot * HV + head) * 2
    if tl.load(window) >= 0:
        return
    if passed > 1:  # noqa: SIM102 (a load out of range)
        if tl.load(window - step * HV * 2) < 0:
            return
    count = left
    for at in range(0, left, 64):
        index = at + tl.arange(0, 64)
        found = tl.load(window + step * index * (HV * 2), mask=index < left, other=-1)
        count = tl.minimum(count, tl.min(tl.where(found >= 0, index, left), 0))
    krow = tl.arange(0, BK)
    column = split * BN + tl.arange(0, BN)
    inside = (krow < K)[:, None] & (column < V)[None, :]
    square = (krow < K)[:, None] & (krow < K)[None, :]
    where = krow[:, None] * V + column[None, :]
    if ADJOINT:
        entry = krow[:, None] + krow[None, :] * K
    else:
        entry = krow[:, None] * K + krow[None, :]
    S = tl.load(states_ptr + (slot * HV + head) * K * V + where, mask=inside, other=0.0)
    for _ in tl.range(0, count, num_stages=STAGES):
        M = tl.load(maps_ptr + (slot * HV + head) * K * K + entry, mask=square, other=0.0)
        slot += step
        state = states_ptr + (slot * HV + head) * K * V + where
        value = tl.load(state, mask=inside, other=0.0)
        S = tl.dot(M, S, value, input_precision=DOT)
        tl.store(state, S, mask=inside)
