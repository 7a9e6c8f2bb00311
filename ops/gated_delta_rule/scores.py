"""Chunk-parallel operands of both walks: the causal scores P and the row factors, each computed once per (chunk, head).

The row table holds, contiguous for each (chunk, value head), five vectors of 64: beta, gamma kappa,
kappa gamma_C / gamma, gamma qscale, and G (padding rows: beta 0, G at its last valid value). A strided gather inside
the walks would fetch one 32-byte sector for every 4-byte factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import gate_sums, load_decay, load_rows, locate_chunk


@triton.jit(do_not_specialize=["documents", "T", "chunks_per_row"])
def score_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, gcum_ptr, k_rstd_ptr, qscale_ptr, cu_ptr, offsets_ptr, rows_ptr, p_ptr,
    documents, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One CTA per (chunk, q/k head): Q K^T once, then P = qscale_r Gamma_ri kappa_i (q_r k_i), i <= r by value head."""
    pid = tl.program_id(0)
    chunk = pid // H
    qk_head = pid - chunk * H
    if VARLEN:  # noqa: SIM102 (a constexpr guards a load)
        if chunk >= tl.load(offsets_ptr + documents):
            return
    token, valid = locate_chunk(chunk, cu_ptr, offsets_ptr, documents, T, chunks_per_row, VARLEN)
    rows = tl.arange(0, 64)
    kcol = tl.arange(0, BK)
    inside = rows < valid
    base = token * H + qk_head
    q = load_rows(q_ptr + base * K, H * K, rows, kcol, valid, K, BK)
    k = load_rows(k_ptr + base * K, H * K, rows, kcol, valid, K, BK)
    k_rstd = tl.load(k_rstd_ptr + base + rows * H, mask=inside, other=0.0)
    qscale = tl.load(qscale_ptr + base + rows * H, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=DOT) * qscale[:, None] * k_rstd[None, :]
    causal = rows[:, None] >= rows[None, :]
    for head in range(qk_head * (HV // H), (qk_head + 1) * (HV // H)):
        beta = tl.load(beta_ptr + token * HV + head + rows * HV, mask=inside, other=0.0).to(tl.float32)
        if k_ptr.dtype.element_ty == tl.float32:
            G, low = gate_sums(g_ptr + token * HV + head, HV, rows, valid)
            to_end = tl.sum(tl.where(rows == 63, G, 0.0), 0) - G + (tl.sum(tl.where(rows == 63, low, 0.0), 0) - low)
            difference = G[:, None] - G[None, :] + (low[:, None] - low[None, :])
        else:
            G, last = load_decay(gcum_ptr + token * HV + head, HV, rows, valid)
            to_end = last - G
            difference = G[:, None] - G[None, :]
        table = rows_ptr + (chunk.to(tl.int64) * HV + head) * 320
        tl.store(table + rows, beta)
        tl.store(table + 64 + rows, tl.exp(G) * k_rstd)
        tl.store(table + 128 + rows, tl.exp(to_end) * k_rstd)
        tl.store(table + 192 + rows, tl.exp(G) * qscale)
        tl.store(table + 256 + rows, G)
        # The difference is masked before exp: an unmasked one overflows, and inf * 0 is NaN.
        decay = tl.where(causal, tl.exp(tl.where(causal, difference, 0.0)), 0.0)
        out = p_ptr + (chunk.to(tl.int64) * HV + head) * 4096
        tl.store(out + rows[:, None] * 64 + rows[None, :], (scores * decay).to(p_ptr.dtype.element_ty))
