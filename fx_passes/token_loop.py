"""Writes a sum over tokens as a loop over chunks of rows: each turn gathers the rows it needs and adds to the sums.

    while start < rows: sums += where(start + arange(R) < rows, f(leaves[start + arange(R)]), 0).sum(0); start += R

as a `while_loop` node, whose body Inductor compiles like any graph. R is a number; how many turns there are is not, so
one graph serves every length. The start lies on the CPU: reading the condition never waits for a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from .normalize import same_shape
from .records import MADE_BY_PASS
from .token_cone import Cone

aten = torch.ops.aten


def _emit(graph: fx.Graph, target: Callable, *args: object, **kwargs: object) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def _token_sizes(graph: fx.Graph, source: fx.Node, reduced: int) -> list[fx.Node]:
    """The reduced sizes of `source` as integer tensors on the CPU."""
    sizes = []
    for dim, size in enumerate(source.meta["val"].shape[:reduced]):
        if not isinstance(size, int):
            symbol = graph.call_function(aten.sym_size.int, (source, dim))
            symbol.meta["val"] = size
            size = symbol
        sizes.append(_emit(graph, aten.scalar_tensor.default, size, dtype=torch.int64, device=torch.device("cpu")))
    return sizes


def _row_indices(
    start: Tensor, sizes: Sequence[Tensor], rows: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Which of the rows exist, and the index of each reduced dim, [rows] each; rows past the end repeat the last."""
    total = sizes[0]
    for size in sizes[1:]:
        total = total * size
    flat = torch.arange(rows, device=device) + start
    inside = flat < total
    flat = torch.minimum(flat, total - 1)
    indices: list[Tensor] = []
    for size in reversed(sizes[1:]):
        upper = torch.div(flat, size, rounding_mode="floor")
        indices.insert(0, flat - upper * size)
        flat = upper
    return inside, [flat, *indices]


def _gather(leaf: Tensor, indices: list[Tensor], kept: int) -> Tensor:
    """The chunk's rows of a leaf, [rows, kept dims], or the leaf itself where it has no tokens."""
    lead = max(leaf.dim() - kept, 0)
    if all(isinstance(size, int) and size == 1 for size in leaf.shape[:lead]):
        return leaf.reshape(leaf.shape[lead:])
    own = [
        torch.zeros_like(index) if isinstance(size, int) and size == 1 else index
        for size, index in zip(leaf.shape[:lead], indices[len(indices) - lead :], strict=True)
    ]
    return leaf[tuple(own)]


def _make_body(sums: Sequence[fx.Node], cone: Cone, kept: int, reduced: int, rows: int) -> Callable:
    device = sums[0].args[0].meta["val"].device

    def body(start: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        totals, sizes = rest[: len(sums)], rest[len(sums) : len(sums) + reduced]
        inside, indices = _row_indices(start, sizes, rows, device)
        inside = inside.view(rows, *(1,) * kept)
        leaves = (_gather(leaf, indices, kept) for leaf in rest[len(sums) + reduced :])
        values = dict(zip(cone.leaves, leaves, strict=True))
        for node in cone.nodes:
            if node.target is aten.expand.default:
                values[node] = values[node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        chunk = [torch.where(inside, values[s.args[0]], 0.0).sum(0) for s in sums]
        return start + rows, *(total + part for total, part in zip(totals, chunk, strict=True))

    return body


def _make_condition(sums: int, reduced: int) -> Callable:
    def condition(start: Tensor, *rest: Tensor) -> Tensor:
        total = rest[sums]
        for size in rest[sums + 1 : sums + reduced]:
            total = total * size
        return start < total

    return condition


def _attach(gm: fx.GraphModule, kind: str, body: fx.GraphModule) -> str:
    number = 0
    while hasattr(gm, f"token_loop_{kind}_{number}"):
        number += 1
    name = f"token_loop_{kind}_{number}"
    body.meta[MADE_BY_PASS] = True
    gm.add_submodule(name, body)
    return name


def replace_by_loop(gm: fx.GraphModule, sums: Sequence[fx.Node], cone: Cone, kept: int, rows: int, at: fx.Node) -> None:
    """Puts the loop in front of `at` and erases the sums."""
    graph, source = gm.graph, sums[0].args[0]
    value = source.meta["val"]
    reduced = value.dim() - kept
    sized = next(leaf for leaf in cone.leaves if same_shape(leaf.meta["val"].shape[:reduced], value.shape[:reduced]))
    with graph.inserting_before(at), detect_fake_mode(value):
        sizes = _token_sizes(graph, sized, reduced)
        start = _emit(graph, aten.full.default, [], 0, dtype=torch.int64, device=torch.device("cpu"))
        shape = list(value.shape[reduced:])
        totals = [_emit(graph, aten.full.default, shape, 0.0, dtype=value.dtype, device=value.device) for _ in sums]
        carried, extra = (start, *totals), (*sizes, *cone.leaves)
        values = [node.meta["val"] for node in (*carried, *extra)]
        table = select_decomp_table()
        condition = make_fx(_make_condition(len(sums), reduced), table)(*values)
        body = make_fx(_make_body(sums, cone, kept, reduced, rows), table)(*values)
        parts = [graph.get_attr(_attach(gm, kind, g)) for kind, g in (("condition", condition), ("body", body))]
        loop = graph.call_function(while_loop_op, (*parts, carried, extra))
        loop.meta["val"] = tuple(node.meta["val"] for node in carried)
        for index, node in enumerate(sums):
            total = graph.call_function(operator.getitem, (loop, index + 1))
            total.meta["val"] = totals[index].meta["val"]
            result = graph.call_function(aten.view.default, (total, list(node.meta["val"].shape)))
            result.meta = {key: item for key, item in node.meta.items() if key != "eager_input_vals"}
            node.replace_all_uses_with(result)
    for node in sums:
        graph.erase_node(node)
    graph.eliminate_dead_code()
