"""Forward kernels of PLE: scalars per (token, stream) from one read of query and key, then the output from value."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_common import (
    PLAIN,
    _channels,
    _eight_sigmoids,
    _first_row,
    _load_channels,
    _row_offset,
    _same_document,
    _sigmoid,
    _taps,
    _unpack,
)

# Power of two on q before its product with k: rows of 1e-20 keep the sign of their score, rows up to 1e15 stay finite.
LIFT = tl.constexpr(16777216.0)
SCORE_FLOOR = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["rows", "tokens"])
def ple_scalars_kernel(
    hidden, key, value, mask, fold, key_w, query_w, first, healthy, stats, a, gated, rows, tokens, hidden_batch,
    hidden_row, key_batch, key_row, value_batch, value_row, eps, root_c, C: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, HAS_MASK: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    FLAT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """stats [5, rows, N] = gate, r_q, r_k, r_c, score; a = gate r_c mask and gated = gate mask, [rows, N].

    The sum of a score is float64 where query or key is fp32: d(gate) grows as 1 / sqrt(|score|), so near a zero of the
    score (1e-5 to 3e-3, interpreted) the 1.5e-7 of an fp32 sum made 1e-3 in dq and dk, and this 1.3e-7. 16-bit inputs
    are themselves coarser.
    """
    WIDE: tl.constexpr = hidden.dtype.element_ty == tl.float32 or key.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    m_row = row < rows
    start = _first_row(first, row, m_row, tokens, HAS_FIRST)
    live = m_row & (start <= row)
    weight = live.to(tl.float32)
    if HAS_MASK:
        weight *= tl.load(mask + row, mask=m_row, other=0).to(tl.float32)
    o_hidden = _row_offset(row, tokens, hidden_batch, hidden_row, FLAT)[:, None]
    o_key = _row_offset(row, tokens, key_batch, key_row, FLAT)[:, None]
    o_value = _row_offset(row, tokens, value_batch, value_row, FLAT)[:, None]
    vv = tl.zeros([BT, BC], tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        v = tl.load(value + o_value + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        vv = tl.fma(v, v, vv)
    mean = tl.sum(vv, 1) / C
    plane = rows.to(tl.int64) * N
    for n in range(N):
        qq = tl.zeros([BT, BC], tl.float32)
        kk = tl.zeros([BT, BC], tl.float32)
        qk = tl.zeros([BT, BC], tl.float64 if WIDE else tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            m_c = c < C
            m = live[:, None] & m_c[None, :]
            at = n * C + c
            q = tl.load(hidden + o_hidden + at[None, :], mask=m, other=0.0, eviction_policy="evict_first")
            k = tl.load(key + o_key + at[None, :], mask=m, other=0.0, eviction_policy="evict_first")
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            qq = tl.fma(q, q, qq)
            kk = tl.fma(k, k, kk)
            if WIDE:
                w_k = 1.0 + tl.load(key_w + at, mask=m_c, other=0.0).to(tl.float64)
                w_q = 1.0 + tl.load(query_w + at, mask=m_c, other=0.0).to(tl.float64)
                qk = tl.fma(q.to(tl.float64) * (w_q * w_k)[None, :], k.to(tl.float64), qk)
            else:
                w = tl.load(fold + K * (N * C) + at, mask=m_c, other=0.0)
                qk = tl.fma(q * LIFT * w[None, :], k, qk)
        r_q = tl.rsqrt(tl.sum(qq, 1) / C + eps)
        r_k = tl.rsqrt(tl.sum(kk, 1) / C + eps)
        if WIDE:
            score = (tl.sum(qk, 1) * r_q * r_k / root_c).to(tl.float32)
        else:
            score = tl.sum(qk, 1) * r_q * r_k * (1.0 / LIFT) / root_c
        root = tl.sqrt_rn(tl.maximum(tl.abs(score), SCORE_FLOOR))
        root = tl.where(score > 0.0, root, tl.where(score < 0.0, -root, 0.0))
        # The comparisons above lose a NaN score; it must reach the gate.
        gate = _sigmoid(tl.where(score == score, root, score))
        if HAS_DOCUMENTS:
            gate = tl.where(tl.load(healthy) != 0, gate, float("nan"))
            score = tl.where(tl.load(healthy) != 0, score, float("nan"))
        r_c = tl.rsqrt(gate * gate * mean + eps)
        at = row.to(tl.int64) * N + n
        tl.store(stats + at, gate, mask=m_row)
        tl.store(stats + plane + at, r_q, mask=m_row)
        tl.store(stats + 2 * plane + at, r_k, mask=m_row)
        tl.store(stats + 3 * plane + at, r_c, mask=m_row)
        tl.store(stats + 4 * plane + at, score, mask=m_row)
        tl.store(gated + at, gate * weight, mask=m_row)
        tl.store(a + at, gate * r_c * weight, mask=m_row)


@triton.jit
def _load_walk_row(
    value, a, first, row, stop, tokens, value_batch, value_row, stream, tile, C: tl.constexpr, N: tl.constexpr,
    BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """(raw value tile, a, first row of the document) of one row; zeros and NO_DOCUMENT outside [0, stop)."""
    m_row = (row >= 0) & (row < stop)
    start = _first_row(first, row, m_row, tokens, HAS_FIRST)
    o_v = _row_offset(row, tokens, value_batch, value_row, FLAT)
    v = _load_channels(value, o_v, 0, tile, start <= row, C, BC, VALUE)
    scale = tl.load(a + row.to(tl.int64) * N + stream, mask=m_row, other=0.0)
    return v, scale, start


@triton.jit
def _warm_up(
    value, a, first, row, rows, tokens, value_batch, value_row, stream, tile, C: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """(a v) of the K-1 rows before `row` on its walk, oldest first."""
    ring = ()
    for j in tl.static_range(K - 1):
        back = row - (K - 1 - j) * D
        v, scale, _ = _load_walk_row(
            value, a, first, back, rows, tokens, value_batch, value_row, stream, tile, C, N, BC, HAS_FIRST, FLAT, VALUE
        )
        ring = ring + (scale * _unpack(v, BC, VALUE),)
    return ring


@triton.jit
def _load_output_row(
    value, hidden, a, gated, first, row, stop, tokens, value_batch, value_row, hidden_batch, hidden_row, stream, tile,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    RESIDUAL: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """(value tile, a, first row of the document, gate * mask, and with RESIDUAL the hidden tile) of one row."""
    v, scale, start = _load_walk_row(
        value, a, first, row, stop, tokens, value_batch, value_row, stream, tile, C, N, BC, HAS_FIRST, FLAT, VALUE
    )
    loaded = (v, scale, start, tl.load(gated + row.to(tl.int64) * N + stream, mask=row < stop, other=0.0))
    if RESIDUAL:
        o_hidden = _row_offset(row, tokens, hidden_batch, hidden_row, FLAT)
        loaded = loaded + (_load_channels(hidden, o_hidden, stream, tile, row < stop, C, BC, PLAIN),)
    return loaded


@triton.jit(do_not_specialize=["rows", "tokens", "span"])
def ple_output_kernel(
    value, hidden, a, gated, first, fold, out, rows, tokens, span, value_batch, value_row, hidden_batch, hidden_row,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    RESIDUAL: tl.constexpr, VALUE: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out = gate mask v + silu(y), y from the taps of a walk; `span` is a multiple of D."""
    tiles: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    stream = pid % N
    tile = (pid // N) % tiles
    walk = pid // (N * tiles)
    begin = (walk // D) * span
    row0 = begin + walk % D
    stop = tl.minimum(begin + span, rows)
    c = tile * BC + tl.arange(0, BC)
    taps = _taps(fold, stream, c, c < C, C, N, K)
    ring = _warm_up(
        value, a, first, row0, rows, tokens, value_batch, value_row, stream, tile, C, N, K, D, BC, HAS_FIRST, FLAT,
        VALUE,
    )  # fmt: skip
    ahead = ()
    for i in tl.static_range(UNROLL):
        ahead = ahead + (_load_output_row(
            value, hidden, a, gated, first, row0 + i * D, stop, tokens, value_batch, value_row, hidden_batch,
            hidden_row, stream, tile, C, N, BC, HAS_FIRST, FLAT, RESIDUAL, VALUE,
        ),)  # fmt: skip
    steps = (stop - row0 + D - 1) // D
    for step in range(0, steps, UNROLL):
        loaded = ahead
        ahead = ()
        for i in tl.static_range(UNROLL):
            ahead = ahead + (_load_output_row(
                value, hidden, a, gated, first, row0 + (step + UNROLL + i) * D, stop, tokens, value_batch, value_row,
                hidden_batch, hidden_row, stream, tile, C, N, BC, HAS_FIRST, FLAT, RESIDUAL, VALUE,
            ),)  # fmt: skip
        for i in tl.static_range(UNROLL):
            row = row0 + (step + i) * D
            v = _unpack(loaded[i][0], BC, VALUE)
            ring = ring + (loaded[i][1] * v,)
            near = _same_document(ring, loaded[i][2], row, K, D, HAS_FIRST)
            z = taps[K - 1] * near[K - 1]
            for j in tl.static_range(1, K):
                z = tl.fma(taps[K - 1 - j], near[K - 1 - j], z)
            result = tl.fma(z, 0.125 * _eight_sigmoids(z), loaded[i][3] * v).to(out.dtype.element_ty)
            if RESIDUAL:
                # Rounded twice, as eager adds a rounded block to `hidden`.
                result = (loaded[i][4].to(tl.float32) + result.to(tl.float32)).to(out.dtype.element_ty)
            tl.store(out + (stream * C + c) + row.to(tl.int64) * (N * C), result, mask=_channels(c, row < stop, C))
            ring = ring[1:]
