"""Documents cut into pieces on the device, for few heads and long documents: all pieces are walked at once.

A walk is as deep as the longest document and as wide as its heads: at (2, 6) 12 chains leave 120 multiprocessors idle.
A document of more than L chunks (`configs.piece_length`) becomes pieces of L, the last one shorter; the chunk grid
stays, so prep, scores and gradients see none of it. Before the walks:

1. summaries: every piece but the last of its document is walked without output, the first from the initial state, the
   others from zero; it leaves its end state where the next piece starts;
2. maps M of the pieces between, with which a start state goes through a piece to its end (`map_hopper.py`, or
   `kcp/map_kernel.py` for the classes that walk with `scan.py`);
3. the fold, in order: S_{s+1} = M_s S_s + b_s. The adjoint folds the same maps, transposed, from the end.

A document of one piece is walked at once as ever. Nothing depends on what else is in the pack, so packed = alone in
every bit.

**Slots.** How many pieces there are, the host does not know. Piece i of document n has slot floor(o_n / L) + n + i, o_n
the chunks before the document: never two in one, and floor(NC / L) + N slots are enough. Table row of a slot, int64:
first token, tokens, first chunk, document, pieces of the document before it, after it (both -1: slot without a piece),
and two that pad it to 64 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..triton_launch import launch
from .arena import Arena
from .configs import block_width
from .piece_kernels import fold_kernel, piece_table_kernel
from .walks import PIECES, SUMMARIES, Chunks, Documents, adjoint_summaries, forward_walk, piece_maps

if TYPE_CHECKING:
    from .launch import Problem

Tensor = torch.Tensor
FOLD = {"BN": 16, "STAGES": 2}
BLOCK = 128  # slots a CTA of the table kernel


def fold_warps(BK: int) -> int:
    """A map of 128 x 128 is half the registers of eight warps."""
    return 8 if BK == 128 else 4


class Pieces:
    """The pieces of one call: table and maps, and the states between them by direction."""

    def __init__(self, p: Problem, length: int, documents: Documents, chunks: Chunks, arena: Arena) -> None:
        self.p, self.length, self.documents, self.chunks, self.arena = p, length, documents, chunks, arena
        self.slots = p.chunks // length + p.documents
        self.table = arena.bind("piece_table", (self.slots, 8), torch.int64)
        arguments = (
            documents.cu, documents.offsets, self.table, self.slots, p.documents, p.documents.bit_length(), p.T,
            p.chunks_per_row, length,
        )  # fmt: skip
        launch(
            piece_table_kernel, -(-self.slots // BLOCK), arguments, p.device, VARLEN=p.varlen, BLOCK=BLOCK, num_warps=4
        )
        self.maps = arena.bind("piece_maps", (self.slots, p.HV, p.K, p.K), torch.float32)
        piece_maps(p, chunks, self.slots, self.table, self.maps)

    def walked(self, states: Tensor | None = None, adjoints: Tensor | None = None) -> Documents:
        """The pieces as the walks take them, from these start states and end adjoints."""
        return Documents(self.slots, None, None, kind=PIECES, table=self.table, states=states, adjoints=adjoints)

    def starts(self, h0: Tensor | None, scratch: Tensor) -> Tensor:
        """Start state of every piece but the first of a document, by slot. `scratch` stands in for absent outputs."""
        states = self._states("piece_states")
        summaries = Documents(self.slots, None, None, kind=SUMMARIES, table=self.table, states=states)
        forward_walk(
            self.p, self.chunks, summaries, h0, scratch, scratch, scratch, scratch,
            store_final=False, store_h=False, output=False,
        )  # fmt: skip
        self._fold(states, adjoint=False)
        return states

    def ends(self, do: Tensor, dht: Tensor | None) -> Tensor:
        """Adjoint of the end state of every piece but the last of a document, by slot."""
        states = self._states("piece_adjoints")
        summaries = Documents(self.slots, None, None, kind=SUMMARIES, table=self.table, adjoints=states)
        adjoint_summaries(self.p, self.chunks, summaries, do, dht)
        self._fold(states, adjoint=True)
        return states

    def _states(self, name: str) -> Tensor:
        return self.arena.bind(name, (self.slots, self.p.HV, self.p.K, self.p.V), torch.float32)

    def _fold(self, states: Tensor, adjoint: bool) -> None:
        p, BK = self.p, block_width(self.p.K)
        places = (self.documents.cu, self.documents.offsets, self.table)
        arguments = (*places, self.maps, states, p.chunks_per_row, self.length)
        launch(
            fold_kernel, p.documents * p.HV * -(-p.V // FOLD["BN"]), arguments, p.device, HV=p.HV, K=p.K, V=p.V,
            BK=BK, VARLEN=p.varlen, ADJOINT=adjoint, DOT=p.dot, num_warps=fold_warps(BK), **FOLD,
        )  # fmt: skip
