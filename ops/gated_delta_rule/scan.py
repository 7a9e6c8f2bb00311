"""Sequential kernels of the gated delta rule: the forward walk (output, or a replay of h and delta) and its adjoint.

Both walk one (document, value head, V block) chain over its chunks with the state in fp32 registers; no column of the
state depends on another, so V splits freely into more chains. Left operands that need a transpose are tiles loaded from
memory, never results of a matrix product: Triton 3.4 to 3.7.0 miscompiles `dot(trans(product), .)` on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rounding import rounded
from .device import (
    load_rows,
    load_state,
    load_turned,
    locate_document,
    locate_piece,
    store_rows,
    store_state,
    store_turned,
)

TABLE = tl.constexpr(320)  # floats of one (chunk, value head) in the row table, see scores.py


@triton.jit
def dot_two_terms(left, right, accumulator, DOT: tl.constexpr):
    """accumulator + left right, the fp32 right operand in two terms of left's 16-bit type.

    With equal keys and beta = 1 rows cancel and 64 roundings along one key add up: one term leaves errors of 2e-2 in dv
    and 3e-2 in dbeta, two leave 6e-3 and 5e-3.
    """
    high = rounded(right, left.dtype)
    accumulator = tl.dot(left, high.to(left.dtype), accumulator, input_precision=DOT)
    if left.dtype != tl.float32:
        accumulator = tl.dot(left, (right - high).to(left.dtype), accumulator, input_precision=DOT)
    return accumulator


@triton.jit
def forward_chain(
    q_ptr, k_ptr, v_ptr, rows_ptr, p_ptr, x_ptr, h0_ptr, cu_ptr, offsets_ptr,
    o_ptr, ht_ptr, h_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, table_ptr, windows_ptr, states_ptr,
    pid, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, HAS_H0: tl.constexpr, STORE_HT: tl.constexpr, STORE_H: tl.constexpr, OUTPUT: tl.constexpr,
    SPAN: tl.constexpr, LEG: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S <- S0; per chunk E = V - gamma K S, delta = E + X (beta E), O = scale (gamma Q S + P beta delta), S <- next.

    SPAN: documents are parts of a span (`span_tables`), delta is by chunk. LEG: a start state every so many chunks.
    """
    SPLITS: tl.constexpr = (V + BV - 1) // BV
    split = pid % SPLITS
    head = (pid // SPLITS) % HV
    index = pid // (SPLITS * HV)
    if KIND == 0:
        start, length, first = locate_document(index, cu_ptr, offsets_ptr, T, chunks_per_row, VARLEN)
        document = index
        before: tl.constexpr = 0
        after: tl.constexpr = 0
    else:
        start, length, first, document, before, after = locate_piece(index, table_ptr)
    if KIND == 2:
        # The state before a window is nothing to the one at its end: the window is walked from zero.
        window = tl.load(windows_ptr + (index * HV + head) * 2)
        skipped = tl.maximum(window, 0)
        start += skipped * 64
        first += skipped
        length = tl.where(after > 0, length - skipped * 64, 0)
        before = tl.where(window < 0, before, 1)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    WIDTH: tl.constexpr = V if V % BV == 0 else BV
    qk_head = head // (HV // H)
    rows = tl.arange(0, 64)
    kcol = tl.arange(0, BK)
    vcol = split * BV + tl.arange(0, BV)
    state = (document.to(tl.int64) * HV + head) * K * V
    own = (index.to(tl.int64) * HV + head) * K * V
    S = tl.zeros([BK, BV], tl.float32)
    if SPAN:
        source = tl.load(source_ptr + document).to(tl.int64)
        if source >= 0:
            S = load_turned(starts_ptr + (source * HV + head) * K * V, kcol, vcol, K, V)
        elif HAS_H0:
            S = load_state(h0_ptr + ((-1 - source) * HV + head) * K * V, kcol, vcol, K, V).to(tl.float32)
    elif HAS_H0 and before == 0:
        S = load_state(h0_ptr + state, kcol, vcol, K, V).to(tl.float32)
    if KIND == 1 and before > 0:
        S = load_state(states_ptr + own, kcol, vcol, K, V)
    slot = start // (64 * LEG) - 1 if LEG else start * 0
    for i in tl.range(0, tl.cdiv(length, 64), num_stages=STAGES):
        token = start + i * 64
        valid = tl.minimum(length - i * 64, 64)
        k = load_rows(k_ptr + (token * H + qk_head) * K, H * K, rows, kcol, valid, K, BK)
        x = load_rows(x_ptr + (token * HV + head) * 64, HV * 64, rows, rows, valid, 64, 64)
        v = load_rows(v_ptr + (token * HV + head) * V, HV * V, rows, vcol, valid, V, WIDTH)
        table = rows_ptr + ((first + i) * HV + head) * TABLE
        beta = tl.load(table + rows)
        k_start = tl.load(table + 64 + rows)
        k_end = tl.load(table + 128 + rows)
        Sd = S.to(dtype)
        if LEG:  # noqa: SIM102 (a constexpr guards a store)
            if ((i > 0) | (before > 0)) & (i % LEG == 0):
                store_turned(starts_ptr + ((slot + i // LEG) * HV + head) * K * V, S, kcol, vcol, K, V)
        if STORE_H:
            store_state(h_ptr + ((first + i) * HV + head) * K * V, Sd, kcol, vcol, K, V)
        E = v.to(tl.float32) - k_start[:, None] * tl.dot(k, Sd, input_precision=DOT)
        delta = dot_two_terms(x, beta[:, None] * E, E, DOT)
        if STORE_H:
            at = (first + i) * 64 if SPAN else token
            store_rows(delta_ptr + (at * HV + head) * V, delta, HV * V, rows, vcol, valid, V, WIDTH)
        if OUTPUT:
            q = load_rows(q_ptr + (token * H + qk_head) * K, H * K, rows, kcol, valid, K, BK)
            p = load_rows(p_ptr + ((first + i) * HV + head) * 4096, 64, rows, rows, 64, 64, 64)
            q_start = tl.load(table + 192 + rows)
            O = q_start[:, None] * tl.dot(q, Sd, input_precision=DOT)
            O += tl.dot(p, (beta[:, None] * delta).to(dtype), input_precision=DOT)
            store_rows(o_ptr + (token * HV + head) * V, O, HV * V, rows, vcol, valid, V, WIDTH)
        decayed = S * tl.exp(tl.load(table + 256 + 63))
        S = dot_two_terms(tl.trans(k), (beta * k_end)[:, None] * delta, decayed, DOT)
    if KIND == 2 and after > 0:
        store_state(states_ptr + own + HV * K * V, S, kcol, vcol, K, V)
    elif STORE_HT and after == 0:
        store_state(ht_ptr + state, S, kcol, vcol, K, V)
    if SPAN and LEG:  # noqa: SIM102 (a constexpr guards a load)
        if tl.load(end_ptr + document) == -3:
            slot += tl.cdiv(length, 64) // LEG
            store_turned(starts_ptr + (slot * HV + head) * K * V, S, kcol, vcol, K, V)


@triton.jit
def adjoint_chain(
    do_ptr, dht_ptr, q_ptr, k_ptr, rows_ptr, p_ptr, x_ptr, cu_ptr, offsets_ptr,
    dh_ptr, dr_ptr, dh0_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr, table_ptr, windows_ptr, states_ptr,
    pid, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, HAS_DHT: tl.constexpr, STORE_DH0: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Chunks in reverse: dVn = P^T dO + decayed K dS, dR = dVn + X^T (beta dVn), dS <- the chunk's start.

    SPAN: documents are parts of a span (`span_tables`); what crosses its ends is in `carried_ptr` and `carry_ptr`.
    """
    SPLITS: tl.constexpr = (V + BV - 1) // BV
    split = pid % SPLITS
    head = (pid // SPLITS) % HV
    index = pid // (SPLITS * HV)
    if KIND == 0:
        start, length, first = locate_document(index, cu_ptr, offsets_ptr, T, chunks_per_row, VARLEN)
        document = index
        before: tl.constexpr = 0
        after: tl.constexpr = 0
    else:
        start, length, first, document, before, after = locate_piece(index, table_ptr)
    if KIND == 2:
        # The adjoint behind a window is nothing to the one at its start.
        window = tl.load(windows_ptr + (index * HV + head) * 2 + 1)
        length = tl.where(window < 0, length, tl.minimum(length, window * 64))
        length = tl.where(before > 0, length, 0)
        after = tl.where(window < 0, after, 1)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    WIDTH: tl.constexpr = V if V % BV == 0 else BV
    qk_head = head // (HV // H)
    rows = tl.arange(0, 64)
    kcol = tl.arange(0, BK)
    vcol = split * BV + tl.arange(0, BV)
    state = (document.to(tl.int64) * HV + head) * K * V
    own = (index.to(tl.int64) * HV + head) * K * V
    dS = tl.zeros([BK, BV], tl.float32)
    if SPAN:
        end = tl.load(end_ptr + document).to(tl.int64)
        if end <= -3:
            dS = load_state(carried_ptr + ((-3 - end) * HV + head) * K * V, kcol, vcol, K, V)
        elif HAS_DHT:
            dS = load_state(dht_ptr + (tl.maximum(end, 0) * HV + head) * K * V, kcol, vcol, K, V).to(tl.float32)
    elif HAS_DHT and after == 0:
        dS = load_state(dht_ptr + state, kcol, vcol, K, V).to(tl.float32)
    if KIND == 1 and after > 0:
        dS = load_state(states_ptr + own, kcol, vcol, K, V)
    chunks = tl.cdiv(length, 64)
    for j in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - j
        token = start + i * 64
        valid = tl.minimum(length - i * 64, 64)
        q = load_rows(q_ptr + (token * H + qk_head) * K, H * K, rows, kcol, valid, K, BK)
        k = load_rows(k_ptr + (token * H + qk_head) * K, H * K, rows, kcol, valid, K, BK)
        x = load_rows(x_ptr + (token * HV + head) * 64, HV * 64, rows, rows, valid, 64, 64)
        do = load_rows(do_ptr + (token * HV + head) * V, HV * V, rows, vcol, valid, V, WIDTH)
        table = rows_ptr + ((first + i) * HV + head) * TABLE
        beta = tl.load(table + rows)
        k_start = tl.load(table + 64 + rows)
        k_end = tl.load(table + 128 + rows)
        q_start = tl.load(table + 192 + rows)
        p = load_rows(p_ptr + ((first + i) * HV + head) * 4096, 64, rows, rows, 64, 64, 64)
        dSd = dS.to(dtype)
        if KIND != 2:
            store_state(dh_ptr + ((first + i) * HV + head) * K * V, dSd, kcol, vcol, K, V)
        dVn = k_end[:, None] * tl.dot(k, dSd, input_precision=DOT)
        dVn += tl.dot(tl.trans(p), do, input_precision=DOT)
        dR = dot_two_terms(tl.trans(x), beta[:, None] * dVn, dVn, DOT)
        if KIND != 2:
            store_rows(dr_ptr + (token * HV + head) * V, dR, HV * V, rows, vcol, valid, V, WIDTH)
        dO = (q_start[:, None] * do.to(tl.float32)).to(dtype)
        dS = dS * tl.exp(tl.load(table + 256 + 63)) + tl.dot(tl.trans(q), dO, input_precision=DOT)
        dZ = (-(beta * k_start)[:, None] * dR).to(dtype)
        dS += tl.dot(tl.trans(k), dZ, input_precision=DOT)
    if SPAN:
        target = tl.load(target_ptr + document).to(tl.int64)
        if target == -1:
            store_state(carry_ptr + head * K * V, dS, kcol, vcol, K, V)
        if STORE_DH0:  # noqa: SIM102 (a constexpr guards a store)
            if target >= 0:
                store_state(dh0_ptr + (target * HV + head) * K * V, dS, kcol, vcol, K, V)
    elif KIND == 2 and before > 0:
        store_state(states_ptr + own - HV * K * V, dS, kcol, vcol, K, V)
    elif STORE_DH0 and before == 0:
        store_state(dh0_ptr + state, dS, kcol, vcol, K, V)


@triton.jit(do_not_specialize=["T", "chunks_per_row"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, p_ptr, x_ptr, h0_ptr, cu_ptr, offsets_ptr,
    o_ptr, ht_ptr, h_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, table_ptr, windows_ptr, states_ptr,
    T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, HAS_H0: tl.constexpr, STORE_HT: tl.constexpr, STORE_H: tl.constexpr, OUTPUT: tl.constexpr,
    SPAN: tl.constexpr, LEG: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per (document or piece, value head, V block)."""
    forward_chain(
        q_ptr, k_ptr, v_ptr, rows_ptr, p_ptr, x_ptr, h0_ptr, cu_ptr, offsets_ptr,
        o_ptr, ht_ptr, h_ptr, delta_ptr, starts_ptr, source_ptr, end_ptr, table_ptr, windows_ptr, states_ptr,
        tl.program_id(0), T, chunks_per_row,
        H, HV, K, V, BK, BV, VARLEN, HAS_H0, STORE_HT, STORE_H, OUTPUT, SPAN, LEG, KIND, DOT, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chains", "T", "chunks_per_row"])
def adjoint_kernel(
    do_ptr, dht_ptr, q_ptr, k_ptr, v_ptr, rows_ptr, p_ptr, x_ptr, h0_ptr, cu_ptr,
    offsets_ptr, dh_ptr, dr_ptr, dh0_ptr, h_ptr, delta_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr,
    leg_cu_ptr, leg_offsets_ptr, leg_source_ptr, starts_ptr, table_ptr, windows_ptr, adjoints_ptr, states_ptr,
    chains, T, chunks_per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr, STORE_DH0: tl.constexpr, REPLAY: tl.constexpr,
    SPAN: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The adjoint walk reads neither h nor delta, so with REPLAY the CTAs past `chains` rebuild them beside it.

    SPAN: leg by leg."""
    pid = tl.program_id(0)
    if pid < chains:
        adjoint_chain(
            do_ptr, dht_ptr, q_ptr, k_ptr, rows_ptr, p_ptr, x_ptr, cu_ptr, offsets_ptr,
            dh_ptr, dr_ptr, dh0_ptr, end_ptr, target_ptr, carried_ptr, carry_ptr, table_ptr, windows_ptr, adjoints_ptr,
            pid, T, chunks_per_row,
            H, HV, K, V, BK, BV, VARLEN, HAS_DHT, STORE_DH0, SPAN, KIND, DOT, STAGES,
        )  # fmt: skip
    elif REPLAY:
        forward_chain(
            q_ptr, k_ptr, v_ptr, rows_ptr, p_ptr, x_ptr, h0_ptr, leg_cu_ptr, leg_offsets_ptr,
            dr_ptr, dh0_ptr, h_ptr, delta_ptr, starts_ptr, leg_source_ptr, None, table_ptr, windows_ptr, states_ptr,
            pid - chains, T, chunks_per_row,
            H, HV, K, V, BK, BV, VARLEN, HAS_H0, False, True, False, SPAN, 0, KIND, DOT, STAGES,
        )  # fmt: skip
