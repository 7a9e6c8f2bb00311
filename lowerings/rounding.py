"""Element-wise lowerings that round where eager rounds, and the one table of how eager computes each op.

Eager rounds the result of every ATen op to its dtype. Inductor fuses neighbours in fp32 and drops those roundings. Here
an op is lowered as: round each 16-bit operand, compute in fp32, round the result. Rounding operands as well keeps it
right whatever Inductor fuses in front of it; a value that is rounded already does not change.

`rounded_op(aten.mul.Tensor)` is the graph-level form: an op of the same schema in the private namespace
`ple_gdn_rounded`. Run outside Inductor it is the ATen op itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import broadcast_tensors, fallback_handler, lowerings, register_lowering, to_dtype
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import V, ops
from torch._prims_common import is_integer_dtype
from torch.utils._pytree import tree_map

from ..ops import ptx
from ..ops.validation import LOW_PRECISION
from .by_aten import by_aten, ops_by_aten

aten = torch.ops.aten
prims = torch.ops.prims
NAMESPACE = "ple_gdn_rounded"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Values = Callable[..., Any]


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def round_value(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Rounds an fp32 value to `dtype` and back, in a form that code generation cannot drop.

    C++: the code generator merges the cast with that of a store of the same value and hands later readers the
    unrounded fp32 (2,792 of 16,448 elements wrong); a product with one keeps them apart. Triton: LLVM narrows a rounded
    product of two 16-bit values to a 16-bit product, then contracts it with a following fp32 sum to an unrounded fused
    multiply-add (23 % of injections wrong); it cannot look through assembly: BF16's conversion itself, a move for FP16.
    """
    if dtype == torch.bfloat16 and _is_nvidia(device):
        return ops.inline_asm_elementwise(value, asm=ptx.ROUND_TO_BF16, constraints="=f,f", dtype=torch.float32)
    narrow = ops.to_dtype(ops.to_dtype(value, dtype, use_compute_types=False), dtype)
    if _is_nvidia(device):
        return ops.inline_asm_elementwise(narrow, asm="mov.b32 $0, $1;", constraints="=f,f", dtype=torch.float32)
    return ops.mul(narrow, ops.constant(1.0, torch.float32))


def _is_rounded(box: ir.TensorBox) -> bool:
    """Read from memory, or computed by `rounded`: never an fp32 value that fusion handed on."""
    node: Any = box
    while isinstance(node, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        node = node.data
    if isinstance(node, (ir.InputBuffer, ir.ExternKernel)):
        return True
    node = node.data if isinstance(node, ir.ComputedBuffer) else node
    return getattr(getattr(node, "inner_fn", None), "ple_gdn_rounded", False)


def rounded(box: Any) -> Any:
    """A tensor of 16-bit floats, each rounded to its dtype at the point of use; anything else as it is."""
    if not isinstance(box, ir.TensorBox) or box.get_dtype() not in LOW_PRECISION or _is_rounded(box):
        return box
    if isinstance(getattr(box.data, "data", None), ir.Reduction):
        box.realize()
    dtype, device, load = box.get_dtype(), box.get_device(), box.make_loader()

    def inner_fn(index: Any) -> Any:
        return round_value(load(index), dtype, device)

    inner_fn.ple_gdn_rounded = True
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner_fn, ranges=box.get_size())


def _one() -> Any:
    return ops.constant(1.0, torch.float32)


def _divide(device: torch.device, x: Any, y: Any) -> Any:
    """IEEE division: Triton's `/` is the approximate `div.full.f32`, which moves FP16 results."""
    if not _is_nvidia(device):
        return ops.truediv(x, y)
    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(x, y)
    return ops.inline_asm_elementwise(x, y, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32)


def _quotient(x: Any, y: Any) -> Any | None:
    """`x / y` of 16-bit values on NVIDIA as ATen's kernels compute it, None for the calls that Inductor's own serves.

    A number: the product with its reciprocal, rounded once to fp32 (x / 0.001 is 1000 x; with the reciprocal of the
    rounded number 500 codes of BF16 and 208 of FP16 would differ). A tensor: IEEE division.
    """
    if not isinstance(x, ir.TensorBox) or x.get_dtype() not in LOW_PRECISION or not _is_nvidia(x.get_device()):
        return None
    if isinstance(y, (int, float)):
        factor = math.copysign(math.inf, y) if y == 0 else 1.0 / y
        return _pointwise(lambda value: ops.mul(value, ops.constant(factor, torch.float32)), x.get_dtype(), (x,))
    if not isinstance(y, ir.TensorBox) or (y.get_dtype(), y.get_device()) != (x.get_dtype(), x.get_device()):
        return None
    return _pointwise(functools.partial(_divide, x.get_device()), x.get_dtype(), tuple(broadcast_tensors(x, y)))


def _sigmoid(device: torch.device, x: Any) -> Any:
    return _divide(device, _one(), ops.add(_one(), ops.exp(ops.neg(x))))


def _eager_sigmoid(device: torch.device, dtype: torch.dtype) -> Values:
    # BF16 is too coarse to show exp2 and reciprocal as the hardware gives them (0 of 65,536 codes); FP16 shows Triton's
    # fast exp and division in 2. The accurate ones made a mix forward and backward 24 % slower.
    if dtype == torch.bfloat16 and _is_nvidia(device):
        return lambda x: ops.inline_asm_elementwise(x, asm=ptx.SIGMOID, constraints="=f,f", dtype=torch.float32)
    return lambda x: _sigmoid(device, x)


def _eager_silu(device: torch.device, dtype: torch.dtype) -> Values:
    return lambda x: _divide(device, x, ops.add(_one(), ops.exp(ops.neg(x))))


def _eager_sigmoid_backward(device: torch.device, dtype: torch.dtype) -> Values:
    if device.type == "cpu" and dtype == torch.bfloat16:
        return lambda dy, y: ops.mul(ops.mul(dy, ops.sub(_one(), y)), y)

    def narrow(dy: Any, y: Any) -> Any:
        # CUDA, and FP16 on the CPU, compute in the 16-bit type: each of the three steps rounds.
        slope = round_value(ops.sub(_one(), y), dtype, device)
        return ops.mul(round_value(ops.mul(dy, slope), dtype, device), y)

    return narrow


def _fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding from fp32 sums and products: Inductor's C++ has no fused multiply-add.

    Dekker's splitting gives the product's error, Knuth's sum that of the addition. |x * y| must stay below 2**115.
    """

    def halves(value: Any) -> tuple[Any, Any]:
        big = ops.mul(value, ops.constant(4097.0, torch.float32))
        high = ops.sub(big, ops.sub(big, value))
        return high, ops.sub(value, high)

    (x_high, x_low), (y_high, y_low) = halves(x), halves(y)
    product = ops.mul(x, y)
    error = ops.sub(ops.mul(x_high, y_high), product)
    for a, b in ((x_high, y_low), (x_low, y_high), (x_low, y_low)):
        error = ops.add(error, ops.mul(a, b))
    total = ops.add(product, z)
    from_z = ops.sub(total, product)
    lost = ops.add(ops.sub(product, ops.sub(total, from_z)), ops.sub(z, from_z))
    return ops.add(total, ops.add(lost, error))


def _eager_silu_backward(device: torch.device, dtype: torch.dtype) -> Values:
    def bracket(x: Any, rest: Any) -> Any:
        # Both eager builds contract 1 + x * (1 - s) to a fused multiply-add. BF16 never shows it (0 of 65,536 codes on
        # the CPU); FP16 does in 2.
        if device.type != "cpu":
            return ops.fma(x, rest, _one())
        return _fma(x, rest, _one()) if dtype == torch.float16 else ops.add(_one(), ops.mul(x, rest))

    def value(dy: Any, x: Any) -> Any:
        gate = _sigmoid(device, x)
        return ops.mul(ops.mul(dy, gate), bracket(x, ops.sub(_one(), gate)))

    return value


QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})

# How eager computes one element of a 16-bit op from fp32 operands, before the final rounding, by device and dtype.
# An op that is not listed is computed by Inductor's own lowering of it, whose fp32 formula is eager's.
# Every code tried on an H200: add, mul, div, exp, sigmoid, silu and the two backwards have no exception, FP16 included.
# tanh and rsqrt differed in 254 BF16 codes, the subnormals: see `EAGER_CONFIG`.
EAGER_RULES: dict[torch._ops.OpOverload, Callable[[torch.device, torch.dtype], Values]] = {
    aten.sigmoid.default: _eager_sigmoid,
    aten.silu.default: _eager_silu,
    aten.sigmoid_backward.default: _eager_sigmoid_backward,
    aten.silu_backward.default: _eager_silu_backward,
}


# Inductor's settings for eager's numbers. Triton's libdevice takes fp32 subnormals for 0 unless told otherwise, CUDA's
# does not. Of the 65,536 codes of BF16 (none of FP16) tanh, erf, sin, tan, asin, atan, sinh, log1p, rsqrt and lgamma
# lose 254, rsqrt half and lgamma all of them to an infinity that eager does not have; floor and ceil 127, exp2 9, erfc
# 2. rsqrt and exp2 grow by three instructions, exp shrinks by one. Counted on compiled PTX; not run on a GPU.
EAGER_CONFIG = MappingProxyType({"eager_numerics.disable_ftz": True})


def _plain_sigmoid_backward(dy: Any, y: Any) -> Any:
    return ops.mul(dy, ops.mul(y, ops.sub(_one(), y)))


def _plain_silu(x: Any) -> Any:
    return ops.truediv(x, ops.add(_one(), ops.exp(ops.neg(x))))


def _plain_silu_backward(dy: Any, x: Any) -> Any:
    gate = ops.sigmoid(x)
    return ops.mul(ops.mul(dy, gate), ops.add(_one(), ops.mul(x, ops.sub(_one(), gate))))


# Ops that Inductor decomposes before lowering: its own formula, for operands that need no rounding (fp32).
PLAIN_RULES: dict[torch._ops.OpOverload, Values] = {
    aten.silu.default: _plain_silu,
    aten.sigmoid_backward.default: _plain_sigmoid_backward,
    aten.silu_backward.default: _plain_silu_backward,
}


def _pointwise(value: Values, dtype: torch.dtype, boxes: tuple) -> Any:
    loaders = [box.make_loader() for box in boxes]
    return ir.Pointwise.create(
        device=boxes[0].get_device(),
        dtype=dtype,
        inner_fn=lambda index: value(*[load(index) for load in loaders]),
        ranges=boxes[0].get_size(),
    )


# Sums and means of at most this many elements along one dimension are written out in eager's order.
SHORT = 16
SHORT_SUMS = {aten.mean.dim: True, aten.sum.dim_IntList: False}


def is_short_sum(target: Any, size: Any, dims: Any) -> bool:
    return target in SHORT_SUMS and isinstance(dims, (list, tuple)) and len(dims) == 1 and is_short(size[dims[0]])


def is_short(length: Any) -> bool:
    return isinstance(length, (int, sympy.Integer)) and 1 < int(length) <= SHORT


def _short_sum(x: Any, dim: int, keepdim: bool, mean: bool) -> Any:
    """ATen's sum over one short dimension: fp32, in order, from 0 (so that zeros of one sign give +0), rounded once.

    On CUDA element i goes to accumulator i mod 4, and the four are added in order; a mean multiplies by the reciprocal
    there and divides on the CPU.
    """
    size, device, load = list(x.get_size()), x.get_device(), x.make_loader()
    dim = dim % len(size)
    length = int(size[dim])

    def value(index: Any) -> Any:
        before, after = index[:dim], index[dim + 1 :] if keepdim else index[dim:]
        total = None
        for first in range(4 if device.type != "cpu" else 1):
            part = ops.constant(0.0, torch.float32)
            for i in range(first, length, 4 if device.type != "cpu" else 1):
                part = ops.add(part, load([*before, i, *after]))
            total = part if total is None else ops.add(total, part)
        if not mean:
            return total
        if device.type == "cpu":
            return ops.truediv(total, ops.constant(float(length), torch.float32))
        return ops.mul(total, ops.constant(1.0 / length, torch.float32))

    size[dim : dim + 1] = [sympy.Integer(1)] if keepdim else []
    return ir.Pointwise.create(device=device, dtype=x.get_dtype(), inner_fn=value, ranges=size)


def can_lower(target: Any) -> bool:
    return target in EAGER_RULES or target in ops_by_aten() or target in lowerings


# ATen's CPU kernels of these round a Python number to the tensor's dtype first: `x + 0.1` in BF16 adds 0.1001. Those of
# products and quotients, and all on CUDA, take it in fp32.
ROUND_NUMBERS_ON_CPU = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar})


def _round_number(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype).item() if isinstance(value, (int, float)) else value


def _with_rounded_integers(target: torch._ops.OpOverload, args: tuple) -> tuple:
    """Integer tensors beside 16-bit ones as eager takes them: converted, so rounded, to 16 bits. Inductor converts to
    fp32 (x * k of k up to 60,000: 15,700 of 65,536 BF16 codes differed). Other operands decide otherwise: none is done.
    """
    boxes = [a for a in args if isinstance(a, ir.TensorBox)]
    integers = [box for box in boxes if is_integer_dtype(box.get_dtype())]
    others = {box.get_dtype() for box in boxes} - {box.get_dtype() for box in integers} - {torch.bool}
    if torch.Tag.pointwise not in target.tags or not integers or len(others) != 1 or not others <= set(LOW_PRECISION):
        return args
    (dtype,) = others

    def low(box: Any) -> Any:
        # An `arange` stays an expression of the index, which takes no rounding, but for an op that has no such form.
        plain = _pointwise(
            lambda value: ops.bitwise_or(value, ops.constant(0, box.get_dtype())), box.get_dtype(), (box,)
        )
        return rounded(to_dtype(plain, dtype))

    return tuple(low(a) if any(a is box for box in integers) else a for a in args)


def _store_if_widened_for_several(box: Any) -> None:
    """Keeps a rounded value in memory, in 16 bits, if several readers take it in fp32 and it comes from three as large.

    Inductor computes it again for every reader, from up to four buffers, then stores in fp32 what it has become. Stored
    once it is read in half the bytes and nothing is lost: it is rounded. From the gradient of the norm's output to that
    of its input, gated residual module, 4,096 rows of 4 x 2560: 1,030 MB instead of 1,470. And a sum over tokens, few
    blocks with long loops, must not compute much besides: with roundings in it ptxas (CUDA 12.8) saves registers by
    loading late, 319 us instead of 268.
    """
    if len(V.graph.current_node.users) < 2 or not _is_rounded(box):
        return
    equal = V.graph.sizevars.statically_known_equals
    if sum(equal(V.graph.get_numel(name), box.get_numel()) for name in box.get_read_names()) > 2:
        box.realize()


def lower_as_eager(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Inductor IR of one ATen op with eager's roundings; without a 16-bit tensor it is Inductor's own."""
    if target is prims.convert_element_type.default and args[1] == torch.float32:
        _store_if_widened_for_several(args[0])
    args, kwargs = tree_map(rounded, (_with_rounded_integers(target, args), kwargs))
    first = next((a for a in args if isinstance(a, ir.TensorBox)), None)
    dtype = None if first is None else first.get_dtype()
    if dtype in LOW_PRECISION and target in ROUND_NUMBERS_ON_CPU and first.get_device().type == "cpu":
        args = tuple(_round_number(value, dtype) for value in args)
    if dtype in LOW_PRECISION and target in EAGER_RULES:
        return rounded(_pointwise(EAGER_RULES[target](first.get_device(), dtype), dtype, args))
    short = target in SHORT_SUMS and not kwargs and is_short_sum(target, first.get_size(), args[1])
    if dtype in LOW_PRECISION and short:
        keepdim = len(args) > 2 and args[2]
        return rounded(_short_sum(first, args[1][0], keepdim, SHORT_SUMS[target]))
    quotient = _quotient(*args) if target in QUOTIENTS and not kwargs else None
    if quotient is not None:
        return rounded(quotient)
    if target in PLAIN_RULES:
        return _pointwise(PLAIN_RULES[target], dtype, args)
    return rounded(lowerings[target](*args, **kwargs))


def rounded_op(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> torch._ops.OpOverload:
    """The op `ple_gdn_rounded::<name>` for such a call of `target`: its schema, fake and eager result.

    ATen takes a Python number for a tensor argument, other namespaces do not: such a call gets a variant whose argument
    is a Scalar.
    """
    values = (a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in args)
    numbers = (i for i, value in enumerate(values) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)))
    scalars = tuple(i for i in numbers if str(target._schema.arguments[i].type) == "Tensor")
    return _define(target, scalars, by_aten(target, args, kwargs))


@functools.cache
def _define(target: torch._ops.OpOverload, numbers: tuple[int, ...], whole: bool) -> torch._ops.OpOverload:
    name = "_".join([*target.name().replace("::", "_").split("."), *map(str, numbers), *(["by_aten"] if whole else [])])
    schema = str(target._schema)
    for i in numbers:
        argument = target._schema.arguments[i].name
        schema = schema.replace(f"Tensor {argument}", f"Scalar {argument}")
    _LIBRARY.define(name + schema[schema.index("(") :], tags=[t for t in target.tags if t == torch.Tag.pointwise])
    _LIBRARY.impl(name, target, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", target, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    # The generated code names ATen's op: a cached graph runs in processes that never defined this one.
    lowering = (
        fallback_handler(target, add_to_fallback_set=False) if whole else functools.partial(lower_as_eager, target)
    )
    register_lowering(op, type_promotion_kind=None)(lowering)
    return op


def register_rounding_lowerings() -> None:
    """Lowerings of ops that Inductor only knows decomposed, for graphs that keep them whole. Safe to repeat."""
    for target in PLAIN_RULES:
        register_lowering(target, type_promotion_kind=None)(functools.partial(lower_as_eager, target))
