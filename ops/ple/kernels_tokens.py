"""Backward kernels of PLE that write: token gradients, then weight gradients from the partial sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_backward import _silu_gradient
from .kernels_common import (
    PLAIN,
    _channels,
    _first_row,
    _load_channels,
    _row_offset,
    _same_document,
    _taps,
    _unpack,
    _unpack_tile,
    _zeros,
)


@triton.jit
def _scalars(a, row, m_row, N: tl.constexpr):
    """The N scalars of one row."""
    out = ()
    for n in tl.static_range(N):
        out = out + (tl.load(a + row.to(tl.int64) * N + n, mask=m_row, other=0.0),)
    return out


@triton.jit
def _load_value_row(
    dout, value, a, gated, norm, first, row, rows, tokens, dout_batch, dout_row, value_batch, value_row, tile,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    VALUE: tl.constexpr, DOUT: tl.constexpr,
):  # fmt: skip
    """One row of all streams: (first row of the document, norm term, value tile), a, gate * mask and dout tiles."""
    m_row = (row >= 0) & (row < rows)
    start = _first_row(first, row, m_row, tokens, HAS_FIRST)
    o_value = _row_offset(row, tokens, value_batch, value_row, FLAT)
    v = _load_channels(value, o_value, 0, tile, start <= row, C, BC, VALUE)
    o_dout = _row_offset(row, tokens, dout_batch, dout_row, FLAT)
    upstream = ()
    for n in tl.static_range(N):
        upstream = upstream + (_load_channels(dout, o_dout, n, tile, start <= row, C, BC, DOUT),)
    term = tl.load(norm + row.to(tl.int64) * N, mask=m_row, other=0.0)
    return (start, term, v), _scalars(a, row, m_row, N), _scalars(gated, row, m_row, N), upstream


@triton.jit
def _value_row(
    shared, gates, upstream, taps, values, scales, pending, row, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr, HAS_FIRST: tl.constexpr, DOUT: tl.constexpr,
):  # fmt: skip
    """The K pending dvalue rows, oldest first, after `row` (last of `values`, `scales`) handed its dy to them."""
    start = shared[0]
    near = _same_document(values, start, row, K, D, HAS_FIRST)
    pending = pending + (shared[1] * values[K - 1],)
    for n in tl.static_range(N):
        g = _unpack(upstream[n], BC, DOUT)
        scaled = ()
        for j in tl.static_range(K):
            scale = scales[j * N + n]
            if HAS_FIRST:
                scale = tl.where(start <= row - (K - 1 - j) * D, scale, 0.0)
            scaled = scaled + (scale * taps[n * K + j],)
        z = scaled[K - 1] * near[K - 1]
        for j in tl.static_range(1, K):
            z = tl.fma(scaled[K - 1 - j], near[K - 1 - j], z)
        # dy / -log2(e): the factor of the taps makes it good.
        dy = g * _silu_gradient(z)
        after = ()
        for j in tl.static_range(K - 1):
            felt = tl.where(start <= row - (K - 1 - j) * D, dy, 0.0) if HAS_FIRST else dy
            after = after + (tl.fma(scaled[j], felt, pending[j]),)
        pending = after + (tl.fma(scaled[K - 1], dy, tl.fma(gates[n], g, pending[K - 1])),)
    return pending


@triton.jit
def _value_walk(
    pid, dout, value, a, gated, norm, first, fold, dvalue, rows, tokens, span, dout_batch, dout_row, value_batch,
    value_row, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr,
    FLAT: tl.constexpr, VALUE: tl.constexpr, DOUT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dvalue of a walk: each dy is handed to the K rows it belongs to; the next row is loaded while one is computed."""
    tiles: tl.constexpr = (C + BC - 1) // BC
    tile = pid % tiles
    walk = pid // tiles
    begin = (walk // D) * span
    row0 = begin + walk % D
    stop = tl.minimum(begin + span, rows)
    c = tile * BC + tl.arange(0, BC)
    taps = ()
    for n in tl.static_range(N):
        taps = taps + _taps(fold, n, c, c < C, C, N, K)
    values = ()
    scales = ()
    for j in tl.static_range(K - 1):
        back = row0 - (K - 1 - j) * D
        m_back = (back >= 0) & (back < rows)
        live = m_back & (_first_row(first, back, m_back, tokens, HAS_FIRST) <= back)
        o_back = _row_offset(back, tokens, value_batch, value_row, FLAT)
        values = values + (_unpack(_load_channels(value, o_back, 0, tile, live, C, BC, VALUE), BC, VALUE),)
        scales = scales + _scalars(a, back, m_back, N)
    pending = _zeros(K - 1, BC)
    steps = tl.where(row0 < stop, (stop - row0 + D - 1) // D + K - 1, 0)
    shared, scale, gates, upstream = _load_value_row(
        dout, value, a, gated, norm, first, row0, rows, tokens, dout_batch, dout_row, value_batch, value_row, tile,
        C, N,
        BC, HAS_FIRST, FLAT, VALUE, DOUT,
    )  # fmt: skip
    held = tl.zeros([BC], dvalue.dtype.element_ty)
    for step in range(steps):
        row = row0 + step * D
        next_shared, next_scale, next_gates, next_upstream = _load_value_row(
            dout, value, a, gated, norm, first, row + D, rows, tokens, dout_batch, dout_row, value_batch, value_row,
            tile, C, N, BC, HAS_FIRST, FLAT, VALUE, DOUT,
        )  # fmt: skip
        # The row completed an iteration before is stored only now: the loads above may not sink below a store.
        m_held = _channels(c, (row - K * D >= begin) & (row - K * D < stop), C)
        tl.store(dvalue + c + (row - K * D).to(tl.int64) * C, held, mask=m_held)
        values = values + (_unpack(shared[2], BC, VALUE),)
        scales = scales + scale
        pending = _value_row(shared, gates, upstream, taps, values, scales, pending, row, N, K, D, BC, HAS_FIRST, DOUT)
        held = pending[0].to(dvalue.dtype.element_ty)
        pending = pending[1:]
        values = values[1:]
        scales = scales[N:]
        shared = next_shared
        scale = next_scale
        gates = next_gates
        upstream = next_upstream
    done = row0 + (steps - K) * D
    m_done = _channels(c, (done >= begin) & (done < stop), C)
    tl.store(dvalue + c + done.to(tl.int64) * C, held, mask=m_done)


@triton.jit
def _load_tile(x, offsets, stream, tile, m_row, C: tl.constexpr, BC: tl.constexpr, KIND: tl.constexpr):
    """Channels `tile` of `stream` of several rows, raw, as `_load_channels` does of one."""
    per: tl.constexpr = 1 if KIND == PLAIN else 2
    c = tile * (BC // per) + tl.arange(0, BC // per)
    at = offsets[:, None] + (stream * (C // per) + c)[None, :]
    return tl.load(x + at, mask=m_row[:, None] & (c < C // per)[None, :], other=0)


@triton.jit
def _load_score_rows(
    hidden, key, scores, first, row, stop, plane, tokens, hidden_batch, hidden_row, key_batch, key_row, stream, tile,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    HIDDEN: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Raw tiles of hidden and key, and alpha, -beta_q, -beta_k of the rows."""
    m_row = row < stop
    live = _first_row(first, row, m_row, tokens, HAS_FIRST) <= row
    q = _load_tile(hidden, _row_offset(row, tokens, hidden_batch, hidden_row, FLAT), stream, tile, live, C, BC, HIDDEN)
    k = _load_tile(key, _row_offset(row, tokens, key_batch, key_row, FLAT), stream, tile, live, C, BC, KEY)
    at_row = row.to(tl.int64) * N + stream
    alpha = tl.load(scores + at_row, mask=m_row, other=0.0)
    minus_beta_q = tl.load(scores + plane + at_row, mask=m_row, other=0.0)
    minus_beta_k = tl.load(scores + 2 * plane + at_row, mask=m_row, other=0.0)
    return q, k, alpha, minus_beta_q, minus_beta_k


@triton.jit
def _score_span(
    pid, dout, hidden, key, scores, first, fold, dhidden, dkey, dscores, rows, tokens, span, dout_batch, dout_row,
    hidden_batch, hidden_row, key_batch, key_row, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    HAS_FIRST: tl.constexpr, FLAT: tl.constexpr, RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, KEY: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dhidden, dkey elementwise; dscores [spans, N*C] = sum_t alpha q k, which both norm weights share."""
    tiles: tl.constexpr = (C + BC - 1) // BC
    tile = pid % tiles
    stream = (pid // tiles) % N
    i_s = pid // (tiles * N)
    stop = tl.minimum(i_s * span + span, rows)
    c = tile * BC + tl.arange(0, BC)
    m_c = c < C
    at_c = stream * C + c
    weight = tl.load(fold + K * (N * C) + at_c, mask=m_c, other=0.0)[None, :]
    plane = rows.to(tl.int64) * N
    total = tl.zeros([BT, BC], tl.float32)
    row = i_s * span + tl.arange(0, BT)
    ahead = _load_score_rows(
        hidden, key, scores, first, row, stop, plane, tokens, hidden_batch, hidden_row, key_batch, key_row, stream,
        tile, C, N, BC, HAS_FIRST, FLAT, HIDDEN, KEY,
    )  # fmt: skip
    for base in range(i_s * span, stop, BT):
        row = base + tl.arange(0, BT)
        m_row = row < stop
        q, k, alpha, minus_beta_q, minus_beta_k = ahead
        ahead = _load_score_rows(
            hidden, key, scores, first, row + BT, stop, plane, tokens, hidden_batch, hidden_row, key_batch, key_row,
            stream, tile, C, N, BC, HAS_FIRST, FLAT, HIDDEN, KEY,
        )  # fmt: skip
        q = _unpack_tile(q, BT, BC, HIDDEN)
        k = _unpack_tile(k, BT, BC, KEY)
        alpha = alpha[:, None]
        minus_beta_q = minus_beta_q[:, None]
        minus_beta_k = minus_beta_k[:, None]
        scale = alpha * weight
        total = tl.fma(alpha * q, k, total)
        dk = tl.fma(minus_beta_k, k, scale * q).to(dkey.dtype.element_ty)
        dq = tl.fma(minus_beta_q, q, scale * k).to(dhidden.dtype.element_ty)
        stored = m_row[:, None] & m_c[None, :]
        if RESIDUAL:
            # Rounded twice, as eager sums the two gradients of `hidden`.
            o_dout = _row_offset(row, tokens, dout_batch, dout_row, FLAT)[:, None] + at_c[None, :]
            upstream = tl.load(dout + o_dout, mask=stored, other=0.0).to(tl.float32)
            dq = (upstream + dq.to(tl.float32)).to(dhidden.dtype.element_ty)
        o_out = row.to(tl.int64)[:, None] * (N * C) + at_c[None, :]
        tl.store(dhidden + o_out, dq, mask=stored)
        tl.store(dkey + o_out, dk, mask=stored)
    tl.store(dscores + i_s.to(tl.int64) * (N * C) + at_c, tl.sum(total, 0), mask=m_c)


@triton.jit(do_not_specialize=["rows", "tokens", "value_span", "score_span", "value_programs", "score_programs"])
def ple_token_gradients_kernel(
    dout, dout_walk, hidden, key, value, a, gated, scores, norm, first, fold, dhidden, dkey, dvalue, dscores, rows,
    tokens, value_span, score_span, value_programs, score_programs, dout_batch, dout_row, dout_walk_batch,
    dout_walk_row, hidden_batch, hidden_row, key_batch, key_row, value_batch, value_row, C: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    HAS_FIRST: tl.constexpr, FLAT: tl.constexpr, RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, DOUT: tl.constexpr, VALUE_BC: tl.constexpr, SCORE_BT: tl.constexpr, SCORE_BC: tl.constexpr,
):  # fmt: skip
    """Even programs walk dvalue, bound by arithmetic; odd ones stream dhidden and dkey, bound by memory."""
    pid = tl.program_id(0)
    if pid % 2 == 0:
        if pid // 2 < value_programs:
            _value_walk(
                pid // 2, dout_walk, value, a, gated, norm, first, fold, dvalue, rows, tokens, value_span,
                dout_walk_batch, dout_walk_row, value_batch, value_row, C, N, K, D, HAS_FIRST, FLAT, VALUE, DOUT,
                VALUE_BC,
            )  # fmt: skip
    elif pid // 2 < score_programs:
        _score_span(
            pid // 2, dout, hidden, key, scores, first, fold, dhidden, dkey, dscores, rows, tokens, score_span,
            dout_batch, dout_row, hidden_batch, hidden_row, key_batch, key_row, C, N, K, HAS_FIRST, FLAT, RESIDUAL,
            HIDDEN, KEY, SCORE_BT, SCORE_BC,
        )  # fmt: skip


@triton.jit
def _add_partials(total, partial, p, count, stride, w, m_w):
    """`total` [BP, BW] plus the rows `p` of partial sums, 0 past `count`."""
    at = p.to(tl.int64)[:, None] * stride + w[None, :]
    return total + tl.load(partial + at, mask=(p < count)[:, None] & m_w[None, :], other=0.0)


@triton.jit(do_not_specialize=["walks", "spans"])
def ple_weight_gradient_kernel(
    dtaps, dscores, key_w, query_w, conv_w, taps, dkey_w, dquery_w, dconv_w, dconv, walks, spans, W: tl.constexpr,
    K: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """dw_j = (1 + w_c) D_j, dw_c = sum_j w_j D_j, dw_k = (1 + w_q) E, dw_q = (1 + w_k) E from the partials of D, E.

    One loop for all K + 1 sums: as many loads are under way at once as registers hold, for the latency of DRAM.
    """
    w = tl.program_id(0) * BW + tl.arange(0, BW)
    m_w = w < W
    totals = ()
    for _ in tl.static_range(K + 1):
        totals = totals + (tl.zeros([BP, BW], tl.float32),)
    for base in range(0, tl.maximum(walks, spans), BP):
        p = base + tl.arange(0, BP)
        added = ()
        for j in tl.static_range(K):
            added = added + (_add_partials(totals[j], dtaps + j * W, p, walks, K * W, w, m_w),)
        totals = added + (_add_partials(totals[K], dscores, p, spans, W, w, m_w),)
    scale = 1.0 + tl.load(conv_w + w, mask=m_w, other=0.0).to(tl.float32)
    norm = tl.zeros([BW], tl.float32)
    for j in tl.static_range(K):
        total = tl.sum(totals[j], 0)
        tap = tl.load(taps + w * K + j, mask=m_w, other=0.0).to(tl.float32)
        norm = tl.fma(tap, total, norm)
        tl.store(dconv + w * K + j, (scale * total).to(dconv.dtype.element_ty), mask=m_w)
    tl.store(dconv_w + w, norm.to(dconv_w.dtype.element_ty), mask=m_w)
    total = tl.sum(totals[K], 0)
    key = 1.0 + tl.load(key_w + w, mask=m_w, other=0.0).to(tl.float32)
    query = 1.0 + tl.load(query_w + w, mask=m_w, other=0.0).to(tl.float32)
    tl.store(dkey_w + w, (query * total).to(dkey_w.dtype.element_ty), mask=m_w)
    tl.store(dquery_w + w, (key * total).to(dquery_w.dtype.element_ty), mask=m_w)
