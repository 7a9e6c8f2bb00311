"""Fuses the PLE block behind its projections (`Qwen4ExpTextPLELayer`), with or without `conv_mask` and residual.

Before (k, q: grouped RMSNorms of key and hidden, split into streams; d the dilation, K the conv kernel):
    s = (k * q).sum(-1, keepdim=True) / sqrt(C)
    g = sigmoid(s.abs().clamp_min(1e-6).sqrt() * s.sign()) * value.unsqueeze(-2)
    gated, normed = g.flatten(-2), norm_conv(g.flatten(-2))             # each * conv_mask[:, :, None] if there is one
    c = conv1d(F.pad(normed.transpose(1, 2), ((K - 1) * d, 0)), conv_weight, groups=N*C, dilation=d)
    y = hidden + (gated + F.silu(c).transpose(1, 2))                    # the outer sum may be missing

After:
    y, stats = ple_gdn.ple_gate_conv(hidden, key, value, w_k, w_q, w_c, conv_weight, None, conv_mask,
                                     dilation=d, eps=eps, residual=True)

The op computes in float32 what eager rounds after every step, so casts between float types may stand inside the chain.
With rounding="eager_all" it is left unfused. `score` is symmetric in key and query, so either may come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops.validation import FLOATS
from .fuse_grouped_rms_norm import Norm, match_norm
from .matching import (
    Chain,
    Plan,
    Refuse,
    Reshaped,
    check_floats,
    check_streams,
    dtype_of,
    fixed_number,
    reduced_dims,
    run_pattern,
    value_name,
)
from .normalize import same_shape, same_size, value_of
from .records import GraphPass, PassContext

SCORE_FLOOR = 1e-6
# From the gate to its convolution HF's layer has 18 nodes; what lies further away belongs to something else.
_SEARCH_LIMIT = 60


@dataclass(frozen=True)
class Conv:
    """The matched convolution branch: `normed` is what it reads (behind the mask), [B, T, N*C]."""

    normed: fx.Node
    weight: fx.Node
    dilation: int
    mask: fx.Node | None


@dataclass(frozen=True)
class Gate:
    """The matched gate: sigmoid of the signed root of the score of two norms."""

    score: fx.Node
    norms: tuple[Norm, Norm]
    value: fx.Node


def _like_number(chain: Chain, node: Any, op: str, expected: float, what: str) -> Any:
    """The tensor operand of `op(tensor, number)`, its number being `expected`, or Refuse."""
    node = chain.skip(node, casts=True)
    term = chain.term(node)
    number = fixed_number(term.args[1]) if term.op == op else None
    if number is None:
        raise Refuse(f"{what}: expected {op} with a number, got {term.op} ({value_name(node)})")
    if op == "div" and term.args[2] is not None:
        raise Refuse(f"{what}: divides with rounding_mode={term.args[2]!r}")
    if not math.isclose(number, expected, rel_tol=1e-6):
        raise Refuse(f"{what} is {number:g}, expected {expected:g}")
    return term.args[0]


def _require(chain: Chain, node: Any, op: str, what: str) -> fx.Node:
    """`node` behind views and casts, if it is an `op`, or Refuse."""
    node = chain.skip(node, casts=True)
    if chain.term(node).op != op:
        raise Refuse(f"{what}: expected {op}, got {chain.term(node).op} ({value_name(node)})")
    return node


def _find_sum(chain: Chain, sign: fx.Node) -> fx.Node:
    """The sum of the gated value and the convolution branch, downstream of the gate's `sign`."""
    seen, frontier = {sign}, [sign]
    while frontier and len(seen) < _SEARCH_LIMIT:
        node = frontier.pop(0)
        for user in node.users:
            if user in seen or value_of(user) is None:
                continue
            if chain.term(user).op == "add" and any(_conv_branch(chain, a) for a in chain.term(user).args[:2]):
                return user
            seen.add(user)
            frontier.append(user)
    raise Refuse("no silu(conv1d(...)) of the gated value is added to it")


def _conv_branch(chain: Chain, node: Any) -> fx.Node | None:
    """The conv1d if `node` is silu of it, channels last again, else None."""
    if value_of(node) is None:
        return None
    silu = chain.operand(node, "permute", casts=True)
    conv = chain.operand(silu, "silu", casts=True) if silu is not None else None
    if conv is None:
        return None
    conv = chain.skip(conv, casts=True)
    if chain.term(conv).op == "slice":
        conv = chain.skip(chain.term(conv).args[0], casts=True)
    return conv if chain.term(conv).op == "conv1d" else None


def _check_swap(chain: Chain, node: fx.Node, what: str) -> Any:
    permute = _require(chain, node, "permute", what)
    if chain.term(permute).args[1] != (0, 2, 1):
        raise Refuse(f"{what}: dims are permuted to {chain.term(permute).args[1]}, expected (0, 2, 1)")
    return chain.term(permute).args[0]


def _only(value: Any, what: str) -> int:
    """The one entry of a per-dimension convolution argument."""
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if value == "valid":
        return 0
    if not isinstance(value, int):
        raise Refuse(f"the convolution's {what} is {value!r}, expected a constant int")
    return value


def _match_conv(chain: Chain, branch: fx.Node) -> Conv:
    silu = _require(chain, _check_swap(chain, branch, "after the convolution"), "silu", "after the convolution")
    cut = chain.skip(chain.term(silu).args[0], casts=True)
    conv = chain.skip(chain.term(cut).args[0], casts=True) if chain.term(cut).op == "slice" else cut
    source, weight, bias, stride, padding, dilation, groups = chain.term(conv).args
    shape = value_of(weight).shape
    if bias is not None:
        raise Refuse("the convolution has a bias")
    if _only(stride, "stride") != 1:
        raise Refuse(f"the convolution's stride is {_only(stride, 'stride')}, expected 1")
    if groups != shape[0] or shape[1] != 1:
        raise Refuse(f"the convolution has {groups} groups for {shape[0]} channels, expected depthwise")
    padding, dilation = _only(padding, "padding"), _only(dilation, "dilation")
    history = (shape[2] - 1) * dilation
    if padding == 0:
        padded = _require(chain, source, "pad", "before the convolution")
        source, pads, mode, fill = chain.term(padded).args
        if mode != "constant" or fill not in (None, 0):
            raise Refuse(f"pads with mode {mode!r} and value {fill}, expected zeros")
        left, right = tuple(pads) if len(pads) == 2 else (None, None)
    else:
        left = right = padding
    _check_causal(chain, cut, conv, source, (left, right), history)
    normed, mask = _behind_mask(chain, _check_swap(chain, source, "before the convolution"))
    return Conv(normed, weight, dilation, mask)


def _check_causal(chain: Chain, cut: fx.Node, conv: fx.Node, source: fx.Node, pads: tuple, history: int) -> None:
    """Zeros of (kernel - 1) * dilation on the left, and no output row beyond the last token."""
    if pads[0] != history:
        raise Refuse(f"pads {pads[0]} rows on the left, expected (kernel - 1) * dilation = {history}")
    if cut is not conv:
        _, dim, kept = chain.term(cut).args
        if dim != 2 or kept.start not in (None, 0):
            raise Refuse(f"the convolution's output is cut to {kept} of dim {dim}, expected its first rows")
    tokens, rows = value_of(source).shape[-1], value_of(cut).shape[-1]
    if not same_size(tokens, rows):
        raise Refuse(f"the convolution gives {rows} rows for {tokens} tokens")


def _behind_mask(chain: Chain, node: Any) -> tuple[fx.Node, fx.Node | None]:
    """`(x, mask)` if `node` is x * mask[:, :, None] behind views and casts, else `(node, None)`."""
    product = chain.skip(node, casts=True)
    if chain.term(product).op == "mul":
        for x, mask in chain.pairs(product):
            if value_of(mask) is None or value_of(x) is None or value_of(mask).dim() < 3:
                continue
            rows = value_of(x).shape[:2]
            if same_shape(value_of(mask).shape, (*rows, *[1] * (value_of(mask).dim() - 2))) and _is_mask(chain, mask):
                return x, mask
    return product, None


def _is_mask(chain: Chain, mask: fx.Node) -> bool:
    """A per-token factor that is a view of a [B, T] tensor (the gate and the value have more)."""
    return value_of(mask).dim() == 3 or value_of(chain.skip(mask, casts=True)).dim() == 2


def _match_gate(chain: Chain, gated: fx.Node) -> Gate:
    """`gated` is sigmoid(signed root of the score) * value.unsqueeze(-2), [B, T, N, C] behind views."""
    if (found := chain.factor(gated, "sigmoid", casts=True)) is None:
        raise Refuse(f"%{gated.name} is not sigmoid(...) * value")
    logit, value = found
    product = _require(chain, logit, "mul", "inside the sigmoid")
    if (found := chain.factor(product, "sign", casts=True)) is None:
        raise Refuse("inside the sigmoid: no factor is a sign")
    score, root = found
    root = chain.term(_require(chain, root, "sqrt", "inside the sigmoid")).args[0]
    magnitude = _like_number(chain, root, "clamp_min", SCORE_FLOOR, "the score's floor")
    magnitude = chain.term(_require(chain, magnitude, "abs", "inside the root")).args[0]
    score = chain.skip(score, casts=True)
    if chain.skip(magnitude, casts=True) is not score:
        raise Refuse("the root and the sign are of different scores")
    return Gate(score, _match_score(chain, score, value), value)


def _match_score(chain: Chain, score: fx.Node, value: fx.Node) -> tuple[Norm, Norm]:
    channels = value_of(value).shape[-1]
    if not isinstance(channels, int):
        raise Refuse(f"the value's width {channels} is not a constant")
    root = math.sqrt(channels)
    if chain.term(score).op == "mul" and chain.scalar_and_node(score):
        factor, total = chain.scalar_and_node(score)
        if not math.isclose(factor * root, 1.0, rel_tol=1e-6):
            raise Refuse(f"the score is scaled by {factor:g}, expected 1/sqrt({channels})")
    else:
        total = _like_number(chain, score, "div", root, "the score's divisor")
    total = _require(chain, total, "sum", "the score")
    _, _, _, dtype = chain.term(total).args
    product = chain.skip(chain.term(total).args[0], casts=True)
    rank = value_of(product).dim()
    if reduced_dims(chain.term(total), rank) != (rank - 1,) or dtype not in (None, *FLOATS):
        raise Refuse("the score does not sum over the last dim")
    if chain.term(product).op != "mul":
        raise Refuse("the score is not the sum of a product")
    left, right = chain.term(product).args[:2]
    norms = match_norm(chain, left), match_norm(chain, right)
    for norm in norms:
        if norm.group_size != channels:
            raise Refuse(f"norm groups of {norm.group_size}, value width {channels}")
    return norms


def _check_layout(gate: Gate, gated: fx.Node, streams: int, channels: int) -> None:
    """The gate scales [B, T, N, 1] by [B, T, 1, C]: any other broadcast is another function."""
    grid, value = value_of(gated).shape, value_of(gate.value).shape
    rows = grid[:2]
    if not same_shape(grid, (*rows, streams, channels)) or not same_shape(value, (*rows, 1, channels)):
        raise Refuse(f"the gate scales value {list(value)} to {list(grid)}, expected [B, T, {streams}, {channels}]")


def _key_first(chain: Chain, norms: tuple[Norm, Norm], out: fx.Node, hidden: Any) -> tuple[Norm, Norm]:
    """`(key, query)`: the query is the residual's other term, else of the output's dtype and no projection's result."""
    first, second = norms
    if hidden is not None:
        return (first, second) if chain.skip(second.x) is hidden else (second, first)
    projected = [chain.term(norm.x).op == "linear" for norm in norms]
    swap = dtype_of(second.x) != dtype_of(out) or (projected[1] and not projected[0])
    return (second, first) if swap else (first, second)


def _residual(chain: Chain, out: fx.Node, norms: tuple[Norm, Norm]) -> tuple[fx.Node, fx.Node] | None:
    """`(sum, hidden)` if the only user of `out` adds one of the normed inputs to it."""
    users = list(out.users)
    if len(users) != 1 or chain.term(users[0]).op != "add" or chain.term(users[0]).args[2] != 1:
        return None
    for own, other in chain.pairs(users[0]):
        sources = [chain.skip(norm.x) for norm in norms if isinstance(norm.x, fx.Node)]
        if own is out and value_of(other) is not None and chain.skip(other) in sources:
            same = dtype_of(users[0]) == dtype_of(out) and same_shape(value_of(other).shape, value_of(out).shape)
            return (users[0], chain.skip(other)) if same else None
    return None


def _starts_gate(chain: Chain, sign: fx.Node) -> bool:
    """Whether `sign` is multiplied by a square root: the signed root that only a PLE gate has."""
    for user in sign.users:
        if chain.term(user).op in ("view", "cast") and _starts_gate(chain, user):
            return True
        if chain.term(user).op == "mul":
            factors = [chain.skip(factor, casts=True) for factor in chain.term(user).args]
            if any(chain.term(factor).op == "sqrt" for factor in factors):
                return True
    return False


def _shared_mask(chain: Chain, gated: fx.Node | None, normed: fx.Node | None, rows: tuple) -> fx.Node | Reshaped | None:
    """The one [B, T] mask of both branches, or None if neither has one."""
    if gated is None and normed is None:
        return None
    if gated is None or normed is None:
        raise Refuse("conv_mask multiplies only one of the gated value and its norm")
    masks = [chain.with_rows(mask, rows[:-1], "squeeze", -1) for mask in (gated, normed)]
    if masks[0] != masks[1]:
        raise Refuse("the gated value and its norm are multiplied by different masks")
    return masks[0]


def find(chain: Chain, node: fx.Node) -> Plan | None:
    """Anchor: a sign that multiplies a square root."""
    if chain.term(node).op != "sign" or not _starts_gate(chain, node):
        return None
    out = _find_sum(chain, node)
    if chain.term(out).args[2] != 1:
        raise Refuse(f"the sum scales its second term by alpha={chain.term(out).args[2]}")
    branch, addend = next((a, b) for a, b in chain.pairs(out) if _conv_branch(chain, a) is not None)
    conv = _match_conv(chain, branch)
    unmasked, gated_mask = _behind_mask(chain, addend)
    gated = _require(chain, unmasked, "mul", "the sum's other term")
    gate = _match_gate(chain, gated)
    conv_norm = match_norm(chain, conv.normed)
    if chain.skip(conv_norm.x.node if isinstance(conv_norm.x, Reshaped) else conv_norm.x, casts=True) is not gated:
        raise Refuse("the convolution reads the norm of another value than the gated one")
    channels = conv_norm.group_size
    streams = check_streams(value_of(conv_norm.weight).shape[0] // channels)
    _check_layout(gate, gated, streams, channels)
    if len({norm.eps for norm in (*gate.norms, conv_norm)}) > 1:
        raise Refuse(f"eps differs: {', '.join(f'{norm.eps:g}' for norm in (*gate.norms, conv_norm))}")
    rows = tuple(value_of(gated).shape[:2])
    mask = _shared_mask(chain, gated_mask, conv.mask, rows)
    value = chain.with_rows(gate.value, rows, "squeeze", -2)
    output, hidden = _residual(chain, out, gate.norms) or (out, None)
    key, query = _key_first(chain, gate.norms, out, hidden)
    weights = (key.weight, query.weight, conv_norm.weight, conv.weight)
    check_floats(query.x, key.x, value, *weights)
    kwargs = {"dilation": conv.dilation, "eps": key.eps, "residual": hidden is not None}
    detail = f"{streams} streams" + (", conv_mask" if mask is not None else "") + (", residual" if hidden else "")
    op = torch.ops.ple_gdn.ple_gate_conv.default
    return Plan(op, (query.x, key.x, value, *weights, None, mask), kwargs, output, node, detail)


def run(gm: fx.GraphModule, ctx: PassContext) -> None:
    def find_allowed(chain: Chain, node: fx.Node) -> Plan | None:
        plan = find(chain, node)
        if plan is not None and ctx.options.rounding == "eager_all":
            raise Refuse('rounding="eager_all" leaves PLE unfused: the op rounds once where eager rounds at every step')
        return plan

    run_pattern(gm, ctx, PASS.name, find_allowed)


PASS = GraphPass("fuse_ple", "dynamo", run)
