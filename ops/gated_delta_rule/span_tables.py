"""Where the documents and legs of every span lie, found on the device from the boundaries.

The walks, the operands and the gradients take a span's parts for documents: each table holds, as `cu_seqlens` and
`chunk_offsets` do, the first token and first chunk of every part, chunks counted from the span's start, and one entry
more. What the bound leaves over are empty parts at the end. Three lists say whose states they are:

    source   the state before a part: slot of the start states, or -1 - n for document n's initial state
    end      its adjoint behind the part: n for document n's final state, -3 carried over from the span behind
    target   where the adjoint before the part goes: n, document n's initial state, or -1, carried on

Where documents are walked in pieces, those are the parts: an end is -3 - slot, by the slots of `pieces.py`, and a
target that is no document's is -2, since nothing is carried. Chunks are counted from the multiple of `length` before
the span's start then: the host knows where that lies in the tables of all chunks. End and target of an empty part are
-2.

Tables of a span, in order: the chains (parts of documents) with their tokens, chunks, source, end and target, then the
legs with tokens, chunks and source.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first(ptr, index, step, VARLEN: tl.constexpr):
    """First token, or first chunk, of a document."""
    if VARLEN:
        value = tl.load(ptr + index).to(tl.int32)
    else:
        value = index * step
    return value


@triton.jit
def _document(chunk, offsets_ptr, documents, chunks_per_row, VARLEN: tl.constexpr):
    """The last document whose first chunk is <= `chunk`."""
    low = chunk * 0
    size = documents
    while size > 1:
        half = size // 2
        before = _first(offsets_ptr, low + half, chunks_per_row, VARLEN) <= chunk
        low = tl.where(before, low + half, low)
        size -= half
    return low


@triton.jit
def _boundary(chunk, offsets_ptr, documents, chunks_per_row, STEP: tl.constexpr, VARLEN: tl.constexpr):
    """First chunk at or behind `chunk` that starts a leg or a piece, at most the number of chunks."""
    total = _first(offsets_ptr, documents, chunks_per_row, VARLEN)
    document = _document(chunk, offsets_ptr, documents, chunks_per_row, VARLEN)
    first = _first(offsets_ptr, document, chunks_per_row, VARLEN)
    behind = first + (chunk - first + STEP - 1) // STEP * STEP
    end = tl.minimum(behind, _first(offsets_ptr, document + 1, chunks_per_row, VARLEN))
    return tl.where(chunk < total, end, total)


@triton.jit
def _fill(tokens_ptr, chunks_ptr, count, bound, token, chunks, BLOCK: tl.constexpr):
    """Entries from `count` to `bound` are the end."""
    for at in range(0, bound + 1, BLOCK):
        index = at + tl.arange(0, BLOCK)
        left = (index >= count) & (index <= bound)
        tl.store(tokens_ptr + index, tl.zeros([BLOCK], tl.int32) + token, mask=left)
        tl.store(chunks_ptr + index, tl.zeros([BLOCK], tl.int32) + chunks, mask=left)


@triton.jit
def _mark(ptr, count, bound, value, BLOCK: tl.constexpr):
    for at in range(0, bound, BLOCK):
        index = at + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros([BLOCK], tl.int32) + value, mask=(index >= count) & (index < bound))


@triton.jit(do_not_specialize=["documents", "T", "chunks_per_row", "length", "chains", "legs"])
def span_tables_kernel(
    cu_ptr, offsets_ptr, out_ptr, documents, T, chunks_per_row, length, chains, legs,
    LEG: tl.constexpr, CUT: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA a span. CUT: chunks of a piece, 0 where documents are walked whole."""
    C1 = (chains + 4) // 4 * 4
    C = (chains + 3) // 4 * 4
    P1 = (legs + 4) // 4 * 4
    P = (legs + 3) // 4 * 4
    STEP: tl.constexpr = CUT if CUT else LEG
    span = tl.program_id(0)
    chain_tokens = out_ptr + span.to(tl.int64) * (2 * C1 + 3 * C + 2 * P1 + P)
    chain_chunks = chain_tokens + C1
    chain_source = chain_chunks + C1
    chain_end = chain_source + C
    chain_target = chain_end + C
    leg_tokens = chain_target + C
    leg_chunks = leg_tokens + P1
    leg_source = leg_chunks + P1
    begin = _boundary(span * length, offsets_ptr, documents, chunks_per_row, STEP, VARLEN)
    stop = _boundary(span * length + length, offsets_ptr, documents, chunks_per_row, STEP, VARLEN)
    origin = begin
    if CUT:
        origin = span * length
    chain_count = 0
    leg_count = 0
    last = 0
    for at in range(begin, stop, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        inside = chunk < stop
        document = _document(chunk, offsets_ptr, documents, chunks_per_row, VARLEN)
        inner = chunk - _first(offsets_ptr, document, chunks_per_row, VARLEN)
        token = _first(cu_ptr, document, T, VARLEN)
        slot = token // (64 * LEG) + inner // LEG - 1
        source = tl.where(inner == 0, -1 - document, slot)
        behind = _first(offsets_ptr, document + 1, chunks_per_row, VARLEN)
        after = tl.minimum(token + inner * 64 + 64, _first(cu_ptr, document + 1, T, VARLEN))
        last = tl.maximum(last, tl.max(tl.where(inside, after, 0)))
        if CUT:
            chain = inside & (inner % CUT == 0)
            end = tl.where(behind <= chunk + CUT, document, -3 - ((chunk - inner) // CUT + document + inner // CUT))
            target = tl.where(inner == 0, document, -2)
        else:
            chain = inside & ((inner == 0) | (chunk == begin))
            end = tl.where(behind <= stop, document, -3)
            target = tl.where(inner == 0, document, -1)
        index = chain_count + tl.cumsum(chain.to(tl.int32), 0) - 1
        kept = chain & (index < chains)
        tl.store(chain_tokens + index, token + inner * 64, mask=kept)
        tl.store(chain_chunks + index, chunk - origin, mask=kept)
        tl.store(chain_source + index, source, mask=kept)
        tl.store(chain_end + index, end, mask=kept)
        tl.store(chain_target + index, target, mask=kept)
        chain_count += tl.sum(chain.to(tl.int32))
        leg = inside & (inner % LEG == 0)
        index = leg_count + tl.cumsum(leg.to(tl.int32), 0) - 1
        kept = leg & (index < legs)
        tl.store(leg_tokens + index, token + inner * 64, mask=kept)
        tl.store(leg_chunks + index, chunk - origin, mask=kept)
        tl.store(leg_source + index, source, mask=kept)
        leg_count += tl.sum(leg.to(tl.int32))
    _fill(chain_tokens, chain_chunks, chain_count, chains, last, stop - origin, BLOCK)
    _fill(leg_tokens, leg_chunks, leg_count, legs, last, stop - origin, BLOCK)
    _mark(chain_source, chain_count, chains, -1, BLOCK)
    _mark(chain_end, chain_count, chains, -2, BLOCK)
    _mark(chain_target, chain_count, chains, -2, BLOCK)
    _mark(leg_source, leg_count, legs, -1, BLOCK)
