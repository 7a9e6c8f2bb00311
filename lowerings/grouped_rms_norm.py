"""Inductor lowering of the grouped RMSNorm: eager's fp32 chain, rounded to the input's dtype where eager casts.

Line by line the functions of `ops/grouped_rms_norm/reference.py`; the only 16-bit roundings are the final casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import lowerings, register_lowering

from .gated_residual import cast, join
from .rounding import rounded

aten = torch.ops.aten
prims = torch.ops.prims


def call(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return lowerings[target](*args, **kwargs)


def _fp32(x: Any) -> Any:
    return call(prims.convert_element_type.default, rounded(x), torch.float32)


def _groups(x: Any, group_size: int) -> Any:
    *rows, width = x.get_size()
    return call(aten.view.default, x, [*rows, width // group_size, group_size])


def _rstd(groups: Any, eps: float) -> Any:
    mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, groups, 2), [-1], True)
    return call(aten.rsqrt.default, call(aten.add.Tensor, mean, eps))


def _scale(weight: Any) -> Any:
    return call(aten.add.Tensor, _fp32(weight), 1.0)


def lower_norm(x: Any, weight: Any, *, group_size: int, eps: float = 1e-6) -> Any:
    groups = _groups(_fp32(x), group_size)
    normed = join(call(aten.mul.Tensor, groups, _rstd(groups, eps)))
    return cast(call(aten.mul.Tensor, normed, _scale(weight)), x.get_dtype())


def lower_norm_backward(dy: Any, x: Any, weight: Any, *, group_size: int, eps: float = 1e-6) -> tuple[Any, Any]:
    groups = _groups(_fp32(x), group_size)
    rstd = _rstd(groups, eps)
    dy = _fp32(dy)
    products = call(aten.mul.Tensor, dy, join(call(aten.mul.Tensor, groups, rstd)))
    row_dims = list(range(len(x.get_size()) - 1))
    dweight = call(aten.sum.dim_IntList, products, row_dims) if row_dims else products
    dnormed = _groups(call(aten.mul.Tensor, dy, _scale(weight)), group_size)
    drstd = call(aten.sum.dim_IntList, call(aten.mul.Tensor, dnormed, groups), [-1], True)
    cube = call(aten.pow.Tensor_Scalar, rstd, 3)
    dmean = call(aten.div.Tensor, call(aten.mul.Tensor, call(aten.mul.Tensor, drstd, -0.5), cube), group_size)
    through_rstd = call(aten.mul.Tensor, dmean, call(aten.mul.Tensor, groups, 2.0))
    dx = call(aten.add.Tensor, call(aten.mul.Tensor, dnormed, rstd), through_rstd)
    return cast(join(dx), x.get_dtype()), cast(dweight, weight.get_dtype())


def register_grouped_rms_norm_lowerings() -> None:
    """Registers both lowerings. Inductor keeps the last registration, so calling it again changes nothing."""
    namespace = torch.ops.ple_gdn
    register_lowering(namespace.grouped_rms_norm.default, type_promotion_kind=None)(lower_norm)
    register_lowering(namespace.grouped_rms_norm_backward.default, type_promotion_kind=None)(lower_norm_backward)
