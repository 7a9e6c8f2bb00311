"""The public ops on a rank's shard: what the fronts call when `cp=` is given."""

from __future__ import annotations

import torch

from ..validation import check_device
from .context import KcpContext


def check_context(cp: object, name: str, x: torch.Tensor, cu_seqlens: object) -> KcpContext:
    """Raises TypeError or ValueError unless `cp` is a prepared context whose shard `x` `[1, T_local, ...]` is."""
    if not isinstance(cp, KcpContext):
        raise TypeError(f"cp: expected a KcpContext from build_kcp_context, got {type(cp).__name__}")
    if cp.heads is None:
        raise ValueError("cp: expected a prepared context; call ctx.prepare(H, HV) first")
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None with cp=, whose partition has the documents; got boundaries too")
    if x.dim() < 2:
        raise ValueError(f"{name}: expected dimensions [1, T, ...], got shape {tuple(x.shape)}")
    if x.shape[0] != 1:
        raise ValueError(f"cp: expected inputs with batch size 1 (a rank's shard of one pack), got {x.shape[0]}")
    if x.shape[1] != cp.positions.shape[0]:
        raise ValueError(f"cp: expected this rank's {cp.positions.shape[0]} tokens, got {x.shape[1]}")
    check_device(name, x, cp.positions.device, "the context")
    return cp


def gated_delta_rule_over_ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cp: KcpContext,
    *,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    save_mode: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_rule` on this rank's shard.

    `initial_state` `[N, HV, K, V]` is the whole pack's, equal on every rank; its gradient on a rank is nonzero for the
    documents that start there. The final state is nonzero for the documents that end on this rank (empty documents:
    rank 0). Sums over ranks are the single-process tensors.

    Raises:
        ValueError: heads other than the context was prepared for; TypeError, ValueError: what the op refuses.
    """
    heads = (k.shape[2], v.shape[2]) if k.dim() == v.dim() == 4 else cp.heads  # the op names a wrong rank
    if heads != cp.heads:
        raise ValueError(f"cp: expected the (H, HV) = {cp.heads} it was prepared for, got {heads}")
    o, final_state, *_ = torch.ops.ple_gdn.kcp_gated_delta_rule(
        q, k, v, g, beta, initial_state, cp.pack, cp.table, cp.segments, cp.chunk_offsets, cp.map_rows,
        scale=scale, output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm, save_mode=save_mode,
        group_name=cp.group_name, exchange=cp.exchange,
    )  # fmt: skip
    return o, final_state


class HaloShard:
    """A shard whose fragments carry `halo` rows of history: extend the inputs, run, drop the history rows."""

    def __init__(self, cp: KcpContext, halo: int) -> None:
        self.cp, self.halo = cp, halo
        order = torch.arange(cp.fragments.shape[0], device=cp.fragments.device)
        self.cu_seqlens = cp.fragments + halo * order

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, T_local, D]` -> `[1, T_local + halo * F, D]`."""
        return torch.ops.ple_gdn.kcp_halo(x, self.cp.table, self.cp.fragments, self.halo, self.cp.group_name)

    def drop(self, y: torch.Tensor) -> torch.Tensor:
        """Undoes `extend` on a result."""
        tokens = torch.arange(self.cp.positions.shape[0], device=y.device)
        fragment = torch.searchsorted(self.cp.fragments, tokens, right=True)
        return y.index_select(1, tokens + self.halo * fragment)
