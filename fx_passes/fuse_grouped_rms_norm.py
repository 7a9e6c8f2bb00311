"""Fuses the grouped zero-centred RMSNorm (`Qwen4ExpTextRMSNorm` with a `group_size`).

Before:                                             After:
    x4 = x.float().reshape(*x.shape[:-1], -1, C)        y = ple_gdn.grouped_rms_norm(x, w, group_size=C, eps=eps)
    n = x4 * rsqrt(x4.pow(2).mean(-1, True) + eps)
    y = (n.flatten(-2) * (1.0 + w.float())).type_as(x)

An ungrouped RMSNorm is no candidate: Inductor alone fuses it well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops.validation import LOW_PRECISION
from .matching import (
    Chain,
    Plan,
    Refuse,
    Reshaped,
    check_floats,
    dtype_of,
    reduced_dims,
    run_pattern,
    short,
)
from .normalize import same_shape, same_size, value_of
from .records import GraphPass, PassContext


@dataclass(frozen=True)
class Norm:
    """A matched grouped norm: `x` [.., N*C] in its own dtype, `weight` [N*C]."""

    x: fx.Node | Reshaped
    weight: fx.Node
    group_size: int
    eps: float


def one_over_root(chain: Chain, node: Any) -> Any | None:
    """`v` if `node` is 1/sqrt(v) in any spelling, else None."""
    term = chain.term(chain.skip(node))
    if term.op == "rsqrt":
        return term.args[0]
    if term.op == "reciprocal" or (term.op == "div" and term.args[0] == 1 and term.args[2] is None):
        return chain.operand(term.args[-1 if term.op == "reciprocal" else 1], "sqrt")
    if term.op == "pow" and term.args[1] == -0.5:
        return term.args[0]
    return None


def scaled_by_root(chain: Chain, node: Any) -> tuple[Any, Any] | None:
    """`(x, v)` if `node` is x/sqrt(v), as a product or a quotient, else None."""
    term = chain.term(node)
    if term.op == "mul":
        for x, other in chain.pairs(node):
            if (variance := one_over_root(chain, other)) is not None:
                return x, variance
    if term.op == "div" and term.args[2] is None and (variance := chain.operand(term.args[1], "sqrt")) is not None:
        return term.args[0], variance
    return None


def square_of(chain: Chain, node: Any) -> Any | None:
    """`x` if `node` is x*x or x**2, else None."""
    term = chain.term(chain.skip(node))
    if term.op == "pow" and term.args[1] == 2:
        return term.args[0]
    if term.op == "mul" and chain.skip(term.args[0]) is chain.skip(term.args[1]):
        return term.args[0]
    return None


def one_plus(chain: Chain, node: Any) -> fx.Node | None:
    """`w` if `node` is 1 + w taken in float32 (a 16-bit sum would round before the product), else None."""
    node = chain.skip(node)
    if chain.term(node).op != "add" or chain.term(node).args[2] != 1 or dtype_of(node) != torch.float32:
        return None
    found = chain.scalar_and_node(node)
    return exact_source(chain, found[1])[-1] if found and found[0] == 1.0 else None


def exact_source(chain: Chain, node: fx.Node) -> list[fx.Node]:
    """`node` and what lies behind its views and its exact cast from 16 bits to float32."""
    path = [node]
    while (term := chain.term(path[-1])).op in ("view", "cast"):
        source, dtype = dtype_of(term.args[0]), dtype_of(path[-1])
        if source != dtype and not (dtype == torch.float32 and source in LOW_PRECISION):
            break
        path.append(term.args[0])
    return path


def mean_square(chain: Chain, variance: Any) -> tuple[float, fx.Node, fx.Node] | None:
    """`(eps, x, mean)` if `variance` is mean(x**2) + eps, else None."""
    variance = chain.skip(variance)
    found = chain.scalar_and_node(variance) if chain.term(variance).op == "add" else None
    if found is None:
        return None
    mean = chain.skip(found[1])
    if chain.term(mean).op != "mean":
        return None
    x = square_of(chain, chain.term(mean).args[0])
    return None if x is None else (found[0], x, mean)


def match_norm(chain: Chain, output: fx.Node) -> Norm:
    """The grouped norm whose (possibly cast and viewed) result is `output`, or Refuse."""
    scaled = chain.skip(output, casts=True)
    if chain.term(scaled).op != "mul":
        raise Refuse(f"%{scaled.name} is not the product of a normalised value and 1 + weight")
    found = [(a, weight) for a, b in chain.pairs(scaled) if (weight := one_plus(chain, b)) is not None]
    if not found:
        raise Refuse("the norm's scale is not 1 + weight in float32")
    normalised, weight = found[0]
    found = scaled_by_root(chain, chain.skip(normalised))
    if found is None:
        rounded = scaled_by_root(chain, chain.skip(normalised, casts=True)) is not None
        what = f"rounded to {short(dtype_of(normalised))} before it is scaled" if rounded else "not x * rsqrt(...)"
        raise Refuse(f"the normalised value is {what}")
    x, variance = found
    if (parts := mean_square(chain, variance)) is None:
        raise Refuse("the norm's root is not over mean(x**2) + eps")
    eps, squared, mean = parts
    if exact_source(chain, squared)[-1] is not exact_source(chain, x)[-1]:
        raise Refuse(f"the norm divides %{x.name} by the root of another value's mean square")
    return _checked_norm(chain, x, squared, mean, weight, eps)


def _checked_norm(chain: Chain, x: fx.Node, squared: fx.Node, mean: fx.Node, weight: fx.Node, eps: float) -> Norm:
    grouped = value_of(squared)
    dims = reduced_dims(chain.term(mean), grouped.dim())
    if dims != (grouped.dim() - 1,):
        raise Refuse(f"mean of squares over dims {dims}, expected the last of {grouped.dim()}")
    if chain.term(mean).args[3] not in (None, torch.float32) or {dtype_of(x), dtype_of(squared)} != {torch.float32}:
        raise Refuse(f"the norm is computed in {short(dtype_of(squared))}; the op computes in float32")
    if not same_shape(value_of(x).shape, grouped.shape):
        raise Refuse("the norm's mean and its product see the value in different shapes")
    group_size, width = grouped.shape[-1], value_of(weight).shape[-1] if value_of(weight).dim() == 1 else None
    if not isinstance(group_size, int) or not isinstance(width, int):
        raise Refuse(f"weight {list(value_of(weight).shape)} and group {group_size}: expected a constant 1-D weight")
    if not eps > 0:
        raise Refuse(f"eps is {eps}, expected a positive number")
    return Norm(_source(chain, x, group_size, width), weight, group_size, eps)


def _source(chain: Chain, x: fx.Node, group_size: int, width: int) -> fx.Node | Reshaped:
    """The norm's input in its own dtype and in shape [.., width]: behind the views and the exact cast to float32."""
    groups = value_of(x).shape
    if len(groups) < 2 or not same_size(groups[-2] * groups[-1], width):
        raise Refuse(f"groups {list(groups)} do not tile the weight's width {width}")
    path = exact_source(chain, x)
    own = [node for node in path if dtype_of(node) == dtype_of(path[-1])]
    for node in own:
        if same_shape(value_of(node).shape, (*groups[:-2], width)):
            return chain.without_casts(node)
    for node in own:
        if same_shape(value_of(node).shape, groups):
            return Reshaped(node, "flatten", -2)
    raise Refuse(f"%{path[-1].name} {list(value_of(path[-1]).shape)} is not the norm's input [.., {width}]")


def _result(chain: Chain, scaled: fx.Node, norm: Norm) -> fx.Node:
    """Goes forward from the scaled value over its views and cast to the node with the op's shape and dtype."""
    dtype, width = dtype_of(norm.x.node if isinstance(norm.x, Reshaped) else norm.x), value_of(norm.weight).shape[0]
    node = scaled
    while not (dtype_of(node) == dtype and same_size(value_of(node).shape[-1], width)):
        users = list(node.users)
        if len(users) != 1 or chain.term(users[0]).op not in ("view", "cast"):
            raise Refuse(f"the result stays {short(dtype_of(node))}; the op returns x's {short(dtype)}")
        node = users[0]
    return node


def find(chain: Chain, node: fx.Node) -> Plan | None:
    """Anchor: the product with the scale, where it covers more than one group."""
    if chain.term(node).op != "mul":
        return None
    for normalised, scale in chain.pairs(node):
        rooted = scaled_by_root(chain, chain.skip(normalised, casts=True))
        parts = mean_square(chain, rooted[1]) if rooted else None
        if parts is None:
            continue
        weight = one_plus(chain, scale)
        width = value_of(node).shape[-1] if weight is None else value_of(weight).numel()
        if same_size(width, value_of(parts[1]).shape[-1]):
            return None
        norm = match_norm(chain, node)
        check_floats(norm.x, norm.weight)
        output = _result(chain, node, norm)
        kwargs = {"group_size": norm.group_size, "eps": norm.eps}
        op = torch.ops.ple_gdn.grouped_rms_norm.default
        return Plan(op, (norm.x, norm.weight), kwargs, output, output)
    return None


def run(gm: fx.GraphModule, ctx: PassContext) -> None:
    run_pattern(gm, ctx, PASS.name, find)


PASS = GraphPass("fuse_grouped_rms_norm", "dynamo", run)
