"""Bytes of the gated delta rule before it runs: the arena by phase, and what is saved for the backward.

Each formula is written once, over numbers that may be integers, SymInts or sympy symbols.

| buffer                  | bytes                 | bound in                                                         |
|-------------------------|-----------------------|------------------------------------------------------------------|
| gcum                    | 4 T HV                | inference on CUDA; backward when the forward's were not kept     |
| k_rstd, qscale          | 4 T H each            | as gcum                                                          |
| x                       | 64 e T HV             | as gcum                                                          |
| h                       | e NC HV K V           | backward, unless kept by save_mode "full"                        |
| delta                   | e T HV V              | as h                                                             |
| dh (adjoint of h)       | e NC HV K V           | backward on CUDA                                                 |
| row_table               | 1280 NC HV            | every phase on CUDA: row factors of each chunk                   |
| scores                  | 4096 e NC HV          | every phase on CUDA: decayed Q K^T of each chunk                 |

In spans (`spans.py`) a backward on CUDA that replays h and delta has, for L chunks at most in a span, L in the place of
NC in h, dh, row_table and scores, and

| delta                   | 64 e L HV V           |                                                                  |
| carry                   | 8 HV K V              | the adjoint from span to span, read and written in turn          |
| span_tables             | 4 bytes an entry      | where the parts of each span lie                                 |
| starts                  | 4 (T // 2048 + 1) HV K V | backward when the forward's were not kept                  |

Where a document may have more than L chunks (`configs.piece_length`, of heads, widths and dtype), the walks take it in
pieces (`pieces.py`), S = NC // L + N at most; row_table and scores are of all chunks then, in spans too, and

| piece_table             | 64 S                  | every phase on CUDA                                              |
| piece_windows           | 8 S HV                | as piece_table                                                   |
| piece_maps              | 4 S HV K K            | every phase on CUDA                                              |
| piece_states            | 4 S HV K V            | as piece_table, but not a backward given h or start states       |
| piece_adjoints          | 4 S HV K V            | every backward on CUDA                                           |

e is the bytes of an element of q, NC = T // 64 + N the bound on the chunks of N documents in T tokens. A buffer takes
a whole number of 256 bytes. Inside a step the CPU implementation adds tiles of at most `grid.TILE_ELEMENTS` elements
each; they do not grow with T and are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..validation import FLOATS, check_int, check_tensor
from ..varlen import CHUNK, Packing, check_index_vector, read_boundaries
from .arena import ALIGNMENT
from .checks import WIDTHS
from .configs import piece_length
from .spans import SpanPlan, plan_spans, start_count
from .tapes import FULL, KEPT, LIGHT, Tapes, chunk_bound, document_count

if TYPE_CHECKING:
    import sympy

    from ..kcp.context import KcpContext

PHASES = ("inference", "forward", "backward_replay", "backward_kept", "full")
_REBUILT = {"backward_replay": FULL, "backward_kept": ("h", "delta"), "full": ()}
_WALK = ("row_table", "scores")
_IN_SPANS = ("backward_replay", "backward_kept")
BOUND = {
    "cuda": {
        "inference": (*LIGHT, *_WALK),
        "forward": _WALK,
        **{phase: (*names, *_WALK, "dh") for phase, names in _REBUILT.items()},
    },
    "cpu": {"inference": (), "forward": (), **_REBUILT},
}


class Sizes(NamedTuple):
    """T tokens, NC bound on chunks, head counts and widths, e bytes of an element of q, f bytes of an fp32 tape's; N
    documents, by default those of a pack; R tokens that one of them may have, by default T."""

    T: Any
    NC: Any
    H: Any
    HV: Any
    K: Any
    V: Any
    e: Any
    f: Any = 4
    N: Any = None
    R: Any = None

    def bytes_of(self, buffer: str) -> Any:
        """Exact bytes of a buffer, before alignment."""
        if buffer == "gcum":
            return self.f * self.T * self.HV
        if buffer in ("k_rstd", "qscale"):
            return self.f * self.T * self.H
        if buffer == "x":
            return self.e * self.T * self.HV * CHUNK
        if buffer == "row_table":
            return self.f * self.NC * self.HV * 5 * CHUNK
        if buffer == "scores":
            return self.e * self.NC * self.HV * CHUNK * CHUNK
        if buffer == "delta":
            return self.e * self.T * self.HV * self.V
        if buffer == "starts":
            return self.f * start_count(self.T) * self.HV * self.K * self.V
        return self.e * self.NC * self.HV * self.K * self.V

    def spans(self, phase: str, device: str) -> SpanPlan | None:
        """The spans of a phase, None where it does not work in any."""
        if device != "cuda" or phase not in _IN_SPANS:
            return None
        shape = (self.HV, self.K, self.V, self.e)
        plan = plan_spans(self.T, self.documents, self.NC, *shape, self.cut(device))
        return plan if plan.count > 1 else None

    @property
    def documents(self) -> Any:
        return self.NC - self.T // CHUNK if self.N is None else self.N

    def cut(self, device: str) -> int | None:
        """Chunks of the pieces that documents are walked in, if they are. Heads and widths become constants in a
        trace."""
        rows = self.T if self.R is None else self.R
        return piece_length(rows, self.e, int(self.HV), int(self.K), int(self.V)) if device == "cuda" else None

    def buffers(
        self, phase: str, device: str, plan: SpanPlan | None, rows: Any, cut: int | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Bytes by name; `rows` is the plan's, or a symbol for it, `cut` that of the call."""
        part = self if plan is None else self._replace(NC=rows)
        sizes = {name: (self if name in LIGHT else part).bytes_of(name) for name in BOUND[device][phase]}
        sizes |= self._pieces(phase, plan, cut)
        if plan is None:
            return sizes
        if cut is not None:
            sizes |= {name: self.bytes_of(name) for name in _WALK}
        sizes["delta"] = self.e * CHUNK * rows * self.HV * self.V
        sizes["carry"] = 2 * self.f * self.HV * self.K * self.V
        sizes["span_tables"] = 4 * plan.count * sum(plan.widths)
        if phase == "backward_replay":
            sizes["starts"] = self.bytes_of("starts")
        return sizes

    def _pieces(self, phase: str, plan: SpanPlan | None, cut: int | None) -> dict[str, Any]:
        """What pieces of `cut` chunks add."""
        if cut is None:
            return {}
        slots = self.NC // cut + self.documents
        state, backward = self.f * slots * self.HV * self.K * self.V, phase not in ("inference", "forward")
        sizes = {"piece_table": 64 * slots, "piece_windows": 8 * slots * self.HV}
        sizes["piece_maps"] = self.f * slots * self.HV * self.K * self.K
        if phase != "full" and (plan is None or phase != "backward_kept"):
            sizes["piece_states"] = state
        return {**sizes, "piece_adjoints": state} if backward else sizes

    def arena_bytes(self, phase: str, device: str = "cuda") -> Any:
        """Integer (or SymInt) bytes of the arena in a phase."""
        plan = self.spans(phase, device)
        sizes = self.buffers(phase, device, plan, None if plan is None else plan.rows, self.cut(device))
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())


def sizes_of(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Sizes:
    """Sizes of a call from its tensors; `T` counts the rows of all batch rows."""
    rows = q.shape[0] * q.shape[1]
    wide = 8 if q.dtype == torch.float64 else 4
    heads = (q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    documents = document_count(q, cu_seqlens)
    return Sizes(rows, chunk_bound(q, cu_seqlens), *heads, q.itemsize, wide, documents, q.shape[1])


class WorkspaceLayout(dict[str, "sympy.Expr"]):
    """Bytes of the arena by phase, as sympy expressions in the symbols T, N, H, HV, K, V and e, and L, the chunks of a
    span, where a phase works in spans.

    Phases: "inference" (no gradient), "forward", then the backward with every tape rebuilt ("backward_replay"), with
    the light tapes kept ("backward_kept") and with save_mode "full" ("full").

    Attributes:
        values: symbol -> integer for the pack that the layout was made for.
    """

    def __init__(self, phases: dict[str, sympy.Expr], values: dict[sympy.Symbol, int]) -> None:
        super().__init__(phases)
        self.values = values

    def bytes(self, phase: str) -> int:
        """The expression of `phase` evaluated for the pack."""
        return int(self[phase].subs(self.values))


def gdn_workspace_layout(
    cu_seqlens: torch.Tensor | Packing,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype,
    save_mode: str = "light",
    reuse_recompute_tapes: bool | str = False,
    cp: KcpContext | None = None,
    tokens: int | None = None,
    device: str = "cuda",
) -> WorkspaceLayout:
    """Bytes of the arena of `gated_delta_rule` by phase, symbolic. Arguments and errors: see `gdn_workspace_bytes`.

    Args:
        device: "cuda", or "cpu" for what the CPU implementation binds, which keeps no adjoint states.
    """
    import sympy

    tokens, documents = _pack(cu_seqlens, H, HV, K, V, dtype, save_mode, reuse_recompute_tapes, cp, tokens)
    if device not in BOUND:
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {device!r}")
    names = ("T", "N", "H", "HV", "K", "V", "e")
    T, N, *rest = symbols = sympy.symbols(names, integer=True, nonnegative=True)
    sizes = Sizes(T, sympy.floor(T / CHUNK) + N, *rest, N=N)
    numbers = (tokens, documents, H, HV, K, V, dtype.itemsize)
    values = dict(zip(symbols, numbers, strict=True))
    known = Sizes(tokens, tokens // CHUNK + documents, *numbers[2:], R=tokens if cp is None else 0)
    L = sympy.Symbol("L", integer=True, nonnegative=True)
    phases = {}
    for phase in BOUND[device]:
        plan = known.spans(phase, device)
        if plan is not None:
            values[L] = plan.rows
        parts = sizes.buffers(phase, device, plan, L, known.cut(device)).values()
        phases[phase] = sympy.Add(*(ALIGNMENT * sympy.ceiling(part / ALIGNMENT) for part in parts))
    return WorkspaceLayout(phases, values)


def gdn_workspace_bytes(
    cu_seqlens: torch.Tensor | Packing,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype,
    save_mode: str = "light",
    reuse_recompute_tapes: bool | str = False,
    cp: KcpContext | None = None,
    tokens: int | None = None,
) -> int:
    """Bytes of a `workspace` that serves the forward, the backward and inference of `gated_delta_rule` on this pack.

    Args:
        cu_seqlens: `[N + 1]` or a `Packing`. Its values are read (a synchronisation on CUDA).
        H, HV, K, V: heads of q and k, heads of v, and their widths.
        dtype: of q, k and v: float32, bfloat16 or float16.
        save_mode: "light" or "full", as in the call.
        reuse_recompute_tapes: as in the call; only True lets the backward count on kept light tapes.
        cp: a prepared `KcpContext`: the pack is this rank's shard, its segments the documents; `cu_seqlens` is ignored.
        tokens: T, the rows of q; by default the last entry of `cu_seqlens`. A pack that is padded to a fixed length has
            more: the rows behind its last document take scratch and tapes too. None with `cp`.

    Raises:
        TypeError: a dtype or type that is not listed.
        ValueError: `cu_seqlens` values, head counts, widths or options that `gated_delta_rule` would refuse; `tokens`
            below the last entry of `cu_seqlens`, or given with `cp`.
    """
    tokens, documents = _pack(cu_seqlens, H, HV, K, V, dtype, save_mode, reuse_recompute_tapes, cp, tokens)
    rows = tokens if cp is None else 0  # a context has its own segments
    sizes = Sizes(tokens, tokens // CHUNK + documents, H, HV, K, V, dtype.itemsize, R=rows)
    return max(sizes.arena_bytes(phase) for phase in needed_phases(save_mode, reuse_recompute_tapes is True))


def gdn_saved_bytes(
    cu_seqlens: torch.Tensor | Packing,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype,
    save_mode: str = "light",
    reuse_recompute_tapes: bool | str = False,
    cp: KcpContext | None = None,
    tokens: int | None = None,
) -> int:
    """Bytes that one call keeps for its backward on top of its own inputs: the tapes of `save_mode`.

    Arguments and errors as `gdn_workspace_bytes`. `reuse_recompute_tapes` does not change the number: it decides when,
    in a checkpoint region, these bytes live. With `cp` the start states and maps of the segments count too.
    """
    tokens, documents = _pack(cu_seqlens, H, HV, K, V, dtype, save_mode, reuse_recompute_tapes, cp, tokens)
    sizes = Sizes(tokens, tokens // CHUNK + documents, H, HV, K, V, dtype.itemsize)
    saved = sum(sizes.bytes_of(name) for name in KEPT[save_mode] if cp is None or name != "starts")
    if cp is not None:
        from ..kcp.context import SPARE

        maps = (cp.map_rows.shape[0] - SPARE) * HV * K * K + SPARE
        saved += 4 * (documents * HV * K * V + maps)
    return saved


def needed_phases(save_mode: str, hand_off: bool) -> tuple[str, ...]:
    """Phases that a workspace given to one call has to serve."""
    if save_mode == "none":
        return ("inference",)
    if save_mode == "full":
        return ("inference", "forward", "full")
    # Start states may bring a backward with kept tapes into spans, whose buffers many short documents make the larger.
    return ("inference", "forward", *(() if hand_off else ("backward_replay",)), "backward_kept")


def backward_phase(tapes: Tapes) -> str:
    """The smallest phase that covers rebuilding what `tapes` lacks."""
    missing = tapes.missing()
    if not missing:
        return "full"
    if set(missing) & set(LIGHT):
        return "backward_replay"
    without = isinstance(tapes.h.shape[0], int) and tapes.h.shape[0] == 0
    return "backward_replay" if without else "backward_kept"


def check_workspace_bytes(workspace: torch.Tensor | None, sizes: Sizes, phases: tuple[str, ...]) -> None:
    """Raises ValueError if the workspace cannot serve the phases."""
    if workspace is None:
        return
    for phase in phases:
        needed = sizes.arena_bytes(phase)
        if workspace.shape[0] < needed:
            raise ValueError(f"workspace: expected at least {needed} bytes (phase {phase}), got {workspace.shape[0]}")


def _pack(
    cu_seqlens: torch.Tensor | Packing,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    save_mode: str,
    reuse_recompute_tapes: bool | str,
    cp: KcpContext | None,
    tokens: int | None,
) -> tuple[int, int]:
    """Checks the arguments; returns tokens and documents."""
    for name, size in (("H", H), ("HV", HV), ("K", K), ("V", V)):
        check_int(name, size)
    if tokens is not None:
        check_int("tokens", tokens)
    for name, width in (("K", K), ("V", V)):
        if width not in WIDTHS:
            raise ValueError(f"{name}: expected a head width of 16 to 256 in steps of 16, got {width}")
    if H < 1:
        raise ValueError(f"H: expected at least 1, got {H}")
    if HV < H or HV % H:
        raise ValueError(f"HV: expected a positive multiple of H = {H}, got {HV}")
    if dtype not in FLOATS:
        raise TypeError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16, got {dtype}")
    if save_mode not in ("light", "full"):
        raise ValueError(f"save_mode: expected 'light' or 'full', got {save_mode!r}")
    if not (isinstance(reuse_recompute_tapes, bool) or reuse_recompute_tapes == "auto"):
        raise ValueError(f"reuse_recompute_tapes: expected True, False or 'auto', got {reuse_recompute_tapes!r}")
    if cp is not None:
        if not hasattr(cp, "local_tokens"):
            raise TypeError(f"cp: expected a KcpContext from build_kcp_context, got {type(cp).__name__}")
        if cp.heads is None:
            raise ValueError("cp: expected a prepared context; call ctx.prepare(H, HV) first")
        if cp.heads != (H, HV):
            raise ValueError(f"cp: expected the (H, HV) = {cp.heads} it was prepared for, got {(H, HV)}")
        if tokens is not None:
            raise ValueError(f"tokens: expected None with cp=, whose shard has its own rows, got {tokens}")
        return cp.local_tokens, len(cp.plan.segments)
    if isinstance(cu_seqlens, Packing):
        cu_seqlens = cu_seqlens.cu_seqlens
    check_tensor("cu_seqlens", cu_seqlens)
    check_index_vector("cu_seqlens", cu_seqlens)
    boundaries = read_boundaries(cu_seqlens)
    if tokens is None:
        tokens = boundaries[-1]
    elif tokens < boundaries[-1]:
        raise ValueError(f"tokens: expected at least the last entry of cu_seqlens, {boundaries[-1]}, got {tokens}")
    return tokens, len(boundaries) - 1
