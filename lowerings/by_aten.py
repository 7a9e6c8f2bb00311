"""Which 16-bit ops have eager's bits only as ATen's own kernels, called as they are.

ATen's kernels compute in fp32 and round once. Some do it by a formula or a path that Inductor does not have; and some
ops Inductor takes apart, before any lowering, into several that round each. What is taken apart is called by kernel
unless it is known to round once: an op that a new torch decomposes is right first and fused later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table

from ..ops.validation import LOW_PRECISION

aten = torch.ops.aten

# Eager's kernels round inside, or take another formula than Inductor's, or a path that depends on the exponent, the
# mode or the vector width.
OWN_FORMULA = frozenset(
    {
        aten.pow.Scalar,
        aten.pow.Tensor_Tensor,
        aten.lerp.Scalar,
        aten.lerp.Tensor,
        aten.addcmul.default,
        aten.addcdiv.default,
        aten.atan2.default,
        aten.div.Tensor_mode,
        aten.fmod.Scalar,
        aten.fmod.Tensor,
        aten.remainder.Scalar,
        aten.remainder.Tensor,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.nextafter.default,
        aten.expm1.default,
        aten.asinh.default,
        aten.acosh.default,
        aten.atanh.default,
        aten.i0.default,
        aten.special_i0e.default,
        aten.special_i1.default,
        aten.special_i1e.default,
        aten.polygamma.default,
        aten.igamma.default,
        aten.igammac.default,
    }
)

# Element-wise ops, apart from their `reduction`, that round inside when taken apart and have no pointwise tag.
UNTAGGED = frozenset(
    {
        aten.addr.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_backward.default,
        aten.glu_backward.default,
        aten.huber_loss.default,
        aten.huber_loss_backward.default,
        aten.mish_backward.default,
        aten.mse_loss.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss_backward.default,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default,
    }
)

# Pointwise ops that Inductor takes apart without a rounding inside: eager's bits for all 65,536 codes of BF16 and FP16.
TAKEN_APART_EXACTLY = frozenset(
    {
        aten.add.Scalar,
        aten.add.Tensor,
        aten.angle.default,
        aten.clamp.default,
        aten.clamp.Tensor,
        aten.conj_physical.default,
        aten.deg2rad.default,
        aten.fmax.default,
        aten.fmin.default,
        aten.frac.default,
        aten.hardshrink.default,
        aten.hardsigmoid.default,
        aten.hardtanh.default,
        aten.heaviside.default,
        aten.isneginf.default,
        aten.isposinf.default,
        aten.leaky_relu.default,
        aten.logaddexp.default,
        aten.masked_fill.Scalar,
        aten.mish.default,
        aten.nan_to_num.default,
        aten.rad2deg.default,
        aten.rsub.Scalar,
        aten.sgn.default,
        aten.sigmoid_backward.default,
        aten.silu.default,
        aten.silu_backward.default,
        aten.softplus.default,
        aten.tanh_backward.default,
        aten.threshold.default,
    }
)


def _has_own_kernel(target: torch._ops.OpOverload) -> bool:
    """Not one that every backend takes apart before autograd, eager included."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, target.name())
    return has("CPU") or has("CUDA") or not has("CompositeImplicitAutograd")


def _is_taken_apart(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target not in TAKEN_APART_EXACTLY and _has_own_kernel(target)


@functools.cache
def ops_by_aten() -> frozenset[torch._ops.OpOverload]:
    """The ops that are kept whole and called by kernel; of a few, `by_aten` leaves some calls out."""
    return OWN_FORMULA | UNTAGGED | {target for target in select_decomp_table() if _is_taken_apart(target)}


def _mixes_in_a_scalar(target: Any, args: Sequence[Any]) -> bool:
    """A 16-bit tensor and a size of a dynamic shape, or a 0-dim tensor of another type (not bool) that does not widen.

    ATen takes such a scalar in fp32 or rounded to 16 bits, by op and by device: one in host memory beside CUDA tensors
    is not rounded, one on the GPU is; on the CPU sums round it (`x + s` in BF16: 520 of 65,536 codes), products do not.
    """
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    values = [a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in args]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dtype != torch.bool]
    low = {t.dtype for t in tensors if t.dim() and t.dtype in LOW_PRECISION}
    symbolic = any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in values)
    return bool(low) and (symbolic or any(t.dim() == 0 and t.dtype not in low for t in tensors))


def by_aten(target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether this call is exact only as ATen's own kernel: see `ops_by_aten`, but squares, plain sums, ReLU."""
    if _mixes_in_a_scalar(target, args):
        return True
    if target is aten.pow.Tensor_Scalar:
        return args[1] != 2
    if target is aten.threshold_backward.default:  # ReLU's 0 is the same number in every type
        return args[2] != 0
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return kwargs.get("alpha", 1) != 1
    return target in ops_by_aten()
