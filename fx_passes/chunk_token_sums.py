"""Weight gradients that are sums over tokens, in chunks, where Inductor would store whole-sequence operands of them.

before: product: f32[T, W] = ...a long chain of x, w, ...; dw: f32[W] = aten.sum.dim_IntList(product, [0])
after:  dw = while_loop(..) over chunks of R rows, each of which computes its rows of the chain (token_loop.py)

R is what the budget `workspace_bytes` holds of the buffers that Inductor would store. A sum whose chain Inductor
inlines into the reduction is left alone: the loop could only add to its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from ..ops.validation import LOW_PRECISION
from .matching import where_of
from .normalize import same_shape
from .records import GraphPass, PassContext, Refusal, Rewrite
from .token_cone import Cone, Refuse, collect, cone_of
from .token_loop import replace_by_loop

aten = torch.ops.aten


@dataclass(frozen=True)
class TokenSum:
    """A sum over all dims but the last `kept`, and every node that its value is computed from elementwise."""

    node: fx.Node
    kept: int
    chain: frozenset[fx.Node]

    @property
    def shape(self) -> tuple:
        return tuple(self.node.args[0].meta["val"].shape)


def _hint(size: int | torch.SymInt) -> float:
    """Expected value of a size; infinite if nothing is known of it."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else math.inf


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on an upstream gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _kept_dims(node: fx.Node) -> int | None:
    """Dims that stay, if `node` sums float32 over all leading ones of a tensor with static trailing ones."""
    value, dims = node.args[0].meta.get("val"), node.args[1]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not dims:
        return None
    if node.kwargs.get("dtype") not in (None, torch.float32):
        return None
    reduced = sorted(dim % value.dim() for dim in dims)
    kept = value.dim() - len(reduced)
    static = all(isinstance(size, int) for size in value.shape[len(reduced) :])
    return kept if kept and static and reduced == list(range(len(reduced))) else None


def _bytes(node: fx.Node) -> float:
    value = node.meta["val"]
    return math.prod(map(_hint, value.shape)) * value.dtype.itemsize


def _is_low(node: fx.Node) -> bool:
    return node.meta["val"].dtype in LOW_PRECISION


def _candidates(graph: fx.Graph, context: PassContext) -> list[TokenSum]:
    """Sums of more than the budget under which something is stored; the others are recorded with the reason."""
    budget, backward, found = context.options.workspace_bytes, _backward_nodes(graph), []
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        kept = _kept_dims(node) if node in backward else None
        if kept is None or _bytes(node.args[0]) <= budget:
            continue
        try:
            chain, _ = collect((node,), tuple(node.args[0].meta["val"].shape), kept, set())
            if not chain:
                raise Refuse("the summed value is in memory already")
            found.append(TokenSum(node, kept, frozenset(chain)))
        except Refuse as refusal:
            context.records.refusals.append(Refusal(PASS.name, where_of(node), str(refusal)))
    return found


def _groups(found: list[TokenSum]) -> list[list[TokenSum]]:
    """Sums over one shape whose chains meet: what they share is stored for all of them, or for none."""
    groups: list[list[TokenSum]] = []
    for entry in found:
        joined, rest = [entry], []
        for group in groups:
            same = group[0].kept == entry.kept and same_shape(group[0].shape, entry.shape)
            if same and any(entry.chain & other.chain for other in group):
                joined = group + joined
            else:
                rest.append(group)
        groups = [*rest, joined]
    return groups


def _place(sums: tuple[fx.Node, ...], cone: Cone) -> fx.Node:
    """The first of the sums in front of which all leaves exist, if no result is needed before it. Raises Refuse."""
    position = {node: index for index, node in enumerate(sums[0].graph.nodes)}
    ready = max(position[leaf] for leaf in cone.leaves)
    place = min((s for s in sums if position[s] > ready), key=position.__getitem__)
    if any(position[user] < position[place] for s in sums for user in s.users):
        raise Refuse("a result is needed before the last operand of the others exists")
    return place


def _rewrite(gm: fx.GraphModule, group: list[TokenSum], context: PassContext) -> None:
    sums, kept = tuple(entry.node for entry in group), group[0].kept
    budget, where = context.options.workspace_bytes, where_of(sums[0])
    try:
        cone = cone_of(sums, kept, _backward_nodes(gm.graph))
        if not cone.stored:
            raise Refuse("Inductor computes the summed value inside the reduction, or stores it for others as well")
        if context.options.rounding != "fast" and any(_is_low(node) for node in cone.nodes):
            raise Refuse("the chain computes in 16 bits: a loop body would not round where eager does")
        stored = sum(map(_bytes, cone.stored))
        if stored <= budget:
            raise Refuse(f"the stored operands take {stored:.0f} bytes, within the budget of {budget}")
        at = _place(sums, cone)
    except Refuse as refusal:
        context.records.refusals.append(Refusal(PASS.name, where, str(refusal)))
        return
    row = math.prod(sums[0].args[0].meta["val"].shape[-kept:]) * 4
    # Measured: one buffer more than is stored; beside them each sum's total twice, its share and a partial result.
    rows = max(int(budget - 4 * len(sums) * row) // ((len(cone.stored) + 2) * row), 1)
    replace_by_loop(gm, sums, cone, kept, rows, at)
    detail = f"{len(sums)} sum(s), {rows} rows in {budget} bytes, {len(cone.stored)} buffer(s) no longer stored"
    context.records.rewrites.append(Rewrite(PASS.name, "while_loop", where, detail))


def run(gm: fx.GraphModule, context: PassContext) -> None:
    if not context.options.fuse:
        return
    for group in _groups(_candidates(gm.graph, context)):
        _rewrite(gm, group, context)


PASS = GraphPass("chunk_token_sums", "joint", run)
