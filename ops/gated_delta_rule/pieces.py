"""Documents cut into pieces on the device, for few heads and long documents: all pieces are walked at once.

A walk is as deep as the longest document and as wide as its heads: at (2, 6) 12 chains leave 120 multiprocessors idle.
A document of more than L chunks (`configs.piece_length`) becomes pieces of L, the last one shorter; the chunk grid
stays, so prep, scores and gradients see none of it. Before the walks:

1. summaries: every piece but the last of its document is walked without output, the first from the initial state, the
   others from zero; it leaves its end state where the next piece starts;
2. maps M of the pieces between, with which a start state goes through a piece to its end (`map_hopper.py`, or
   `kcp/map_kernel.py` for the classes that walk with `scan.py`);
3. the fold, in order: S_{s+1} = M_s S_s + b_s. The adjoint folds the same maps, transposed, from the end.

**Windows.** Where gates decay, the end state of a piece comes from its last chunks alone. Per piece and value head b =
G_C + sum_t log max(1, |1 - beta_t |k_t|^2|) bounds, chunk by chunk, the log of the norm of what a chunk does to a state
(prod_t e^g_t (I - beta_t k_t k_t^T)). The window begins at the last chunk with sums of b <= -`configs.FAINT` from it,
and from every chunk before it, to the end: a state or an update of size 1 there leaves less than 4e-44 at the end,
where fp32 ends. A summary walks the window alone, from zero; the piece has no map and the fold begins anew behind it.
The adjoint has windows of first chunks likewise. A piece without one is walked whole, as is each in which a gate, beta
or key is not finite: it reaches the next piece. Other values that are not finite, and what comes to a piece with a
window, end with the piece.

A document of one piece is walked at once as ever. Nothing depends on what else is in the pack, so packed = alone in
every bit.

**Slots.** How many pieces there are, the host does not know. Piece i of document n has slot floor(o_n / L) + n + i, o_n
the chunks before the document: never two in one, and floor(NC / L) + N slots are enough. Table row of a slot, int64:
first token, tokens, first chunk, document, pieces of the document before it, after it (both -1: slot without a piece),
and two that pad it to 64 bytes. Windows [slots, HV, 2] int32: first chunk of the forward's, chunks of the adjoint's, -1
where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..triton_launch import launch
from . import configs
from .arena import Arena
from .configs import block_width, next_power_of_two
from .piece_kernels import fold_kernel, piece_kernel
from .walks import PIECES, SUMMARIES, Chunks, Documents, adjoint_summaries, forward_walk, piece_maps

if TYPE_CHECKING:
    from .launch import Problem

Tensor = torch.Tensor
FOLD = {"BN": 16, "STAGES": 2}


def fold_warps(BK: int) -> int:
    """A map of 128 x 128 is half the registers of eight warps."""
    return 8 if BK == 128 else 4


class Pieces:
    """The pieces of one call: table, windows and maps, and the states between them by direction."""

    def __init__(
        self, p: Problem, length: int, documents: Documents, chunks: Chunks, k_rstd: Tensor, l2norm: bool, arena: Arena
    ) -> None:
        self.p, self.chunks, self.arena = p, chunks, arena
        self.slots = p.chunks // length + p.documents
        self.table = arena.bind("piece_table", (self.slots, 8), torch.int64)
        self.windows = arena.bind("piece_windows", (self.slots, p.HV, 2), torch.int32)
        arguments = (
            chunks.k, k_rstd, chunks.table, documents.cu, documents.offsets, self.table, self.windows, -configs.FAINT,
            p.documents, p.documents.bit_length(), p.T, p.chunks_per_row,
        )  # fmt: skip
        launch(
            piece_kernel, self.slots * p.HV, arguments, p.device, H=p.H, HV=p.HV, K=p.K, BK=block_width(p.K),
            LENGTH=length, BLOCK=max(next_power_of_two(length), 16), VARLEN=p.varlen, L2NORM=l2norm, num_warps=4,
        )  # fmt: skip
        self.maps = arena.bind("piece_maps", (self.slots, p.HV, p.K, p.K), torch.float32)
        piece_maps(p, chunks, self.slots, self.table, self.windows, self.maps)

    def walked(self, states: Tensor | None = None, adjoints: Tensor | None = None) -> Documents:
        """The pieces as the walks take them, from these start states and end adjoints."""
        return Documents(self.slots, None, None, kind=PIECES, table=self.table, states=states, adjoints=adjoints)

    def starts(self, h0: Tensor | None, scratch: Tensor) -> Tensor:
        """Start state of every piece but the first of a document, by slot. `scratch` stands in for absent outputs."""
        states = self._states("piece_states")
        summaries = self._summaries(states=states)
        forward_walk(
            self.p, self.chunks, summaries, h0, scratch, scratch, scratch, scratch,
            store_final=False, store_h=False, output=False,
        )  # fmt: skip
        self._fold(states, adjoint=False)
        return states

    def ends(self, do: Tensor, dht: Tensor | None) -> Tensor:
        """Adjoint of the end state of every piece but the last of a document, by slot."""
        states = self._states("piece_adjoints")
        summaries = self._summaries(adjoints=states)
        adjoint_summaries(self.p, self.chunks, summaries, do, dht)
        self._fold(states, adjoint=True)
        return states

    def _summaries(self, **states: Tensor) -> Documents:
        return Documents(self.slots, None, None, kind=SUMMARIES, table=self.table, windows=self.windows, **states)

    def _states(self, name: str) -> Tensor:
        return self.arena.bind(name, (self.slots, self.p.HV, self.p.K, self.p.V), torch.float32)

    def _fold(self, states: Tensor, adjoint: bool) -> None:
        p, BK = self.p, block_width(self.p.K)
        arguments = (self.table, self.windows, self.maps, states)
        launch(
            fold_kernel, self.slots * p.HV * -(-p.V // FOLD["BN"]), arguments, p.device, HV=p.HV, K=p.K, V=p.V,
            BK=BK, ADJOINT=adjoint, DOT=p.dot, num_warps=fold_warps(BK), **FOLD,
        )  # fmt: skip
