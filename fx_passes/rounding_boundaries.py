"""Keeps eager's roundings around the gated residual ops, or everywhere, in the joint graph.

Three steps, by `options.rounding`:

1. Every gated residual and grouped norm op, forward and backward, is written out as the ATen chain of its reference.
   The partitioner then saves and recomputes as in plain Inductor, and neighbours fuse.

   before: %mix = ple_gdn.gated_residual_mix(%up, %normed, 4)
   after:  %sigmoid = aten.sigmoid(%up); %mul = aten.mul(view(%sigmoid), view(%normed)); %mean = aten.mean(%mul, [-2])

2. Nodes that must round are marked in `node.meta`. "eager": the element-wise BF16/FP16 nodes connected to a chain of
   step 1, gradient sums included, sums with a matrix product (Inductor would fold those into an addmm, dropping a
   rounding) and casts read again in fp32. "eager_all": every element-wise BF16/FP16 node. "fast": none.
3. After partitioning, `RoundMarkedNodes` turns each marked node into its `ple_gdn_rounded` op. Not earlier: the
   partitioner knows ATen ops as recomputable, and would save the result of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from ..lowerings.by_aten import UNTAGGED, by_aten, ops_by_aten
from ..lowerings.rounding import NAMESPACE, SHORT_SUMS, can_lower, is_short_sum, rounded_op
from ..ops.gated_residual import reference as gated_residual
from ..ops.grouped_rms_norm import reference as grouped_rms_norm
from ..ops.validation import LOW_PRECISION
from .records import GraphPass, PassContext

aten = torch.ops.aten
prims = torch.ops.prims
MARK = "ple_gdn_rounded"
# What a node of a chain keeps for itself; the rest (checkpoint region, backward tag, stack trace) is the op node's.
OWN_META = frozenset({"val", "tensor_meta", "eager_input_vals", "original_aten"})

VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.alias.default,
    }
)
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})

# Decompositions that do not round where eager does: left out for 16-bit operands, so that the node arrives here.
KEPT_WHOLE = (aten.sigmoid_backward.default, aten.silu.default, aten.silu_backward.default)


def _norm(x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    return grouped_rms_norm.grouped_rms_norm(x, weight, group_size, eps)


def _norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    return grouped_rms_norm.grouped_rms_norm_backward(dy, x, weight, group_size, eps)


# Raw op name -> the ATen chain that stands for it.
CHAINS: dict[str, Callable[..., Any]] = {
    "gated_residual_down": gated_residual.down,
    "gated_residual_down_backward": gated_residual.down_backward,
    "gated_residual_mix": gated_residual.mix,
    "gated_residual_mix_backward": gated_residual.mix_backward,
    "gated_residual_inject": gated_residual.inject,
    "gated_residual_inject_backward": gated_residual.inject_backward,
    "grouped_rms_norm": _norm,
    "grouped_rms_norm_backward": _norm_backward,
}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_low(value: Any) -> bool:
    return any(t.dtype in LOW_PRECISION for t in _tensors(value))


def decompositions(rounding: str) -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """Inductor's decompositions, for "eager" and "eager_all" less those of `KEPT_WHOLE` for 16-bit operands.

    With "eager_all" also less those of calls that only ATen's own kernels compute as eager does.
    """
    table = dict(select_decomp_table())
    if rounding == "fast":
        return table

    def unless_low(target: torch._ops.OperatorBase, decomposition: Callable[..., Any]) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            if not _is_low(args) or not (target in KEPT_WHOLE or by_aten(target, args, kwargs)):
                return decomposition(*args, **kwargs)
            # Inductor's joint passes take it for a `round` without the keyword, and raise.
            hidden = target is aten.round.decimals
            return rounded_op(target, *args, **kwargs)(*args, **kwargs) if hidden else NotImplemented

        return decompose

    for target in KEPT_WHOLE if rounding == "eager" else (*KEPT_WHOLE, *ops_by_aten()):
        if target in table:
            table[target] = unless_low(target, table[target])
    return table


def _trace(function: Callable[..., Any], args: tuple, kwargs: dict, table: dict) -> torch.fx.GraphModule:
    """ATen graph of `function` on the fake tensors of `args`; its results are contiguous, as the op's are."""

    def contiguous(*tensors: torch.Tensor) -> Any:
        result = function(*tensors, *constants, **kwargs)
        return [t.contiguous() for t in _tensors(result)]

    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    constants = [a for a in args if not isinstance(a, torch.Tensor)]
    with detect_fake_mode(tensors), enable_python_dispatcher():
        gm = make_fx(contiguous, table, tracing_mode="real")(*tensors)
    gm.graph.eliminate_dead_code()
    return gm


def _description(args: tuple, kwargs: dict) -> str:
    """What a trace depends on: calls of one description have one chain."""
    of_args = [(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in args]
    return f"{of_args} {kwargs}"


class _Chains:
    """Writes ops out as the chains of `CHAINS`; layers of one shape share a trace."""

    def __init__(self, table: dict) -> None:
        self.table = table
        self.traces: dict[tuple[Any, str], torch.fx.GraphModule] = {}

    def trace(self, node: torch.fx.Node) -> torch.fx.Graph:
        args, kwargs = torch.fx.map_arg(node.args, lambda n: n.meta["val"]), dict(node.kwargs)
        key = (node.target, _description(args, kwargs))
        if key not in self.traces:
            function = CHAINS[node.target._schema.name.removeprefix("ple_gdn::")]
            self.traces[key] = _trace(function, args, kwargs, self.table)
        return self.traces[key].graph

    def write_out(self, gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Replaces one op node by its chain; returns the chain's nodes."""
        traced = self.trace(node)
        inherited = {k: v for k, v in node.meta.items() if k not in OWN_META}
        inputs = (a for a in node.args if isinstance(a, torch.fx.Node))
        env: dict[torch.fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
        added = []
        with gm.graph.inserting_before(node):
            for inner in traced.nodes:
                if inner.op == "call_function":
                    env[inner] = gm.graph.node_copy(inner, lambda n: env[n])
                    env[inner].meta = {**inner.meta, **inherited}
                    added.append(env[inner])
        # Values of their own: whoever compares storages must not take two layers' results for one tensor.
        with detect_fake_mode([node.meta["val"]]), enable_python_dispatcher():
            for new in added:
                args, kwargs = torch.fx.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
                new.meta["val"] = new.target(*args, **kwargs)
        (results,) = traced.output_node().args
        results = [env[r] for r in results]
        if isinstance(node.meta["val"], torch.Tensor):
            node.replace_all_uses_with(results[0])
        else:
            for getitem in list(node.users):
                getitem.replace_all_uses_with(results[getitem.args[1]])
                gm.graph.erase_node(getitem)
        gm.graph.erase_node(node)
        return added


def _rounds(node: torch.fx.Node) -> bool:
    """An element-wise node (or a short sum, of streams say) with a BF16/FP16 result or operand, that can be lowered."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target.namespace == NAMESPACE:
        return False
    elementwise = torch.Tag.pointwise in target.tags or target in UNTAGGED
    elementwise |= target is prims.convert_element_type.default
    if target in SHORT_SUMS and len(node.args) > 1 and not node.kwargs:
        elementwise = is_short_sum(target, node.args[0].meta["val"].shape, node.args[1])
    if not elementwise or torch.Tag.nondeterministic_seeded in target.tags or not can_lower(target):
        return False
    return _is_low([n.meta.get("val") for n in (node, *node.all_input_nodes)])


def _connected(chains: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The rounding nodes reached from `chains` through other rounding nodes and views."""
    found: set[torch.fx.Node] = set()
    todo = list(chains)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if _rounds(node):
            found.add(node)
        for near in (*node.all_input_nodes, *node.users):
            if near not in seen and (_rounds(near) or (near.target in VIEWS and _is_low(near.meta.get("val")))):
                seen.add(near)
                todo.append(near)
    return found


def _sums_with_a_product(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _rounds(node) and any(n.target in PRODUCTS for n in node.all_input_nodes):
            yield node


def _casts_read_in_fp32(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    cast = prims.convert_element_type.default
    for node in graph.find_nodes(op="call_function", target=cast):
        if _is_low(node.meta.get("val")) and any(u.target is cast and not _is_low(u.meta["val"]) for u in node.users):
            yield node


def _unhide_casts(graph: torch.fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if set(node.kwargs) == {"dtype"}:
            node.target = prims.convert_element_type.default
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}


def _run(gm: torch.fx.GraphModule, context: PassContext) -> None:
    rounding = context.options.rounding
    _unhide_casts(gm.graph)
    writer = _Chains(decompositions(rounding))
    targets = {getattr(torch.ops.ple_gdn, name).default for name in CHAINS}
    chains: list[torch.fx.Node] = []
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in targets:
            chains.extend(writer.write_out(gm, node))
    gm.graph.eliminate_dead_code()
    if rounding == "fast":
        return
    alive = set(gm.graph.nodes)
    if rounding == "eager":
        marked = _connected(n for n in chains if n in alive)
        marked.update(_sums_with_a_product(gm.graph), _casts_read_in_fp32(gm.graph))
    else:
        marked = {n for n in alive if _rounds(n)}
    for node in gm.graph.nodes:
        if node in marked:
            node.meta[MARK] = True
            if by_aten(node.target, node.args, node.kwargs):
                context.records.fallbacks.append(f"{node.target} in {rounding!r} rounding: ATen's kernel, not fused")


PASS = GraphPass(name="rounding_boundaries", stage="joint", run=_run)


class HideFromJointPasses(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass`: what its joint passes would simplify in 16 bits without eager's result.

    A cast to 16 bits that is read again in fp32 rounds on purpose, but a pattern of torch before 2.13 removes the pair:
    under another name the pattern does not see it; the joint pass gives the name back. A product with the int 0 would
    become zeros, without NaN or the sign of 0.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in list(_casts_read_in_fp32(graph)):
            source, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
        for target in (aten.mul.Tensor, aten.mul.Scalar):
            for node in graph.find_nodes(op="call_function", target=target):
                if _is_low(node.meta.get("val")):
                    node.args = tuple(0.0 if isinstance(a, int) and a == 0 else a for a in node.args)

    def uuid(self) -> str:
        return self.key


class RoundMarkedNodes(CustomGraphPass):
    """Inductor's `post_grad_custom_pre_pass`: marked ATen nodes become their rounded ops. Runs before the patterns that
    fold a sum into an addmm, which no longer match."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            # A saved tensor's placeholder in the backward carries the mark of the node it comes from.
            if node.op == "call_function" and node.meta.get(MARK):
                node.target = rounded_op(node.target, *node.args, **node.kwargs)

    def uuid(self) -> str:
        return self.key
