"""The state map M of segments, on the tapes of the walk: where the identity goes when nothing is written.

Per chunk, on columns of M in fp32 registers: E = -gamma (K M), delta = E + X (beta E), M <- gamma_C M + K^T
((gamma_C / gamma) beta delta). K and X are the walk's own tiles; only M, beta E and beta delta are wider than 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gated_delta_rule.device import load_rows, locate_piece, store_state

TABLE = tl.constexpr(320)  # floats of one (chunk, value head) in the row table, see gated_delta_rule/scores.py


@triton.jit
def _dot_wide(a, b, DOT: tl.constexpr):
    """a b with b in fp32: three 16-bit terms hold its 24 bits, and their products with a 16-bit `a` are exact in fp32.

    Half the cost of tf32x3, which keeps 21 bits. fp16 ends at 6e-8, so small entries of b lose some: M is right to 2e-5
    there, far below its X. fp32 `a` takes DOT.
    """
    if a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision=DOT)
    else:
        high = b.to(a.dtype)
        rest = b - high.to(tl.float32)
        middle = rest.to(a.dtype)
        low = (rest - middle.to(tl.float32)).to(a.dtype)
        product = tl.dot(a, low)
        product = tl.dot(a, middle, product)
        product = tl.dot(a, high, product)
    return product


@triton.jit(do_not_specialize=["T"])
def map_kernel(
    k_ptr, rows_ptr, x_ptr, cu_ptr, offsets_ptr, which_ptr, windows_ptr, map_ptr, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One CTA per (chosen segment, value head, block of BN columns); `which_ptr`: segment of each of the maps.

    PIECES: `which_ptr` is a table of pieces, and those in the middle of a document without a window have a map, in
    their slot.
    """
    SPLITS: tl.constexpr = (K + BN - 1) // BN
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % HV
    index = pid // (SPLITS * HV)
    if PIECES:
        start, length, first, _, before, after = locate_piece(index, which_ptr)
        if (before <= 0) | (after <= 0) | (tl.load(windows_ptr + (index * HV + head) * 2) >= 0):
            return
    else:
        segment = tl.load(which_ptr + index)
        start = tl.load(cu_ptr + segment).to(tl.int64)
        length = (tl.load(cu_ptr + segment + 1).to(tl.int64) - start).to(tl.int32)
        first = tl.load(offsets_ptr + segment).to(tl.int64)
    rows = tl.arange(0, 64)
    kcol = tl.arange(0, BK)
    column = split * BN + tl.arange(0, BN)
    M = tl.where(kcol[:, None] == column[None, :], 1.0, 0.0)
    for i in tl.range(0, tl.cdiv(length, 64), num_stages=STAGES):
        token = start + i * 64
        valid = tl.minimum(length - i * 64, 64)
        k = load_rows(k_ptr + (token * H + head // (HV // H)) * K, H * K, rows, kcol, valid, K, BK)
        x = load_rows(x_ptr + (token * HV + head) * 64, HV * 64, rows, rows, valid, 64, 64)
        table = rows_ptr + ((first + i) * HV + head) * TABLE
        beta = tl.load(table + rows)
        k_start = tl.load(table + 64 + rows)
        k_end = tl.load(table + 128 + rows)
        E = -k_start[:, None] * _dot_wide(k, M, DOT)
        delta = E + _dot_wide(x, beta[:, None] * E, DOT)
        update = (beta * k_end)[:, None] * delta
        M = M * tl.exp(tl.load(table + 256 + 63)) + _dot_wide(tl.trans(k), update, DOT)
    store_state(map_ptr + (index.to(tl.int64) * HV + head) * K * K, M, kcol, column, K, K)
