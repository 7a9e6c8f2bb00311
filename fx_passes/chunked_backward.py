"""Gives each PLE backward its number of token rows per chunk, as an expression of the budget and the shapes.

before: ple_gdn.ple_gate_conv_backward.default(dout, hidden, ..., workspace_bytes=67108864)
after:  tokens = aten.sym_size.int(hidden, 1); rows: Sym(Min(375, s0)) = torch.sym_min(375, tokens)
        ple_gdn.ple_gate_conv_backward.default(dout, hidden, ..., workspace_bytes=67108864, chunk_rows=rows)

With a static length the argument is a number. A call that names its own `chunk_rows` keeps it.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ops.ple.chunking import DEFAULT_WORKSPACE_BYTES, backward_chunk_rows, useful_dilation
from .matching import where_of
from .records import GraphPass, PassContext, Refusal, Rewrite

HIDDEN, VALUE, CONV_WEIGHT = 1, 3, 7  # positions in the backward op's schema


def _symbolic_rows(node: fx.Node, hidden: fx.Node, most: int) -> fx.Node:
    """`Max(1, Min(most, T))` as graph nodes in front of `node`."""
    graph = node.graph
    tokens = hidden.meta["val"].shape[1]
    with graph.inserting_before(node):
        size = graph.call_function(torch.ops.aten.sym_size.int, (hidden, 1))
        size.meta["val"] = tokens
        rows = graph.call_function(torch.sym_min, (most, size))
        rows.meta["val"] = torch.sym_min(most, tokens)
        # A length that may be 0 still needs a row; where it cannot, the expression is the minimum alone.
        at_least_one = torch.sym_max(1, rows.meta["val"])
        if at_least_one.node.expr != rows.meta["val"].node.expr:
            rows = graph.call_function(torch.sym_max, (1, rows))
            rows.meta["val"] = at_least_one
    return rows


def _chunk(node: fx.Node, context: PassContext) -> None:
    hidden, value, conv_weight = (node.args[i] for i in (HIDDEN, VALUE, CONV_WEIGHT))
    tokens, width = hidden.meta["val"].shape[1:]
    channels, kernel = value.meta["val"].shape[2], conv_weight.meta["val"].shape[2]
    where = where_of(node)
    if node.kwargs.get("chunk_rows") is not None:
        context.records.refusals.append(Refusal(PASS.name, where, "the call names its own chunk_rows"))
        return
    if not all(isinstance(size, int) for size in (width, channels, kernel)):
        reason = f"symbolic widths ({width}, {channels}, {kernel}): the op derives its chunks when it runs"
        context.records.refusals.append(Refusal(PASS.name, where, reason))
        return
    budget = node.kwargs.get("workspace_bytes") or DEFAULT_WORKSPACE_BYTES
    itemsize = torch.promote_types(hidden.meta["val"].dtype, torch.float32).itemsize
    dilation = node.kwargs["dilation"]
    if isinstance(tokens, int):
        dilation = useful_dilation(dilation, tokens)
    sizes = (width // channels, channels, kernel, dilation, itemsize)
    if isinstance(tokens, int):
        rows = backward_chunk_rows(budget, tokens, *sizes)
        shown = str(rows)
    else:
        # T is bounded by the budget's own number of rows, which no length exceeds.
        rows = _symbolic_rows(node, hidden, backward_chunk_rows(budget, budget, *sizes))
        shown = f"min({rows.args[0]}, T)" if rows.target is torch.sym_min else "max(1, min(.., T))"
    node.update_kwarg("chunk_rows", rows)
    context.records.rewrites.append(
        Rewrite(PASS.name, "ple_gate_conv_backward", where, f"{shown} rows in {budget} bytes")
    )


def run(gm: fx.GraphModule, context: PassContext) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.ple_gdn.ple_gate_conv_backward.default):
        _chunk(node, context)


PASS = GraphPass("chunked_backward", "joint", run)
