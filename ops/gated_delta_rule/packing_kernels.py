"""Kernels over the document boundaries: device-side checks without a host sync, and rows that no document owns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["documents", "T"], debug=True)
def check_packing_kernel(cu_ptr, offsets_ptr, documents, T, BLOCK: tl.constexpr):
    """Device assert, before any kernel reads through them, unless boundaries and chunk offsets describe T tokens."""
    previous = tl.load(cu_ptr).to(tl.int64)
    tl.device_assert(previous == 0, "cu_seqlens: expected the first entry to be 0")
    tl.device_assert(tl.load(offsets_ptr) == 0, "chunk_offsets: expected the first entry to be 0")
    for first in range(0, documents, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < documents
        start = tl.load(cu_ptr + index, mask=inside, other=0).to(tl.int64)
        end = tl.load(cu_ptr + index + 1, mask=inside, other=0).to(tl.int64)
        tl.device_assert(
            (start <= end) & (start >= 0) & (end <= T), "cu_seqlens: expected non-decreasing values in [0, T]"
        )
        chunks = tl.load(offsets_ptr + index + 1, mask=inside, other=0).to(tl.int64)
        chunks -= tl.load(offsets_ptr + index, mask=inside, other=0).to(tl.int64)
        tl.device_assert(chunks == (end - start + 63) // 64, "chunk_offsets: do not belong to these cu_seqlens")


@triton.jit
def _zero(ptr, first, last, BLOCK: tl.constexpr):
    """Writes 0 to elements first .. last - 1, all CTAs together."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(first + tl.program_id(0).to(tl.int64) * BLOCK, last, step):
        index = at + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros([BLOCK], tl.float32).to(ptr.dtype.element_ty), mask=index < last)


@triton.jit(do_not_specialize=["documents", "T"])
def zero_output_tail_kernel(
    cu_ptr, o_ptr, gcum_ptr, k_rstd_ptr, qscale_ptr, x_ptr, delta_ptr, documents, T,
    WIDTH: tl.constexpr, HV: tl.constexpr, H: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows after the last document: o and the tapes are 0."""
    first = tl.load(cu_ptr + documents).to(tl.int64)
    last = T.to(tl.int64)
    _zero(o_ptr, first * WIDTH, last * WIDTH, BLOCK)
    _zero(gcum_ptr, first * HV, last * HV, BLOCK)
    _zero(k_rstd_ptr, first * H, last * H, BLOCK)
    _zero(qscale_ptr, first * H, last * H, BLOCK)
    _zero(x_ptr, first * HV * 64, last * HV * 64, BLOCK)
    if FULL:
        _zero(delta_ptr, first * WIDTH, last * WIDTH, BLOCK)


@triton.jit(do_not_specialize=["documents", "T"])
def zero_gradient_tail_kernel(
    cu_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, documents, T,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows after the last document: all gradients 0."""
    first = tl.load(cu_ptr + documents).to(tl.int64)
    last = T.to(tl.int64)
    _zero(dq_ptr, first * KEY_WIDTH, last * KEY_WIDTH, BLOCK)
    _zero(dk_ptr, first * KEY_WIDTH, last * KEY_WIDTH, BLOCK)
    _zero(dv_ptr, first * VALUE_WIDTH, last * VALUE_WIDTH, BLOCK)
    _zero(dg_ptr, first * HV, last * HV, BLOCK)
    _zero(dbeta_ptr, first * HV, last * HV, BLOCK)
