"""Backward kernels of PLE that read dout and value: row sums and conv weight gradients, then the scalars they give."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_common import (
    MINUS_EIGHTH_LN_2,
    MINUS_LOG2_E,
    _dot_eighths,
    _eight_sigmoids,
    _first_row,
    _load_channels,
    _row_offset,
    _same_document,
    _taps,
    _unpack,
    _zeros,
)
from .kernels_forward import SCORE_FLOOR, _load_walk_row, _warm_up


@triton.jit
def _silu_gradient(z):
    """silu'(y) / -log2(e) of z = -log2(e) y, silu' = s (1 + y (1 - s)); finite for any finite y."""
    s = _eight_sigmoids(z)
    # An eighth of -ln 2 - s / 8 and of 1, so that no product takes the 8 away (one: 2.307 ms for 2.265).
    return s * tl.fma(z, tl.fma(s, -0.015625, MINUS_EIGHTH_LN_2), 0.125)


@triton.jit
def _add_pair(x0, x1, y0, y1):
    return x0 + y0, x1 + y1


@triton.jit
def _conv_row(loaded, taps, ring, pending, grads, row, K: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr,
              BC: tl.constexpr, COUNT: tl.constexpr, VALUE: tl.constexpr, DOUT: tl.constexpr):  # fmt: skip
    """One row of the walk: new (ring, pending, grads), <dout, v> of the row and <u, a v> of the row it completes."""
    v, scale, start, g = loaded
    v = _unpack(v, BC, VALUE)
    g = _unpack(g, BC, DOUT)
    ring = ring + (scale * v,)
    near = _same_document(ring, start, row, K, D, HAS_FIRST)
    z = taps[K - 1] * near[K - 1]
    for j in tl.static_range(1, K):
        z = tl.fma(taps[K - 1 - j], near[K - 1 - j], z)
    # dy / -log2(e): the factor of the taps makes it good.
    dy = g * _silu_gradient(z)
    after = ()
    for j in tl.static_range(K - 1):
        felt = tl.where(start <= row - (K - 1 - j) * D, dy, 0.0) if HAS_FIRST else dy
        after = after + (tl.fma(taps[j], felt, pending[j]),)
    after = after + (taps[K - 1] * dy,)
    if COUNT:
        counted = ()
        for j in tl.static_range(K):
            counted = counted + (tl.fma(dy, near[j], grads[j]),)
        grads = counted
    s1, s2 = tl.reduce((_dot_eighths(g, v, BC), _dot_eighths(after[0], ring[0], BC)), 0, _add_pair)
    return ring[1:], after[1:], grads, s1, s2


@triton.jit
def _load_conv_row(
    dout, value, a, first, row, rows, tokens, dout_batch, dout_row, value_batch, value_row, stream, tile,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    VALUE: tl.constexpr, DOUT: tl.constexpr,
):  # fmt: skip
    """(raw value tile, a, first row of the document, raw dout tile) of one row."""
    v, scale, start = _load_walk_row(
        value, a, first, row, rows, tokens, value_batch, value_row, stream, tile, C, N, BC, HAS_FIRST, FLAT, VALUE
    )
    o_dout = _row_offset(row, tokens, dout_batch, dout_row, FLAT)
    return v, scale, start, _load_channels(dout, o_dout, stream, tile, start <= row, C, BC, DOUT)


@triton.jit
def _store_sums(
    held, sums, plane, row, begin, stop, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr
):
    """Row sums of UNROLL rows of the walk from `row` on: <dout, v> of the row, <u, a v> of the row it completed."""
    for i in tl.static_range(UNROLL):
        here = row + i * D
        done = here - (K - 1) * D
        tl.store(sums + here.to(tl.int64) * N, held[i][0], mask=(here >= begin) & (here < stop))
        tl.store(sums + plane + done.to(tl.int64) * N, held[i][1], mask=(done >= begin) & (done < stop))


@triton.jit(do_not_specialize=["rows", "tokens", "span"])
def ple_conv_backward_kernel(
    dout, value, a, first, fold, sums, dtaps, rows, tokens, span, dout_batch, dout_row, value_batch, value_row,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr, FLAT: tl.constexpr,
    VALUE: tl.constexpr, DOUT: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Per channel tile: sums [tiles, 2, rows, N] = <dout, v>, <u, a v>; dtaps [walks, K, N*C] = sum dy (a v)[t - s_j].

    `span` is a multiple of D * UNROLL, so the main loop leaves it only past the last row, where dy is 0. A walk then
    goes K-1 rows on: u of its last rows needs dy of those, which count for no sum of theirs here.
    """
    tiles: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    stream = pid % N
    tile = (pid // N) % tiles
    walk = pid // (N * tiles)
    begin = (walk // D) * span
    row0 = begin + walk % D
    stop = tl.minimum(begin + span, rows)
    c = tile * BC + tl.arange(0, BC)
    m_c = c < C
    taps = _taps(fold, stream, c, m_c, C, N, K)
    ring = _warm_up(
        value, a, first, row0, rows, tokens, value_batch, value_row, stream, tile, C, N, K, D, BC, HAS_FIRST, FLAT,
        VALUE,
    )  # fmt: skip
    pending = _zeros(K - 1, BC)
    grads = _zeros(K, BC)
    plane = rows.to(tl.int64) * N
    sums += 2 * tile * plane + stream
    steps = tl.where(row0 < stop, (stop - row0 + D - 1) // D, 0)
    counted = (steps + UNROLL - 1) // UNROLL * UNROLL
    ahead = ()
    for i in tl.static_range(UNROLL):
        ahead = ahead + (_load_conv_row(
            dout, value, a, first, row0 + i * D, rows, tokens, dout_batch, dout_row, value_batch, value_row, stream,
            tile, C, N, BC, HAS_FIRST, FLAT, VALUE, DOUT,
        ),)  # fmt: skip
    held = ()
    for _i in tl.static_range(UNROLL):
        held = held + ((tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)),)
    for step in range(0, counted, UNROLL):
        loaded = ahead
        ahead = ()
        for i in tl.static_range(UNROLL):
            row = row0 + (step + UNROLL + i) * D
            ahead = ahead + (_load_conv_row(
                dout, value, a, first, row, rows, tokens, dout_batch, dout_row, value_batch, value_row, stream, tile, C,
                N, BC, HAS_FIRST, FLAT, VALUE, DOUT,
            ),)  # fmt: skip
        # The sums of the iteration before, stored only now: a store pins the loads above, which would else sink to the
        # end of the loop, next to their use.
        _store_sums(held, sums, plane, row0 + (step - UNROLL) * D, begin, stop, N, K, D, UNROLL)
        held = ()
        for i in tl.static_range(UNROLL):
            row = row0 + (step + i) * D
            ring, pending, grads, s1, s2 = _conv_row(
                loaded[i], taps, ring, pending, grads, row, K, D, HAS_FIRST, BC, True, VALUE, DOUT
            )
            held = held + ((s1, s2),)
    _store_sums(held, sums, plane, row0 + (counted - UNROLL) * D, begin, stop, N, K, D, UNROLL)
    for step in range(counted, tl.where(steps > 0, counted + K - 1, 0)):
        row = row0 + step * D
        done = row - (K - 1) * D
        loaded = _load_conv_row(
            dout, value, a, first, row, rows, tokens, dout_batch, dout_row, value_batch, value_row, stream, tile, C, N,
            BC, HAS_FIRST, FLAT, VALUE, DOUT,
        )  # fmt: skip
        ring, pending, grads, s1, s2 = _conv_row(
            loaded, taps, ring, pending, grads, row, K, D, HAS_FIRST, BC, False, VALUE, DOUT
        )
        tl.store(sums + plane + done.to(tl.int64) * N, s2, mask=(done >= begin) & (done < stop))
    for j in tl.static_range(K):
        at = (walk.to(tl.int64) * K + j) * (N * C) + stream * C + c
        tl.store(dtaps + at, grads[j] * MINUS_LOG2_E, mask=m_c)


@triton.jit(do_not_specialize=["rows", "tokens"])
def ple_score_backward_kernel(
    sums, stats, gated, first, rows, tokens, eps, root_c, C: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    TILES: tl.constexpr, HAS_FIRST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """From the row sums of all channel tiles, in place in `sums`: planes alpha, -beta_q, -beta_k, -norm (all n).

    dq = alpha (1+w_q)(1+w_k) k - beta_q q, dk likewise; dv loses norm v.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, NP)
    m_row = row < rows
    live = (_first_row(first, row, m_row, tokens, HAS_FIRST) <= row)[:, None] & (n < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    plane = rows.to(tl.int64) * N
    s1 = tl.zeros([BT, NP], tl.float32)
    s2 = tl.zeros([BT, NP], tl.float32)
    for tile in range(TILES):
        s1 += tl.load(sums + 2 * tile * plane + at, mask=live, other=0.0)
        s2 += tl.load(sums + (2 * tile + 1) * plane + at, mask=live, other=0.0)
    gate = tl.load(stats + at, mask=live, other=0.0)
    r_q = tl.load(stats + plane + at, mask=live, other=0.0)
    r_k = tl.load(stats + 2 * plane + at, mask=live, other=0.0)
    r_c = tl.load(stats + 3 * plane + at, mask=live, other=0.0)
    score = tl.load(stats + 4 * plane + at, mask=live, other=0.0)
    masked = tl.load(gated + at, mask=live, other=0.0)
    # s2 is mask gate r_c <u, v>, so neither term divides by a gate that may underflow.
    dz = tl.fma(s1, masked, s2 * (eps * r_c * r_c)) * (1.0 - gate)
    magnitude = tl.abs(score)
    dscore = dz / (2.0 * tl.sqrt_rn(tl.maximum(magnitude, SCORE_FLOOR)))
    # Below the floor eager's clamp passes no gradient; a NaN score stays.
    dscore = tl.where(magnitude < SCORE_FLOOR, 0.0, tl.where(score == score, dscore, score))
    reduction = dscore * score / -C
    norm = tl.sum(s2 * gate * gate * r_c * r_c, 1)[:, None] / -C
    stored = m_row[:, None] & (n < N)[None, :]
    tl.debug_barrier()
    tl.store(sums + at, dscore * r_q * r_k / root_c, mask=stored)
    tl.store(sums + plane + at, reduction * r_q * r_q, mask=stored)
    tl.store(sums + 2 * plane + at, reduction * r_k * r_k, mask=stored)
    tl.store(sums + 3 * plane + at, tl.broadcast_to(norm, [BT, NP]), mask=stored)
