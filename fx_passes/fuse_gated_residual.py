"""Fuses the three elementwise chains of a gated residual: mix, down and inject.

Before:                                                         After:
    d = F.silu(x / streams)                                         d = ple_gdn.gated_residual_down(x, streams)
    g = torch.sigmoid(up).unflatten(-1, (N, C))
    m = (g * normed.unflatten(-1, (N, C))).mean(dim=-2)             m = ple_gdn.gated_residual_mix(up, normed, N)
    s = h.unsqueeze(-2) * weights.unsqueeze(-1)
    y = hyper + s.flatten(-2)                                       y = ple_gdn.gated_residual_inject(h, hyper, weights)

The ops round where eager rounds, so only casts that change no dtype may stand inside a chain. Mix goes first: the
stream count that a matched mix proves is what the division of its `down` is held against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .matching import (
    STREAM_COUNTS,
    Chain,
    Plan,
    Refuse,
    check_floats,
    check_streams,
    fixed_number,
    has_rows,
    reduced_dims,
    run_pattern,
    short,
    value_name,
)
from .normalize import same_shape, same_size, value_of
from .records import GraphPass, PassContext


def find_mix(chain: Chain, node: fx.Node) -> Plan | None:
    """Anchor: a mean of sigmoid(up) * normed where one of the two is the split of a last dimension."""
    term = chain.term(node)
    if term.op != "mean":
        return None
    product = chain.skip(term.args[0])
    if chain.term(product).op != "mul":
        return None
    for gate, normed in chain.pairs(product):
        up = chain.operand(gate, "sigmoid")
        if up is not None and value_of(normed) is not None:
            break
    else:
        return None
    split, shape = value_of(term.args[0]).shape, value_of(product).shape
    if len(split) < 2 or not any(_splits_last(chain, part) for part in (term.args[0], gate, up, normed)):
        return None
    rows = tuple(split[:-2])
    _check_mean(term, value_of(term.args[0]), value_of(product).dtype)
    streams = check_streams(split[-2])
    for factor in (gate, normed):
        if not same_shape(value_of(factor).shape, shape) or not (same_shape(shape, split) or has_rows(product, rows)):
            raise Refuse(f"{value_name(factor)} {list(value_of(factor).shape)} is broadcast to {list(split)}")
    check_floats(up, normed)
    inputs = (chain.with_rows(up, rows, "flatten", -2), chain.with_rows(normed, rows, "flatten", -2))
    op = torch.ops.ple_gdn.gated_residual_mix.default
    return Plan(op, (*inputs, streams), {}, node, node, f"{streams} streams")


def _splits_last(chain: Chain, node: Any) -> bool:
    """Whether a view behind `node` splits the last dimension in two (rows may be merged on the way)."""
    while (term := chain.term(node)).op in ("view", "cast"):
        wide, split = value_of(term.args[0]).shape, value_of(node).shape
        if len(split) >= 2 and (has_rows(term.args[0], split[:-2]) or same_size(wide[-1], split[-2] * split[-1])):
            return True
        node = term.args[0]
    return False


def _check_mean(term: Any, reduced: torch.Tensor, product_dtype: torch.dtype) -> None:
    _, _, keepdim, dtype = term.args
    dims = reduced_dims(term, reduced.dim())
    if dims != (reduced.dim() - 2,):
        listed = "all dims" if dims is None else f"dim {', '.join(str(dim - reduced.dim()) for dim in dims)}"
        raise Refuse(f"mean over {listed}, expected the stream dim -2")
    if keepdim:
        raise Refuse("the mean keeps the stream dim (keepdim=True)")
    if dtype not in (None, product_dtype):
        raise Refuse(f"the mean is taken in {short(dtype)}, the product is {short(product_dtype)}")


def find_down(chain: Chain, node: fx.Node) -> Plan | None:
    """Anchor: silu of a quotient by a number."""
    if chain.term(node).op != "silu":
        return None
    quotient = chain.skip(chain.term(node).args[0])
    term = chain.term(quotient)
    if term.op != "div" or value_of(term.args[0]) is None:
        return None
    x, divisor, rounding_mode = term.args
    if (divisor := fixed_number(divisor)) is None:
        return None
    if rounding_mode is not None:
        raise Refuse(f"divides with rounding_mode={rounding_mode!r}")
    mixed = _streams_of_mix(node)
    if mixed is not None and divisor != mixed:
        raise Refuse(f"divides by {divisor}, streams are {mixed}")
    if divisor not in STREAM_COUNTS:
        raise Refuse(f"divides by {divisor}; supported stream counts are {', '.join(map(str, STREAM_COUNTS))}")
    check_floats(x)
    if not same_shape(value_of(x).shape, value_of(node).shape):
        raise Refuse(f"a view between the division and silu gives {list(value_of(node).shape)}")
    op = torch.ops.ple_gdn.gated_residual_down.default
    return Plan(op, (x, int(divisor)), {}, node, node, f"{int(divisor)} streams")


def _streams_of_mix(down: fx.Node) -> int | None:
    """The stream count of the mix that `down` feeds through its linear, if one was matched."""
    for linear in down.users:
        for user in linear.users:
            if user.target is torch.ops.ple_gdn.gated_residual_mix.default and user.args[0] is linear:
                return user.args[2]
    return None


def find_inject(chain: Chain, node: fx.Node) -> Plan | None:
    """Anchor: a sum with an outer product over the last two dimensions that ends flattened."""
    if chain.term(node).op != "add":
        return None
    for hyper, addend in chain.pairs(node):
        outer = chain.skip(addend)
        factors = _outer_factors(chain, outer)
        if factors is not None and value_of(hyper) is not None:
            break
    else:
        return None
    if chain.operand(chain.operand(hyper, "permute"), "silu") is not None:
        return None  # the sum of a PLE block, which fuse_ple has judged
    shape = value_of(outer).shape
    rows = tuple(shape[:-2])
    output = _flat_output(chain, node, rows)
    if output is None:
        return None
    streams = check_streams(shape[-2])
    if chain.term(node).args[2] != 1:
        raise Refuse(f"the sum scales its second term by alpha={chain.term(node).args[2]}")
    hidden, weights = factors
    for name, factor in (("hidden", hidden), ("weights", weights)):
        if not same_shape(value_of(factor).shape[:-2], shape[:-2]):
            raise Refuse(f"{name} {list(value_of(factor).shape)} is broadcast over the rows {list(shape[:-2])}")
    if not same_shape(value_of(hyper).shape, value_of(node).shape):
        raise Refuse(f"the sum broadcasts {value_name(hyper)} {list(value_of(hyper).shape)}")
    check_floats(hidden, hyper, weights)
    inputs = (
        chain.with_rows(hidden, rows, "squeeze", -2),
        chain.with_rows(hyper, rows, "flatten", -2),
        chain.with_rows(weights, rows, "squeeze", -1),
    )
    op = torch.ops.ple_gdn.gated_residual_inject.default
    return Plan(op, inputs, {}, output, node, f"{streams} streams")


def _outer_factors(chain: Chain, outer: Any) -> tuple[fx.Node, fx.Node] | None:
    """`(hidden [.., 1, C], weights [.., N, 1])` if `outer` is their product, else None."""
    if chain.term(outer).op != "mul":
        return None
    rank = value_of(outer).dim()
    for row, column in chain.pairs(outer):
        a, b = value_of(row), value_of(column)
        if a is None or b is None or rank < 2 or a.dim() != rank or b.dim() != rank:
            return None
        ones = a.shape[-2] == 1 and b.shape[-1] == 1 if _constant(a.shape[-2], b.shape[-1]) else False
        if ones and not same_size(a.shape[-1], 1) and not same_size(b.shape[-2], 1):
            return row, column
    return None


def _constant(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _flat_output(chain: Chain, total: fx.Node, rows: tuple) -> fx.Node | None:
    """The sum itself if it has the streams flattened, else its only user if that flattens them."""
    if has_rows(total, rows):
        return total
    users = list(total.users)
    if len(users) == 1 and chain.term(users[0]).op == "view" and has_rows(users[0], rows):
        return users[0]
    return None


def _pass(name: str, find: Any) -> GraphPass:
    def run(gm: fx.GraphModule, ctx: PassContext) -> None:
        run_pattern(gm, ctx, name, find)

    return GraphPass(name, "dynamo", run)


MIX = _pass("fuse_gated_residual_mix", find_mix)
DOWN = _pass("fuse_gated_residual_down", find_down)
INJECT = _pass("fuse_gated_residual_inject", find_inject)
