"""The backward in spans of chunks: how long they are, and how much each needs. Shapes alone decide, on every card.

A leg is 32 chunks of a document, counted from its start, so where legs lie does not depend on the packing. The
forward of save_mode "light" keeps the fp32 state in front of every leg but a document's first, so all legs of a
span are replayed side by side. A span begins at the first leg that starts at or behind a multiple of `length`
chunks of the whole grid, and at most one document reaches across its start: the fp32 adjoint of that one state is all
that goes from one span to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..varlen import CHUNK
from . import configs


class SpanPlan(NamedTuple):
    """`count` spans of `length` chunks.

    Attributes:
        rows: bound on the chunks of a span, which sizes its buffers.
        chains: bound on the documents, or parts of one, in a span.
        legs: bound on its legs.
        cut: chunks of the pieces that are its chains where documents are walked in pieces (`pieces.py`).
    """

    length: int
    count: int
    rows: int
    chains: int
    legs: int
    cut: int | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Ints of the eight tables of a span, see `span_tables`: each begins at a multiple of 16 bytes."""
        chains, legs = self.chains, self.legs
        sizes = (chains + 1, chains + 1, chains, chains, chains, legs + 1, legs + 1, legs)
        return tuple(-(-size // 4) * 4 for size in sizes)


def start_count(tokens: Any) -> Any:
    """Start states that the forward keeps of `tokens` rows, of all batch rows together: a bound without cu_seqlens.

    Piece j > 0 of a document that begins at row r has slot (r // rows of a leg) + j - 1. No two share one: the first
    kept leg of a later document starts a whole leg behind any start in an earlier one. One more than that, for a tensor
    that may be empty makes a trace ask whether it is, and the length would no longer be dynamic.
    """
    return tokens // (CHUNK * configs.SPANS.leg) + 1


def chunk_bytes(HV: int, K: int, V: int, itemsize: int) -> int:
    """h, dh, delta, scores and row table of one chunk."""
    return HV * (itemsize * (2 * K * V + CHUNK * V + CHUNK * CHUNK) + 4 * 5 * CHUNK)


def plan_spans(
    tokens: int, documents: int, chunks: int, HV: int, K: int, V: int, itemsize: int, cut: int | None = None
) -> SpanPlan:  # fmt: skip
    """Spans of `tokens` rows in `documents`; `chunks` bounds the chunks of all, `cut` is `configs.piece_length`. Heads
    and widths become constants in a trace."""
    config = configs.SPANS
    HV, K, V = int(HV), int(K), int(V)
    leg = config.leg
    step = leg if cut is None else cut  # spans begin at pieces
    chunks = min(chunks, (tokens + (CHUNK - 1) * documents) // CHUNK)
    each = chunk_bytes(HV, K, V, itemsize)
    if chunks * each <= config.alone_bytes:
        length = chunks
    else:
        # Pieces are side by side, whatever the documents: in whole rounds of one chain a multiprocessor.
        chains = HV * -(-V // configs.select(itemsize, K, V).scan.BV)
        round_ = step * max(configs.SM_COUNT // chains, 1) if cut is not None else step
        length = -(-chunks // 2)
        length = min(-(-length // round_) * round_, max(config.span_bytes // each // round_ * round_, step))
    if length >= chunks:
        length, count, rows = max(chunks, 1), 1, chunks
    else:
        count, rows = -(-chunks // length), length + (step - 1 if documents > 1 else 0)
    if cut is not None:
        pieces, legs = (-(-length // n) if documents == 1 else min(documents, rows) + rows // n for n in (cut, leg))
        return SpanPlan(length, count, rows, pieces, legs, cut)
    legs = -(-length // leg) if documents == 1 else min(documents, length) + length // leg
    return SpanPlan(length, count, rows, min(documents, rows), legs, None)
