"""Inductor lowerings of the gated residual ops: eager's chain of ATen ops, element-wise IR that fuses with neighbours.

Line by line the functions of `ops/gated_residual/reference.py`, with `lower_as_eager` in place of the eager call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import lowerings, register_lowering

from .rounding import lower_as_eager

aten = torch.ops.aten
prims = torch.ops.prims
eager = lower_as_eager


def cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.get_dtype() == dtype else eager(prims.convert_element_type.default, x, dtype)


def split(x: Any, streams: int) -> Any:
    *rows, width = x.get_size()
    return lowerings[aten.view.default](x, [*rows, streams, width // streams])


def join(x: Any) -> Any:
    *rows, streams, width = x.get_size()
    return lowerings[aten.view.default](x, [*rows, streams * width])


def unsqueeze(x: Any, dim: int) -> Any:
    return lowerings[aten.unsqueeze.default](x, dim)


def lower_down(x: Any, streams: int) -> Any:
    return eager(aten.silu.default, eager(aten.div.Tensor, x, streams))


def lower_down_backward(dy: Any, x: Any, streams: int) -> Any:
    dscaled = eager(aten.silu_backward.default, dy, eager(aten.div.Tensor, x, streams))
    return eager(aten.div.Tensor, dscaled, streams)


def lower_mix(up: Any, normed: Any, streams: int) -> Any:
    gate = split(eager(aten.sigmoid.default, up), streams)
    return eager(aten.mean.dim, eager(aten.mul.Tensor, gate, split(normed, streams)), [-2])


def lower_mix_backward(dy: Any, up: Any, normed: Any, streams: int) -> tuple[Any, Any]:
    gate = eager(aten.sigmoid.default, up)
    dproduct = unsqueeze(eager(aten.div.Tensor, dy, streams), -2)
    dgate = cast(join(eager(aten.mul.Tensor, dproduct, split(normed, streams))), up.get_dtype())
    dnormed = cast(join(eager(aten.mul.Tensor, dproduct, split(gate, streams))), normed.get_dtype())
    return eager(aten.sigmoid_backward.default, dgate, gate), dnormed


def lower_inject(hidden: Any, hyper_input: Any, weights: Any) -> Any:
    injection = eager(aten.mul.Tensor, unsqueeze(hidden, -2), unsqueeze(weights, -1))
    return eager(aten.add.Tensor, hyper_input, join(injection))


def lower_inject_backward(dy: Any, hidden: Any, weights: Any) -> tuple[Any, Any]:
    streams = weights.get_size()[-1]
    dinjection = cast(dy, torch.promote_types(hidden.get_dtype(), weights.get_dtype()))
    dinjection = split(dinjection, streams)
    to_hidden = eager(aten.mul.Tensor, dinjection, unsqueeze(weights, -1))
    to_weights = eager(aten.mul.Tensor, dinjection, unsqueeze(hidden, -2))
    dhidden = cast(eager(aten.sum.dim_IntList, to_hidden, [-2]), hidden.get_dtype())
    dweights = eager(aten.sum.dim_IntList, to_weights, [-1])
    return dhidden, cast(dweights, weights.get_dtype())


def register_gated_residual_lowerings() -> None:
    """Registers the six lowerings. Inductor keeps the last registration, so calling it again changes nothing."""
    namespace = torch.ops.ple_gdn
    for op, lowering in (
        (namespace.gated_residual_down, lower_down),
        (namespace.gated_residual_down_backward, lower_down_backward),
        (namespace.gated_residual_mix, lower_mix),
        (namespace.gated_residual_mix_backward, lower_mix_backward),
        (namespace.gated_residual_inject, lower_inject),
        (namespace.gated_residual_inject_backward, lower_inject_backward),
    ):
        register_lowering(op.default, type_promotion_kind=None)(lowering)
