"""Reads each Dynamo node as one aten-like term, whatever the spelling, and never edits the graph.

`x.mul(y)`, `x * y`, `torch.mul(x, y)` and `torch.ops.aten.mul.Tensor(x, y)` all read as `Term("mul", (x, y))`. Every
reshape that keeps the element order (view, flatten, unflatten, unsqueeze, `x[..., None]`, ...) reads as `view`, every
change of float type as `cast`, every swap of dimensions as `permute`. What no pattern needs reads as `opaque`.

A shadow reading instead of a rewritten graph: code that no pattern matches reaches Inductor exactly as it came, so
normalisation can neither break nor slow a model. It costs microseconds per node (no tracing: shapes and dtypes are
those of `node.meta["example_value"]`) and adds no guard on a symbolic size.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


@dataclass(frozen=True)
class Term:
    """One node as aten sees it: `op` is the aten name (or view, cast, permute, slice, opaque), `args` in its order."""

    op: str
    args: tuple[Any, ...] = ()


OPAQUE = Term("opaque")
_REQUIRED = object()

# op -> its parameters in order; `None` etc. are defaults. A call that does not bind reads as opaque.
_UNARY = (("input", _REQUIRED),)
_BINARY = (("input", _REQUIRED), ("other", _REQUIRED))
_REDUCE = (("input", _REQUIRED), ("dim", None), ("keepdim", False), ("dtype", None))
SIGNATURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "mul": _BINARY,
    "add": (*_BINARY, ("alpha", 1)),
    "div": (*_BINARY, ("rounding_mode", None)),
    "pow": (("input", _REQUIRED), ("exponent", _REQUIRED)),
    "square": _UNARY,
    "rsqrt": _UNARY,
    "sqrt": _UNARY,
    "reciprocal": _UNARY,
    "sigmoid": _UNARY,
    "silu": (("input", _REQUIRED), ("inplace", False)),
    "abs": _UNARY,
    "sign": _UNARY,
    "clamp": (("input", _REQUIRED), ("min", None), ("max", None)),
    "clamp_min": (("input", _REQUIRED), ("min", _REQUIRED)),
    "mean": _REDUCE,
    "sum": _REDUCE,
    "pad": (("input", _REQUIRED), ("pad", _REQUIRED), ("mode", "constant"), ("value", None)),
    "conv1d": (
        *(("input", _REQUIRED), ("weight", _REQUIRED), ("bias", None), ("stride", 1)),
        *(("padding", 0), ("dilation", 1), ("groups", 1)),
    ),
    "linear": (("input", _REQUIRED), ("weight", _REQUIRED), ("bias", None)),
}
_PARAMETER_ALIASES = {"self": "input", "axis": "dim"}

# Method names, and the names of aten overload packets, that are not the op's own name.
_NAME_ALIASES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "absolute": "abs",
    "clip": "clamp",
    "sgn": "sign",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__add__": "add",
    "__radd__": "add",
    "__truediv__": "div",
    "__pow__": "pow",
}
_VIEW_NAMES = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"),
        *("view_as", "reshape_as", "ravel", "contiguous"),
    )
)
_CAST_NAMES = frozenset(("float", "half", "bfloat16", "to", "type", "type_as", "_to_copy"))
_PERMUTE_NAMES = frozenset(("transpose", "permute", "swapaxes", "swapdims"))

_FUNCTIONS: dict[Callable, str] = {
    operator.mul: "mul",
    operator.add: "add",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.abs: "abs",
    builtins.abs: "abs",
    torch._C._nn.pad: "pad",
    torch.nn.functional.pad: "pad",
    torch._C._nn.linear: "linear",
    torch.nn.functional.silu: "silu",
    torch.nn.functional.sigmoid: "sigmoid",
    torch.special.expit: "sigmoid",
    **{
        getattr(torch, name): _NAME_ALIASES.get(name, name)
        for name in (*SIGNATURES, *_NAME_ALIASES, *_VIEW_NAMES, *_PERMUTE_NAMES)
        if hasattr(torch, name)
    },
}
_INPLACE_METHODS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__", "__ixor__")
)
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "imatmul", "iand", "ior", "ixor")
) | {operator.setitem}
_MODULES: dict[type, str] = {torch.nn.SiLU: "silu", torch.nn.Sigmoid: "sigmoid"}


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor Dynamo recorded for `node`, or None where there is none (constants, tuples, sizes)."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; asking adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or statically_known_true(a == b)


def same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def is_mutation(node: fx.Node) -> bool:
    """Whether the call writes one of its operands (a higher-order operator: whether its body writes anything)."""
    target = node.target
    if node.op == "call_method":
        return target in _INPLACE_METHODS or (target.endswith("_") and not target.endswith("__"))
    if node.op != "call_function":
        return False
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "mutation" in target.name() or any(is_mutation(inner) for inner in _body_nodes(node))
    if target in _INPLACE_OPERATORS:
        return True
    name = getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _body_nodes(node: fx.Node) -> Iterator[fx.Node]:
    for operand in node.all_input_nodes:
        body = getattr(node.graph.owning_module, operand.target, None) if operand.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from body.graph.nodes


def read_term(node: fx.Node) -> Term:
    """`node` as a term. A mutating call reads as opaque: no pattern may swallow a write."""
    if value_of(node) is None or is_mutation(node):
        return OPAQUE
    if node.op == "call_method":
        return _read_call(_NAME_ALIASES.get(node.target, node.target), node)
    if node.op == "call_module":
        return _read_module(node)
    if node.op != "call_function":
        return OPAQUE
    target = node.target
    if target is operator.getitem:
        return _read_getitem(node)
    # `x.mT` is traced as an attribute up to torch 2.13 and as aten.mT from 2.14 on.
    if target is torch.ops.aten.mT or (target is builtins.getattr and node.args[1:] == ("mT",)):
        return Term("permute", (node.args[0], _swap(value_of(node).dim(), -1, -2)))
    if target is builtins.getattr:
        return OPAQUE
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        if not packet._qualified_op_name.startswith("aten::"):
            return OPAQUE
        return _read_call(_NAME_ALIASES.get(packet.__name__, packet.__name__), node)
    try:
        name = _FUNCTIONS.get(target)
    except TypeError:  # an unhashable callable is nothing a pattern knows
        return OPAQUE
    return OPAQUE if name is None else _read_call(name, node)


def _read_module(node: fx.Node) -> Term:
    module = node.graph.owning_module.get_submodule(node.target)
    name = _MODULES.get(type(module))
    return OPAQUE if name is None or getattr(module, "inplace", False) else Term(name, (node.args[0], False))


def _read_call(name: str, node: fx.Node) -> Term:
    if name in _VIEW_NAMES:
        return _read_view(node)
    if name in _CAST_NAMES:
        return _read_cast(node)
    if name in _PERMUTE_NAMES:
        return _read_permute(name, node)
    if name not in SIGNATURES:
        return OPAQUE
    bound = _bind(SIGNATURES[name], node.args, node.kwargs)
    if bound is None or (name == "silu" and bound[1]):
        return OPAQUE
    if name == "clamp":
        return OPAQUE if bound[1] is None or bound[2] is not None else Term("clamp_min", bound[:2])
    if name == "square":
        return Term("pow", (bound[0], 2))
    return Term(name, bound)


def _bind(signature: tuple[tuple[str, Any], ...], args: tuple, kwargs: Mapping[str, Any]) -> tuple | None:
    names = [name for name, _ in signature]
    if len(args) > len(names):
        return None
    values = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        key = _PARAMETER_ALIASES.get(key, key)
        if key not in names or key in values:
            return None
        values[key] = value
    bound = tuple(values.get(name, default) for name, default in signature)
    return None if any(value is _REQUIRED for value in bound) else bound


def _tensor_operand(node: fx.Node) -> fx.Node | None:
    operand = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return operand if value_of(operand) is not None else None


def _read_view(node: fx.Node) -> Term:
    source = _tensor_operand(node)
    if source is None or value_of(source).dtype != value_of(node).dtype:  # view(dtype) reinterprets bits
        return OPAQUE
    return Term("view", (source,))


def _read_cast(node: fx.Node) -> Term:
    source = _tensor_operand(node)
    if source is None or value_of(source).device != value_of(node).device:
        return OPAQUE
    return Term("cast", (source,))


def _swap(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _read_permute(name: str, node: fx.Node) -> Term:
    source = _tensor_operand(node)
    if source is None:
        return OPAQUE
    rank = value_of(source).dim()
    dims = [*node.args[1:], *node.kwargs.values()]
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = list(dims[0])
    if not all(isinstance(dim, int) for dim in dims):
        return OPAQUE
    if name == "permute":
        return Term("permute", (source, tuple(dim % rank for dim in dims)))
    return Term("permute", (source, _swap(rank, *dims))) if len(dims) == 2 else OPAQUE


def _is_full(index: Any) -> bool:
    return index is None or index is Ellipsis or index == slice(None)


def _read_getitem(node: fx.Node) -> Term:
    """`x[..., None]` and slices that keep everything are views; one real slice is `slice(x, dim from the right, s)`."""
    source, index = node.args
    if value_of(source) is None:
        return OPAQUE
    index = index if isinstance(index, tuple) else (index,)
    if all(_is_full(item) for item in index):
        return Term("view", (source,))
    if any(item is not Ellipsis and (not isinstance(item, slice) or item.step not in (None, 1)) for item in index):
        return OPAQUE
    if same_shape(value_of(source).shape, value_of(node).shape):
        return Term("view", (source,))
    cut = [position for position, item in enumerate(index) if not _is_full(item)]
    rank = value_of(source).dim()
    if len(cut) != 1:
        return OPAQUE
    after = len(index) - cut[0] if Ellipsis in index[: cut[0]] else rank - cut[0]
    return Term("slice", (source, rank - after, index[cut[0]]))
