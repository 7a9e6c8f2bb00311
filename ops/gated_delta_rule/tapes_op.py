"""Raw op `gated_delta_rule_tapes`: the tapes of a forward without its output.

What `fx_passes/tape_reuse.py` puts next to a backward whose checkpoint region nothing else reruns: the same walk as the
forward's, so the same bits, all six tapes.
"""

from __future__ import annotations

import torch

from ..register import register_op
from ..triton_support import triton_ready
from .checks import check_inputs
from .reference import tapes_alone
from .tapes import FULL, new_tapes


def _impl(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, ...]:
    check_inputs(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace)
    if triton_ready(q.device):
        from .launch import launch_forward

        _o, _final_state, *tapes = launch_forward(
            *(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace),
            *(scale, False, use_qk_l2norm, "full", False),
        )
        return tuple(tapes)
    return tapes_alone(
        *(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets), scale=scale, use_qk_l2norm=use_qk_l2norm
    )


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, ...]:
    check_inputs(q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace)
    return tuple(new_tapes(q, v, cu_seqlens, FULL))


gated_delta_rule_tapes_op = register_op("gated_delta_rule_tapes", _impl, _fake)
