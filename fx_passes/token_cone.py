"""What Inductor would store while it computes a sum over tokens: the pointwise cone of the sum, and which nodes of it.

Inductor inlines pointwise producers into a reduction, so that most products under a sum are never stored. A producer
that has grown too long or reads too much, or that is reused at some cost, becomes a loop of its own
(`GraphLowering.run_node`, `StorageBox.has_exceeded_max_reads`, `should_realize_on_reuse`). Pointwise loops of one shape
are fused again and keep nothing, but the last one before a sum over tokens runs in another order than the sum and is
stored. The same rules are followed here on the graph, with the thresholds of the installed Inductor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from .normalize import same_shape

aten = torch.ops.aten

VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.t.default,
)
# Results that are in memory whatever is fused around them.
STORED = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.mean.dim,
    aten.amax.default,
)
# Ops of ours whose lowering fuses with its neighbours.
FUSED_OPS = ("ple_gdn::gated_residual", "ple_gdn::grouped_rms_norm")
HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


class Refuse(Exception):
    """Why a sum is left alone."""


@dataclass(frozen=True)
class Thresholds:
    """Inductor's limits on what it inlines, for one device."""

    ops: int
    reads: int
    reused_reads: int
    heavy_reuse: bool

    @classmethod
    def of(cls, device: torch.device) -> Thresholds:
        cpu = device.type == "cpu"
        ops, reads = inductor_config.realize_opcount_threshold, inductor_config.realize_acc_reads_threshold
        # torch 2.13 made both optional, with a default for each kind of device; 2.11 has the numbers themselves.
        if ops is None:
            ops = getattr(
                inductor_config, "realize_cpu_opcount_threshold" if cpu else "_realize_opcount_threshold_default"
            )
        if reads is None:
            name = "realize_cpu_acc_reads_threshold" if cpu else "_realize_acc_reads_threshold_default"
            reads = getattr(inductor_config, name)
        return cls(ops, reads, inductor_config.realize_reads_threshold, cpu)


@dataclass(frozen=True)
class Cone:
    """Everything between some sums and what is in memory anyway.

    nodes: pointwise nodes in graph order. leaves: what they read. stored: those of `nodes` that Inductor would write to
    memory and that nothing but these sums needs.
    """

    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    stored: tuple[fx.Node, ...]


def is_pointwise(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.expand.default:
        return True
    tags = node.target.tags
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and not node.target._schema.is_mutable
    )


def fits(node: fx.Node, shape: tuple) -> bool:
    """Whether the node broadcasts to `shape` from the right."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() > len(shape):
        return False
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    return all(_is_one(size) or same_shape((size,), (full,)) for size, full in pairs)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def has_tokens(node: fx.Node, kept: int) -> bool:
    """Whether a dim beyond the last `kept` ones has more than one entry."""
    shape = node.meta["val"].shape
    return any(not _is_one(size) for size in shape[: max(len(shape) - kept, 0)])


def _is_stored(node: fx.Node) -> bool:
    while node.op == "call_function" and (node.target in VIEWS or node.target is operator.getitem):
        node = node.args[0]
    if node.op != "call_function" or node.target in STORED:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    name = node.target._schema.name
    return not name.startswith(("aten::", "prims::", *FUSED_OPS))


def collect(sums: Iterable[fx.Node], shape: tuple, kept: int, cut: set[fx.Node]) -> tuple[set, dict]:
    """Cone and leaves below the sums, stopping at `cut`. Raises Refuse for a leaf that cannot be read in chunks."""
    cone: set[fx.Node] = set()
    leaves: dict[fx.Node, None] = {}
    todo = [s.args[0] for s in sums]
    while todo:
        node = todo.pop()
        if node in cone or node in leaves:
            continue
        if node not in cut and is_pointwise(node) and fits(node, shape):
            cone.add(node)
            # An expand's sizes may be nodes too: they say nothing but the shape.
            todo.extend([node.args[0]] if node.target is aten.expand.default else node.all_input_nodes)
        elif not fits(node, shape):
            raise Refuse(f"%{node.name} does not broadcast to the summed shape")
        elif node not in cut and has_tokens(node, kept) and not _is_stored(node):
            raise Refuse(f"%{node.name} ({node.target}) may not be in memory and cannot be read in chunks")
        else:
            leaves[node] = None
    return cone, leaves


def _constants(node: fx.Node) -> int:
    return sum(isinstance(a, int | float) for a in node.args) if node.target is not aten.expand.default else 0


def _stored_nodes(order: list[fx.Node], summed: set[fx.Node], users_of: Any, limits: Thresholds) -> set[fx.Node]:
    """Nodes of `order` that the reductions over `summed` would read from memory, by Inductor's rules."""
    reads: dict[fx.Node, frozenset] = {}
    work: dict[fx.Node, frozenset] = {}
    inside = set(order)
    for node in order:
        inputs = [node.args[0]] if node.target is aten.expand.default else node.all_input_nodes
        loads = frozenset().union(*(reads[i] if i in inside else {i} for i in inputs))
        steps = frozenset({node}).union(*(work[i] for i in inputs if i in inside))
        count = len(loads) + sum(1 + _constants(step) for step in steps if step.target is not aten.expand.default)
        reused = len(users_of(node)) > 1
        heavy = limits.heavy_reuse and any(step.target._schema.name.split("::")[1] in HEAVY for step in steps)
        too_long = count > limits.ops or len(loads) > limits.reads
        if too_long or (reused and (heavy or len(loads) > limits.reused_reads)):
            loads, steps = frozenset({node}), frozenset()
        reads[node], work[node] = loads, steps
    return {load for node in summed & inside for load in reads[node] if load in inside}


def cone_of(sums: tuple[fx.Node, ...], kept: int, backward: set[fx.Node]) -> Cone:
    """The cone of sums over one shape, the last `kept` dims of which stay. Raises Refuse."""
    value = sums[0].args[0].meta["val"]
    shape, limits = tuple(value.shape), Thresholds.of(value.device)
    cut: set[fx.Node] = set()
    while True:
        cone, leaves = collect(sums, shape, kept, cut)
        order = [node for node in sums[0].graph.nodes if node in cone]
        within = cone | set(sums)

        def users_of(node: fx.Node, within: set = within) -> list[fx.Node]:
            # What the forward uses is no reuse: the backward computes its own copy of a cheap chain.
            return [user for user in node.users if user in within or user in backward]

        stored = _stored_nodes(order, {s.args[0] for s in sums}, users_of, limits)
        needed_elsewhere: set[fx.Node] = set()
        for node in reversed(order):
            if any(user not in within or user in needed_elsewhere for user in users_of(node)):
                needed_elsewhere.add(node)
        shared = stored & needed_elsewhere
        if not shared:
            return Cone(tuple(order), tuple(leaves), tuple(n for n in order if n in stored and has_tokens(n, kept)))
        # In memory for others as well: read it instead of computing it again.
        cut |= shared
