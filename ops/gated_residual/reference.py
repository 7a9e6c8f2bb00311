"""The gated residual as the ATen calls that eager code runs, one by one.

This is the CPU path and the definition of the bits: every line is one eager op with its own rounding. The backward
functions spell out what autograd runs for those lines (derivatives.yaml), including where it casts and sums.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def down(x: torch.Tensor, streams: int) -> torch.Tensor:
    return aten.silu(x / streams)


def down_backward(dy: torch.Tensor, x: torch.Tensor, streams: int) -> torch.Tensor:
    return aten.silu_backward(dy, x / streams) / streams


def mix(up: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    gate = up.sigmoid().unflatten(-1, (streams, -1))
    return (gate * normed.unflatten(-1, (streams, -1))).mean(-2)


def mix_backward(
    dy: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gate = up.sigmoid()
    wide = (*dy.shape[:-1], streams, dy.shape[-1])
    dproduct = dy.unsqueeze(-2).expand(wide) / streams
    dgate = (dproduct * normed.unflatten(-1, (streams, -1))).to(gate.dtype).flatten(-2)
    dnormed = (dproduct * gate.unflatten(-1, (streams, -1))).to(normed.dtype).flatten(-2)
    return aten.sigmoid_backward(dgate, gate), dnormed


def inject(hidden: torch.Tensor, hyper_input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    injection = hidden.unsqueeze(-2) * weights.unsqueeze(-1)
    return hyper_input + injection.flatten(-2)


def inject_backward(dy: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The injection has the promoted dtype of its two factors; autograd casts dy to it, then sums the broadcast
    # products, each already rounded, in fp32 with one rounding, and casts last.
    row, column = hidden.unsqueeze(-2), weights.unsqueeze(-1)
    dinjection = dy.to(torch.result_type(row, column)).unflatten(-1, (weights.shape[-1], -1))
    dhidden = (dinjection * column).sum_to_size(row.shape).to(hidden.dtype).squeeze(-2)
    dweights = (dinjection * row).sum_to_size(column.shape).to(weights.dtype).squeeze(-1)
    return dhidden, dweights
