"""Chunk-parallel preparation: decay sums, l2norm factors, and the gated inverse `x` of every chunk.

With L = stril(K^ K^T) the strictly lower X solves x_r = -(l_r + sum_{i<r} l_ri beta_i x_i); the tape is Gamma * X,
rounded once (|Gamma X| <= 1 for |k| <= 1 and beta in [0, 2]). 16x16 diagonal blocks by substitution in fp32, the six
blocks below them by fp32-grade products (tf32x3 or ieee: plain tf32 loses 6e-3 on nearly equal keys). 16 bits of keys
that point one way are rounded carrying errors, see `inverse_rounding`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import locate_chunk


@triton.jit
def _eliminate(X, LB, step, index):
    """Right-looking step: row i of X is final, rows below it lose its share."""
    row = tl.sum(tl.where((index == step)[:, None], X, 0.0), 0)
    column = tl.sum(tl.where((index == step)[None, :], LB, 0.0), 1)
    return X - column[:, None] * row[None, :]


@triton.jit
def _merge(R, XB, PREC: tl.constexpr):
    """Off-diagonal block -(I + X_ii D_i) R."""
    return -(R + tl.dot(XB, R, input_precision=PREC))


@triton.jit
def _round_carrying(X, carried, error, index, DTYPE: tl.constexpr):
    """16 rows rounded to DTYPE, each taking over `carried` times what the one above lacks; and what the last lacks."""
    for step in range(16):
        here = index == step
        row = tl.sum(tl.where(here[:, None], X, 0.0), 0) + tl.sum(tl.where(here, carried, 0.0), 0) * error
        result = row.to(DTYPE).to(tl.float32)
        error = row - result
        X = tl.where(here[:, None], result[None, :], X)
    return X, error


@triton.jit
def _store_block(
    ptr, X, G_row, G_column, carried, error, alike, stride: tl.constexpr, valid,
    ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Gates and rounds a block; `error` is that of the block above, and returned for the one below."""
    index = tl.arange(0, 16)
    low = (index[:, None] > index[None, :]) | (ROW > COLUMN)
    difference = tl.where(low, G_row[:, None] - G_column[None, :], 0.0).to(tl.float32)
    X = tl.where(low, tl.exp(difference) * X, 0.0)
    if alike:
        X, error = _round_carrying(X, carried, error, index, ptr.dtype.element_ty)
    pointers = ptr + (ROW * 16 + index)[:, None] * stride + (COLUMN * 16 + index)[None, :]
    tl.store(pointers, X.to(ptr.dtype.element_ty), mask=(ROW * 16 + index < valid)[:, None])
    return error


@triton.jit
def _store_zeros(ptr, stride: tl.constexpr, valid, ROW: tl.constexpr):
    """Right of a row's diagonal block."""
    row, column = ROW * 16 + tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    zero = tl.zeros([16, 64], ptr.dtype.element_ty)
    tl.store(ptr + row * stride + column, zero, mask=(row < valid) & (column >= ROW * 16 + 16))


@triton.jit
def _factor(ptr, stride: tl.constexpr, first: tl.constexpr, valid, K: tl.constexpr, BLOCK: tl.constexpr):
    """Row factor rsqrt(sum x^2 + 1e-6) of 16 rows, fp32."""
    rows = first + tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (rows < valid)[:, None] & (columns < K)[None, :]
        tile = tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(tile * tile, 1)
    return tl.rsqrt(total + 1e-6)


@triton.jit
def _carried(
    L, L_left, beta_ptr, g_ptr, k_ptr, first: tl.constexpr, valid,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """(k_i k_(i-1)) / (k_i k_i) e^(g_i) beta_(i-1) / beta_i of 16 rows, at most 2: a beta near 0 cannot make up."""
    index = tl.arange(0, 16)
    rows = first + index
    # Row 0 meets the last row of the block above: L_left is the block to the left.
    along = tl.sum(tl.where(index[:, None] == index[None, :] + 1, L, 0.0), 1)
    along += tl.sum(tl.where((index[:, None] == 0) & (index[None, :] == 15), L_left, 0.0), 1)
    if not L2NORM:
        factor = _factor(k_ptr, H * K, first, valid, K, BLOCK)
        along *= factor * factor
    inside = (rows < valid) & (rows > 0)
    beta = tl.load(beta_ptr + rows * HV, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(beta_ptr + (rows - 1) * HV, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + rows * HV, mask=inside, other=0.0).to(tl.float32)
    ratio = along * tl.exp(tl.minimum(g, 0.0)) * above / tl.maximum(beta, 1e-6)
    return tl.minimum(tl.maximum(ratio, -2.0), 2.0)


@triton.jit
def _are_alike(blocks, k_ptr, stride: tl.constexpr, valid, K: tl.constexpr, BLOCK: tl.constexpr, L2NORM: tl.constexpr):
    """A mean |cosine| of pairs of keys above 1/2; `blocks` of L, with normalised keys after L2NORM."""
    total = 0.0
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1):
            pairs = tl.abs(blocks[i * (i + 1) // 2 + j])
            if not L2NORM:
                pairs *= _factor(k_ptr, stride, 16 * i, valid, K, BLOCK)[:, None]
                pairs *= _factor(k_ptr, stride, 16 * j, valid, K, BLOCK)[None, :]
            total += tl.sum(tl.sum(pairs, 1), 0)
    return total > 0.25 * (valid * (valid - 1)).to(tl.float32)


@triton.jit
def _decay(ptr, out_ptr, stride: tl.constexpr, first: tl.constexpr, valid, before):
    """Cumulative log decay of 16 rows continuing `before`; clamped at -88, where exp reaches 0 in fp32.

    In fp64: fp32 sums of gates of -80 lose 1e-4, and the difference of two would carry that into a decay of order one.
    """
    index = tl.arange(0, 16)
    rows = first + index
    g = tl.load(ptr + rows * stride, mask=rows < valid, other=0.0).to(tl.float32)
    G = tl.cumsum(tl.where(g < -88.0, -88.0, g).to(tl.float64), 0) + before
    tl.store(out_ptr + rows * stride, G.to(tl.float32), mask=rows < valid)
    return G, tl.sum(tl.where(index == 15, G, 0.0), 0)


@triton.jit
def _rows16(ptr, stride: tl.constexpr, first: tl.constexpr, columns, valid, K: tl.constexpr):
    rows = first + tl.arange(0, 16)
    mask = (rows < valid)[:, None] & (columns < K)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["scale", "documents", "T", "chunks_per_row"])
def prep_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, offsets_ptr, gcum_ptr, k_rstd_ptr, qscale_ptr, x_ptr,
    scale, documents, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
    L2NORM: tl.constexpr, PREC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One CTA per (chunk, q/k head): K K^T once, then the inverse of each value head of the group."""
    pid = tl.program_id(0)
    chunk = pid // H
    head = pid - chunk * H
    if VARLEN:  # noqa: SIM102 (a constexpr guards a load)
        if chunk >= tl.load(offsets_ptr + documents):
            return
    start, valid = locate_chunk(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
    index = tl.arange(0, 16)
    k_ptr += (start * H + head) * K
    q_ptr += (start * H + head) * K
    k_rstd_ptr += start * H + head
    qscale_ptr += start * H + head

    L00 = tl.zeros([16, 16], tl.float32)
    L10, L11, L20, L21, L22, L30, L31, L32, L33 = L00, L00, L00, L00, L00, L00, L00, L00, L00
    for first in tl.static_range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        k0 = _rows16(k_ptr, H * K, 0, columns, valid, K)
        k1 = _rows16(k_ptr, H * K, 16, columns, valid, K)
        k2 = _rows16(k_ptr, H * K, 32, columns, valid, K)
        k3 = _rows16(k_ptr, H * K, 48, columns, valid, K)
        L00 = tl.dot(k0, tl.trans(k0), L00, input_precision=DOT)
        L10 = tl.dot(k1, tl.trans(k0), L10, input_precision=DOT)
        L11 = tl.dot(k1, tl.trans(k1), L11, input_precision=DOT)
        L20 = tl.dot(k2, tl.trans(k0), L20, input_precision=DOT)
        L21 = tl.dot(k2, tl.trans(k1), L21, input_precision=DOT)
        L22 = tl.dot(k2, tl.trans(k2), L22, input_precision=DOT)
        L30 = tl.dot(k3, tl.trans(k0), L30, input_precision=DOT)
        L31 = tl.dot(k3, tl.trans(k1), L31, input_precision=DOT)
        L32 = tl.dot(k3, tl.trans(k2), L32, input_precision=DOT)
        L33 = tl.dot(k3, tl.trans(k3), L33, input_precision=DOT)
    low = index[:, None] > index[None, :]
    for i in tl.static_range(4):
        rows = 16 * i + index
        if L2NORM:
            qs = _factor(q_ptr, H * K, 16 * i, valid, K, BLOCK) * scale
        else:
            qs = tl.zeros([16], tl.float32) + scale
        tl.store(qscale_ptr + rows * H, qs, mask=rows < valid)
    if L2NORM:
        r0 = _factor(k_ptr, H * K, 0, valid, K, BLOCK)
        r1 = _factor(k_ptr, H * K, 16, valid, K, BLOCK)
        r2 = _factor(k_ptr, H * K, 32, valid, K, BLOCK)
        r3 = _factor(k_ptr, H * K, 48, valid, K, BLOCK)
        L00, L11 = L00 * r0[:, None] * r0[None, :], L11 * r1[:, None] * r1[None, :]
        L22, L33 = L22 * r2[:, None] * r2[None, :], L33 * r3[:, None] * r3[None, :]
        L10, L20, L30 = (
            L10 * r1[:, None] * r0[None, :],
            L20 * r2[:, None] * r0[None, :],
            L30 * r3[:, None] * r0[None, :],
        )
        L21, L31, L32 = (
            L21 * r2[:, None] * r1[None, :],
            L31 * r3[:, None] * r1[None, :],
            L32 * r3[:, None] * r2[None, :],
        )
    else:
        r0 = tl.zeros([16], tl.float32) + 1.0
        r1, r2, r3 = r0, r0, r0
    tl.store(k_rstd_ptr + index * H, r0, mask=index < valid)
    tl.store(k_rstd_ptr + (16 + index) * H, r1, mask=16 + index < valid)
    tl.store(k_rstd_ptr + (32 + index) * H, r2, mask=32 + index < valid)
    tl.store(k_rstd_ptr + (48 + index) * H, r3, mask=48 + index < valid)
    L00, L11 = tl.where(low, L00, 0.0), tl.where(low, L11, 0.0)
    L22, L33 = tl.where(low, L22, 0.0), tl.where(low, L33, 0.0)
    alike = False
    if x_ptr.dtype.element_ty != tl.float32:
        blocks = (L00, L10, L11, L20, L21, L22, L30, L31, L32, L33)
        alike = _are_alike(blocks, k_ptr, H * K, valid, K, BLOCK, L2NORM)
    none = tl.zeros([16], tl.float32)
    for value_head in range(head * (HV // H), (head + 1) * (HV // H)):
        base = start * HV + value_head
        G0, last = _decay(g_ptr + base, gcum_ptr + base, HV, 0, valid, 0.0)
        G1, last = _decay(g_ptr + base, gcum_ptr + base, HV, 16, valid, last)
        G2, last = _decay(g_ptr + base, gcum_ptr + base, HV, 32, valid, last)
        G3, last = _decay(g_ptr + base, gcum_ptr + base, HV, 48, valid, last)
        bp = beta_ptr + base
        b0 = tl.load(bp + index * HV, mask=index < valid, other=0.0).to(tl.float32)[None, :]
        b1 = tl.load(bp + (16 + index) * HV, mask=16 + index < valid, other=0.0).to(tl.float32)[None, :]
        b2 = tl.load(bp + (32 + index) * HV, mask=32 + index < valid, other=0.0).to(tl.float32)[None, :]
        b3 = tl.load(bp + (48 + index) * HV, mask=48 + index < valid, other=0.0).to(tl.float32)[None, :]
        X00, X11, X22, X33 = -L00, -L11, -L22, -L33
        for step in range(15):
            X00 = _eliminate(X00, L00 * b0, step, index)
            X11 = _eliminate(X11, L11 * b1, step, index)
            X22 = _eliminate(X22, L22 * b2, step, index)
            X33 = _eliminate(X33, L33 * b3, step, index)
        B11, B22, B33 = X11 * b1, X22 * b2, X33 * b3
        xp = x_ptr + base * 64
        X10 = _merge(tl.dot(L10 * b0, X00, L10, input_precision=PREC), B11, PREC)
        R = tl.dot(L21 * b1, X10, tl.dot(L20 * b0, X00, L20, input_precision=PREC), input_precision=PREC)
        X20 = _merge(R, B22, PREC)
        R = tl.dot(L31 * b1, X10, tl.dot(L30 * b0, X00, L30, input_precision=PREC), input_precision=PREC)
        X30 = _merge(tl.dot(L32 * b2, X20, R, input_precision=PREC), B33, PREC)
        c0, c1, c2, c3 = none, none, none, none
        if alike:
            gp = g_ptr + base
            c0 = _carried(L00, L10 * 0.0, bp, gp, k_ptr, 0, valid, H, HV, K, BLOCK, L2NORM)
            c1 = _carried(L11, L10, bp, gp, k_ptr, 16, valid, H, HV, K, BLOCK, L2NORM)
            c2 = _carried(L22, L21, bp, gp, k_ptr, 32, valid, H, HV, K, BLOCK, L2NORM)
            c3 = _carried(L33, L32, bp, gp, k_ptr, 48, valid, H, HV, K, BLOCK, L2NORM)
        e = _store_block(xp, X00, G0, G0, c0, none, alike, HV * 64, valid, 0, 0)
        e = _store_block(xp, X10, G1, G0, c1, e, alike, HV * 64, valid, 1, 0)
        e = _store_block(xp, X20, G2, G0, c2, e, alike, HV * 64, valid, 2, 0)
        _store_block(xp, X30, G3, G0, c3, e, alike, HV * 64, valid, 3, 0)
        X21 = _merge(tl.dot(L21 * b1, X11, L21, input_precision=PREC), B22, PREC)
        R = tl.dot(L32 * b2, X21, tl.dot(L31 * b1, X11, L31, input_precision=PREC), input_precision=PREC)
        X31 = _merge(R, B33, PREC)
        e = _store_block(xp, X11, G1, G1, c1, none, alike, HV * 64, valid, 1, 1)
        e = _store_block(xp, X21, G2, G1, c2, e, alike, HV * 64, valid, 2, 1)
        _store_block(xp, X31, G3, G1, c3, e, alike, HV * 64, valid, 3, 1)
        X32 = _merge(tl.dot(L32 * b2, X22, L32, input_precision=PREC), B33, PREC)
        e = _store_block(xp, X22, G2, G2, c2, none, alike, HV * 64, valid, 2, 2)
        _store_block(xp, X32, G3, G2, c3, e, alike, HV * 64, valid, 3, 2)
        _store_block(xp, X33, G3, G3, c3, none, alike, HV * 64, valid, 3, 3)
        _store_zeros(xp, HV * 64, valid, 0)
        _store_zeros(xp, HV * 64, valid, 1)
        _store_zeros(xp, HV * 64, valid, 2)
