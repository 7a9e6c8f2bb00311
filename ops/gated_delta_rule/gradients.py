"""Chunk-parallel gradient kernel: dq, dk, dv, dg and dbeta of a chunk from h, dh, delta and dR, group summed in fp32.

Tiles are stacked to 128 rows, dO over dR and Q over K, so that one product serves both and eight warps split its rows:

    scores  = [dO; dR] delta^T             row r, column i: both score gradients before their decay
    columns = [Q; K]^T scores + dh delta^T  dk of the key side, transposed [K, 64]
    stacked = scores K + [dO; dR] h^T       dq over the row side of dk, [128, K]

No product result is ever transposed: it enters the next product as right operand, or as left operand as it stands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import gate_sums, load_rows, load_state, locate_chunk


@triton.jit
def _stacked(top_ptr, bottom_ptr, stride: tl.constexpr, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[128, BLOCK]: 64 rows of one matrix over the same 64 rows of another."""
    rows = tl.arange(0, 128)
    inner = (rows % 64)[:, None]
    ptr = tl.where((rows < 64)[:, None], top_ptr + inner * stride, bottom_ptr + inner * stride) + columns[None, :]
    if BLOCK == WIDTH:
        tile = tl.load(ptr, mask=inner < valid, other=0.0)
    else:
        tile = tl.load(ptr, mask=(inner < valid) & (columns < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _fold(stacked):
    """[64]: top half plus bottom half."""
    return tl.sum(tl.reshape(stacked, [2, 64]), 0)


@triton.jit
def _twice(x):
    """[128]: x over itself."""
    return tl.reshape(tl.permute(tl.join(x, x), (1, 0)), [128])


@triton.jit
def _inverse(x):
    return tl.where(x == 0.0, 0.0, 1.0 / x)


@triton.jit
def _weigh(scores, table, g_ptr, factor, k_rstd, valid, HV: tl.constexpr, EXACT: tl.constexpr):
    """Both score gradients strictly below the diagonal, all row factors in, rounded once.

    The diagonal, whose shares in dG cancel exactly, is left to `_diagonals`. EXACT: decays to fp32, see `gate_sums`.
    """
    rows = tl.arange(0, 128)
    columns = tl.arange(0, 64)
    low = (rows % 64)[:, None] > columns[None, :]
    difference = tl.load(table + 256 + rows % 64)[:, None] - tl.load(table + 256 + columns)[None, :]
    if EXACT:
        _, rest = gate_sums(g_ptr, HV, columns, valid)
        difference += _twice(rest)[:, None] - rest[None, :]
    weight = tl.where(low, tl.exp(tl.where(low, difference, 0.0)), 0.0) * (tl.load(table + columns) * k_rstd)[None, :]
    return scores * weight * (tl.where(rows < 64, 1.0, -tl.load(table + rows % 64)) * factor)[:, None]


@triton.jit
def _diagonals(scores):
    """Diagonals of both halves: dO delta^T, and dR delta^T, which is dbeta."""
    rows = tl.arange(0, 128)
    diagonal = tl.sum(tl.where((rows % 64)[:, None] == tl.arange(0, 64)[None, :], scores, 0.0), 1)
    return _fold(tl.where(rows < 64, diagonal, 0.0)), _fold(tl.where(rows < 64, 0.0, diagonal))


@triton.jit
def _row_phase(
    do_ptr, dr_ptr, table_ptr, g_ptr, h_ptr, delta_ptr, dg_ptr, dbeta_ptr, qk, k, factor, k_rstd, valid,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[128, BK], the group's sum of dq over the row side of dk, and [64] of beta_r dO_r delta_r (the diagonal).

    Stores dbeta, and its share of dG in `dg_ptr`.
    """
    dtype: tl.constexpr = qk.dtype
    WIDTH: tl.constexpr = V if V % BV == 0 else BV
    SPLITS: tl.constexpr = (V + BV - 1) // BV
    rows = tl.arange(0, 64)
    stacked_rows = tl.arange(0, 128)
    kcol = tl.arange(0, BK)
    total = tl.zeros([128, BK], tl.float32)
    scores = tl.zeros([128, 64], tl.float32)
    dots = tl.zeros([128], tl.float32)
    same = tl.zeros([64], tl.float32)
    if dtype == tl.float32:
        products = tl.dot(qk, tl.trans(k), input_precision=DOT)  # before the loop: shared memory is short in fp32
    for step in tl.range(0, GROUP * SPLITS, num_stages=STAGES):
        head = step // SPLITS
        vcol = (step % SPLITS) * BV + tl.arange(0, BV)
        upper = _stacked(do_ptr + head * V, dr_ptr + head * V, HV * V, vcol, valid, V, WIDTH)
        delta = load_rows(delta_ptr + head * V, HV * V, rows, vcol, valid, V, WIDTH)
        h = load_state(h_ptr + head * K * V, kcol, vcol, K, V)
        table = table_ptr + head * 320
        gamma = tl.exp(tl.load(table + 256 + stacked_rows % 64))
        gamma = tl.where(stacked_rows < 64, gamma, -gamma * tl.load(table + stacked_rows % 64))
        scores = tl.dot(upper, tl.trans(delta), scores, input_precision=DOT)
        part = tl.dot(upper, tl.trans(h), input_precision=DOT) * gamma[:, None]
        total += part
        if dtype == tl.float32:
            dots += tl.sum(part * qk, 1) * factor
        else:
            # The same row dots, U h^T . QK = U . (QK h), without a second [128, BK] tile in registers.
            part = tl.dot(qk, h, input_precision=DOT)
            dots += tl.sum(part * upper.to(tl.float32), 1) * gamma * factor
        if step % SPLITS == SPLITS - 1:
            diagonal, dbeta = _diagonals(scores)
            same += tl.load(table + rows) * diagonal
            weighted = _weigh(scores, table, g_ptr + head, factor, k_rstd, valid, HV, dtype == tl.float32).to(dtype)
            total += tl.dot(weighted, k, input_precision=DOT) * _inverse(factor)[:, None]
            # Each pair adds to dG at r what it takes away at i: one tile for both, so they cancel to fp32.
            if dtype == tl.float32:
                pairs = weighted * products
            else:
                pairs = weighted.to(tl.float32) * tl.dot(qk, tl.trans(k), input_precision=DOT)
            dG = _fold(dots + tl.sum(pairs, 1)) - tl.sum(pairs, 0)
            tl.store(dg_ptr + head + rows * HV, dG, mask=rows < valid)
            tl.store(dbeta_ptr + head + rows * HV, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < valid)
            scores = tl.zeros([128, 64], tl.float32)
            dots = tl.zeros([128], tl.float32)
    return total, same


@triton.jit
def _column_phase(
    do_ptr, dv_ptr, table_ptr, g_ptr, h_ptr, delta_ptr, dh_ptr, dg_ptr, qk, kT, factor, k_rstd, valid,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BK, 64], the group's sum of [Q; K]^T scores + dh delta^T; finishes dg, and turns dR into dV."""
    dtype: tl.constexpr = qk.dtype
    WIDTH: tl.constexpr = V if V % BV == 0 else BV
    SPLITS: tl.constexpr = (V + BV - 1) // BV
    rows = tl.arange(0, 64)
    stacked_rows = tl.arange(0, 128)
    kcol = tl.arange(0, BK)
    total = tl.zeros([BK, 64], tl.float32)
    scores = tl.zeros([128, 64], tl.float32)
    states = tl.zeros([BK, 64], tl.float32)
    overlap = 0.0
    for step in tl.range(0, GROUP * SPLITS, num_stages=STAGES):
        head = step // SPLITS
        vcol = (step % SPLITS) * BV + tl.arange(0, BV)
        upper = _stacked(do_ptr + head * V, dv_ptr + head * V, HV * V, vcol, valid, V, WIDTH)
        delta = load_rows(delta_ptr + head * V, HV * V, rows, vcol, valid, V, WIDTH)
        dh = load_state(dh_ptr + head * K * V, kcol, vcol, K, V)
        h = load_state(h_ptr + head * K * V, kcol, vcol, K, V)
        table = table_ptr + head * 320
        scores = tl.dot(upper, tl.trans(delta), scores, input_precision=DOT)
        states = tl.dot(dh, tl.trans(delta), states, input_precision=DOT)
        overlap += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
        # The product above has read the whole dR tile: it may be overwritten.
        out = dv_ptr + head * V + (stacked_rows % 64)[:, None] * (HV * V) + vcol[None, :]
        mask = (stacked_rows >= 64)[:, None] & (stacked_rows % 64 < valid)[:, None] & (vcol < V)[None, :]
        dV = upper.to(tl.float32) * tl.load(table + stacked_rows % 64)[:, None]
        tl.store(out, dV.to(dtype), mask=mask)
        if step % SPLITS == SPLITS - 1:
            last = tl.load(table + 256 + 63)
            states *= (tl.load(table + 128 + rows) * _inverse(k_rstd) * tl.load(table + rows))[None, :]
            through = tl.sum(states * kT.to(tl.float32), 0) * k_rstd
            # The last row's share enters dG twice, with opposite signs: left out, or it would drown a decayed gradient.
            through = tl.where(rows == valid - 1, 0.0, through)
            at_end = tl.exp(last) * overlap + tl.sum(through)
            total += states
            weighted = _weigh(scores, table, g_ptr + head, factor, k_rstd, valid, HV, dtype == tl.float32).to(dtype)
            total += tl.dot(tl.trans(qk), weighted, input_precision=DOT) * _inverse(k_rstd)[None, :]
            dG = tl.load(dg_ptr + head + rows * HV, mask=rows < valid, other=0.0) - through
            dG = tl.where(rows == valid - 1, dG + at_end, dG)
            dg = tl.cumsum(tl.where(rows < valid, dG, 0.0), 0, reverse=True)
            tl.store(dg_ptr + head + rows * HV, dg, mask=rows < valid)
            scores = tl.zeros([128, 64], tl.float32)
            states = tl.zeros([BK, 64], tl.float32)
            overlap = 0.0
    return total


@triton.jit(do_not_specialize=["scale", "inverse_scale", "documents", "T", "chunks_per_row"])
def gradient_kernel(
    do_ptr, q_ptr, k_ptr, g_ptr, rows_ptr, k_rstd_ptr, qscale_ptr, h_ptr, delta_ptr, dh_ptr, cu_ptr, offsets_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale, inverse_scale, documents, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, SPAN: tl.constexpr, L2NORM: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per (chunk, q/k head), its value heads one after the other; `dv_ptr` holds dR on entry, dV on exit. SPAN:
    delta is by chunk."""
    pid = tl.program_id(0)
    chunk = pid // H
    qk_head = pid - chunk * H
    if VARLEN:  # noqa: SIM102 (a constexpr guards a load)
        if (chunk < tl.load(offsets_ptr)) | (chunk >= tl.load(offsets_ptr + documents)):
            return
    token, valid = locate_chunk(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
    GROUP: tl.constexpr = HV // H
    rows = tl.arange(0, 64)
    stacked_rows = tl.arange(0, 128)
    kcol = tl.arange(0, BK)
    base = token * H + qk_head
    value_base = token * HV + qk_head * GROUP
    chunk_base = chunk.to(tl.int64) * HV + qk_head * GROUP
    delta_base = chunk.to(tl.int64) * 64 * HV + qk_head * GROUP if SPAN else value_base
    qk = _stacked(q_ptr + base * K, k_ptr + base * K, H * K, kcol, valid, K, BK)
    k = load_rows(k_ptr + base * K, H * K, rows, kcol, valid, K, BK)
    k_rstd = tl.load(k_rstd_ptr + base + rows * H, mask=rows < valid, other=0.0)
    factor = tl.where(stacked_rows < 64, qscale_ptr + base, k_rstd_ptr + base) + (stacked_rows % 64) * H
    factor = tl.load(factor, mask=stacked_rows % 64 < valid, other=0.0)
    stacked, same = _row_phase(
        do_ptr + value_base * V, dv_ptr + value_base * V, rows_ptr + chunk_base * 320, g_ptr + value_base,
        h_ptr + chunk_base * K * V,
        delta_ptr + delta_base * V, dg_ptr + value_base, dbeta_ptr + value_base, qk, k, factor, k_rstd, valid,
        HV, GROUP, K, V, BK, BV, DOT, STAGES,
    )  # fmt: skip
    # The row phase's dG, stored in dg, is read back by other threads.
    tl.debug_barrier()
    columns = _column_phase(
        do_ptr + value_base * V, dv_ptr + value_base * V, rows_ptr + chunk_base * 320, g_ptr + value_base,
        h_ptr + chunk_base * K * V,
        delta_ptr + delta_base * V, dh_ptr + chunk_base * K * V, dg_ptr + value_base,
        qk, tl.trans(k), factor, k_rstd, valid, HV, GROUP, K, V, BK, BV, DOT, STAGES,
    )  # fmt: skip
    lower = tl.trans(columns)
    lower = tl.reshape(tl.permute(tl.join(tl.zeros([64, BK], tl.float32), lower), (2, 0, 1)), [128, BK])
    top = stacked_rows < 64
    # The diagonal: dq_r += scale same_r kappa_r k_r, dk_r += same_r qscale_r q_r.
    other = tl.where(top, k_rstd_ptr + base, qscale_ptr + base) + (stacked_rows % 64) * H
    same = _twice(same) * tl.load(other, mask=stacked_rows % 64 < valid, other=0.0)
    swapped = _stacked(k_ptr + base * K, q_ptr + base * K, H * K, kcol, valid, K, BK).to(tl.float32)
    gradient = (stacked + lower + same[:, None] * swapped) * tl.where(top, scale, 1.0)[:, None]
    if L2NORM:
        # d/dx of x (sum x^2 + 1e-6)^-1/2; q's factor is qscale / scale.
        factor = (factor * tl.where(top, inverse_scale, 1.0))[:, None]
        normed = qk.to(tl.float32) * factor
        gradient = factor * (gradient - tl.sum(gradient * normed, 1)[:, None] * normed)
    out = tl.where(top[:, None], dq_ptr + base * K, dk_ptr + base * K) + (stacked_rows % 64)[:, None] * (H * K)
    mask = (stacked_rows % 64 < valid)[:, None] & (kcol < K)[None, :]
    tl.store(out + kcol[None, :], gradient.to(dq_ptr.dtype.element_ty), mask=mask)
