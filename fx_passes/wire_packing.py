"""Gives every stateful part of a packed graph the document boundaries that its chunk rule was given.

transformers hands `cu_seq_lens_q` (or `seq_idx`) to the chunk rule and to the short convolution only; the PLE block of
the same layer would read across documents, and a flattening collator's position ids reach no linear-attention layer.

Before (cu: the boundaries, from the caller or by `document_boundaries`):
    ids   = where(token_ids == eos, positions, -1).cummax(1)              # n-gram lookup: restarts at EOS only
    y     = ple_gdn.ple_gate_conv(h, k, v, ..., None, mask, dilation=3)
    o, .. = ple_gdn.gated_delta_rule(q, k, v, g, beta, None, cu)

After:
    ids   = where((token_ids == eos) | last_of_document, positions, -1).cummax(1)
    y     = ple_gdn.ple_gate_conv(h, k, v, ..., cu, mask, dilation=3)

A PLE convolution left unfused runs on a row with its history's length of zeros in front of every document.
This pass is part of the meaning of the graph: if it fails, the compile fails (`GraphPass.required`). So it does where
one trace reaches it in pieces, and the boundaries stand in another piece than what must be given them: a checkpoint
region of its own, or a part of the graph that DistributedDataParallel compiles by buckets.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._guards import TracingContext
from torch.utils._pytree import tree_map_only

from .matching import where_of
from .normalize import read_term, same_size, value_of
from .records import GraphPass, PassContext, Rewrite

PASS_NAME = "wire_packing"
_MARK = "ple_gdn::document_boundaries"
_RULE = "ple_gdn::gated_delta_rule"
_CONV = "ple_gdn::causal_conv1d"
_PLE = "ple_gdn::ple_gate_conv"
# Tensor arguments of one row per token; all of them are flattened together where a batch becomes one pack.
_TOKEN_ARGUMENTS = {
    _RULE: ("q", "k", "v", "g", "beta"),
    _CONV: ("x",),
    _PLE: ("hidden", "key", "value", "conv_mask"),
}
# The argument whose shape the (first) output has.
_SHAPED_LIKE = {_RULE: "v", _CONV: "x", _PLE: "hidden"}


@dataclass
class _Pieces:
    """What the pieces of one trace have shown so far; a name is that of a node or a place, for the message."""

    boundaries: str = ""
    marked: bool = False
    unwired: str = ""
    unpacked_rule: str = ""

    def check(self) -> None:
        leaking = self.unwired or (self.unpacked_rule if self.marked else "")
        if self.boundaries and leaking:
            raise NotImplementedError(
                f"packed documents would mix in {leaking}: {self.boundaries} stands in another piece of the graph. "
                "Put a checkpoint around the whole decoder layer; under DistributedDataParallel set "
                "torch._dynamo.config.optimize_ddp = False, which compiles a graph in one piece"
            )


_pieces_of: WeakKeyDictionary[TracingContext, _Pieces] = WeakKeyDictionary()


def _op_name(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""


def _schema(node: fx.Node) -> torch.FunctionSchema:
    target = node.target
    return (target.default if isinstance(target, torch._ops.OpOverloadPacket) else target)._schema


def _argument(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in _schema(node).arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    names = [argument.name for argument in _schema(node).arguments]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _nodes(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [node for node in graph.nodes if _op_name(node) in names]


class Emitter:
    """Adds nodes before `anchor`, with the fake value that each computes."""

    def __init__(self, anchor: fx.Node, after: bool = False) -> None:
        self.graph, self.anchor, self.after = anchor.graph, anchor, after

    def __call__(self, target: Callable | str, *args: Any, **kwargs: Any) -> fx.Node:
        values = tree_map_only(fx.Node, lambda node: node.meta["example_value"], (args, kwargs))
        fake = next(value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
        call = getattr(torch.Tensor, target) if isinstance(target, str) else target
        with fake.fake_mode:
            value = call(*values[0], **values[1])
        place = self.graph.inserting_after if self.after else self.graph.inserting_before
        with place(self.anchor):
            kind = "call_method" if isinstance(target, str) else "call_function"
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["example_value"] = value
        if self.after:
            self.anchor = node
        return node


def _is_part() -> bool:
    """Whether DistributedDataParallel is handing the graph over in parts, one a bucket."""
    if not torch.distributed.is_available() or torch._dynamo.utils.get_optimize_ddp_mode() != "ddp_optimizer":
        return False
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def _from_a_caller(mark: fx.Node) -> bool:
    """Whether position ids come from an integer input; the model's own `arange` marks no documents."""
    seen, stack = set(), [mark]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        value = value_of(node)
        # A part of a graph split by buckets also has inputs that an earlier part made: those have no source.
        given = node.op == "placeholder" and (hasattr(node, "_dynamo_source") or not _is_part())
        if given and value is not None and not value.dtype.is_floating_point:
            return True
        stack.extend(node.all_input_nodes)
    return False


def _bodies(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    """Each graph module run by a higher-order operator of `gm`, with the nodes that run it."""
    callers: dict[str, list[fx.Node]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(gm, str(node.target), None), fx.GraphModule):
            callers.setdefault(node.target, []).extend(node.users)
    for name, nodes in callers.items():
        yield getattr(gm, name), nodes


def _hand_in(body: fx.GraphModule, calls: list[fx.Node], boundaries: fx.Node) -> fx.Node:
    """`boundaries` as one more operand of the checkpoint region `body`."""
    placeholders = body.graph.find_nodes(op="placeholder")
    for call in calls:
        if getattr(call.target, "__name__", "") != "tag_activation_checkpoint" or len(call.args) != 1 + len(
            placeholders
        ):
            raise NotImplementedError(f"packed rows by position_ids inside {call.target}: pass cu_seq_lens_q instead")
        call.args = (*call.args, boundaries)
    with body.graph.inserting_after(placeholders[-1]) if placeholders else body.graph.inserting_before():
        node = body.graph.placeholder("document_boundaries")
    node.meta["example_value"] = boundaries.meta["example_value"]
    return node


def _spread(gm: fx.GraphModule, boundaries: fx.Node) -> int:
    """Hands `boundaries` to every chunk rule and short convolution that has none, checkpoint regions included."""
    count = 0
    for node in _nodes(gm.graph, _RULE, _CONV):
        if _argument(node, "cu_seqlens") is None:
            _pack(node, boundaries)
            count += 1
    for body, calls in _bodies(gm):
        inner = [n for m in body.modules() if isinstance(m, fx.GraphModule) for n in _nodes(m.graph, _RULE, _CONV)]
        if any(_argument(node, "cu_seqlens") is None for node in inner):
            count += _spread(body, _hand_in(body, calls, boundaries))
    return count


def _pack(node: fx.Node, boundaries: fx.Node) -> None:
    """Sets the op's boundaries; a batch of rows becomes one pack, its output gets the batch's shape back."""
    name = _op_name(node)
    like = _argument(node, _SHAPED_LIKE[name])
    _set_argument(node, "cu_seqlens", boundaries)
    if same_size(value_of(like).shape[0], 1):
        return
    if name == _RULE and _argument(node, "initial_state") is not None:
        raise NotImplementedError("packed rows by position_ids with an initial state: pass cu_seq_lens_q instead")
    before = Emitter(node)
    for argument in _TOKEN_ARGUMENTS[name]:
        value = _argument(node, argument)
        if value is not None:
            _set_argument(node, argument, before("unsqueeze", before("flatten", value, 0, 1), 0))
    outputs = [node] if name == _CONV else [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    for output in outputs:
        old = output.meta["example_value"]
        output.meta["example_value"] = old.flatten(0, 1).unsqueeze(0)
        shaped = Emitter(output, after=True)("reshape_as", output, like)
        output.replace_all_uses_with(shaped, delete_user_cb=lambda user, shaped=shaped: user is not shaped)


def _take_marks(gm: fx.GraphModule, ctx: PassContext, pieces: _Pieces) -> None:
    """Position-id boundaries that nothing uses yet go to the layers, or away."""
    for mark in _nodes(gm.graph, _MARK):
        if mark.users:
            continue
        from_a_caller = _from_a_caller(mark)
        if from_a_caller:
            pieces.boundaries, pieces.marked = f"%{mark.name}", True
        if from_a_caller and _spread(gm, mark):
            ctx.records.rewrites.append(Rewrite(PASS_NAME, "document_boundaries", where_of(mark), "position_ids"))
        else:
            gm.graph.erase_node(mark)


def _boundaries_for(node: fx.Node, rules: list[fx.Node], order: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """`(boundaries, chunk rule)` of the layer `node` stands in: the next rule after it, else the last before it."""
    packed = [rule for rule in rules if isinstance(_argument(rule, "cu_seqlens"), fx.Node)]
    later = [rule for rule in packed if order[rule] > order[node]]
    rule = later[0] if later else packed[-1] if packed else None
    return None if rule is None else (_argument(rule, "cu_seqlens"), rule)


def _early_enough(boundaries: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Moves the pure op that makes `boundaries` in front of `node`, which is to read it."""
    if order.get(boundaries, -1) < order[node]:
        return
    if _op_name(boundaries) != _MARK or order[boundaries.args[0]] > order[node]:
        raise NotImplementedError(
            f"%{boundaries.name}, the document boundaries, is computed after %{node.name} needs it"
        )
    node.prepend(boundaries)


def _anchors(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    for node in graph.nodes:
        if _op_name(node) == _PLE:
            yield "ple", node
        elif _is_eos_scan(node):
            yield "ngram", node
        elif _is_causal_depthwise(node):
            yield "conv", node


def _is_eos_scan(node: fx.Node) -> bool:
    """`cummax(where(ids == eos, positions, -1), dim=1)`: the position of the last EOS so far."""
    if getattr(node.target, "__name__", node.target) not in ("cummax", "cummax.default") or not node.args:
        return False
    source = node.args[0]
    if value_of(source) is None or value_of(source).dim() != 2 or value_of(source).dtype != torch.int64:
        return False
    if getattr(source.target, "__name__", "") not in ("where", "where.ScalarOther") or len(source.args) != 3:
        return False
    condition, _, other = source.args
    return other == -1 and value_of(condition) is not None and value_of(condition).dtype == torch.bool


def _is_causal_depthwise(node: fx.Node) -> bool:
    term = read_term(node)
    if term.op != "conv1d":
        return False
    source, weight, _, stride, _, _, groups = term.args
    return groups == value_of(weight).shape[0] == value_of(source).shape[1] and stride in (1, (1,), [1])


def _restart_ngrams(scan: fx.Node, boundaries: fx.Node, rule: fx.Node) -> None:
    """The last token of every document counts as an EOS: a lookup never reaches behind its document's first token."""
    where = scan.args[0]
    condition = where.args[0]
    batch, history = value_of(condition).shape
    rows, length = value_of(_argument(rule, "q")).shape[:2]
    length = length if same_size(rows, batch) else length // batch
    context = int(history - length)
    emit = Emitter(where)
    blank = emit(torch.zeros_like, emit(operator.getitem, condition, (slice(None), slice(context, None))))
    starts = emit(torch.nn.functional.pad, emit("flatten", blank), (0, 1))
    starts = emit("index_fill", starts, 0, emit("long", boundaries), True)
    starts = emit("reshape_as", emit(operator.getitem, starts, slice(None, -1)), blank)
    # A document that starts at token t ends its predecessor at history position context + t - 1.
    ends = emit(torch.nn.functional.pad, starts, (context - 1, 1))
    where.update_arg(0, emit(torch.logical_or, condition, ends))


def _space_documents(conv: fx.Node, boundaries: fx.Node, rule: fx.Node) -> None:
    """Runs an unfused causal convolution on a row with its own history's length of zeros before every document."""
    source, weight, bias, stride, padding, dilation, groups = read_term(conv).args
    reach = dilation[0] if isinstance(dilation, list | tuple) else dilation
    history = (value_of(weight).shape[2] - 1) * reach
    columns, padded = value_of(source).shape[1:]
    batch, tokens = value_of(_argument(rule, "v")).shape[:2]
    tokens = tokens if same_size(batch, value_of(source).shape[0]) else tokens // value_of(source).shape[0]
    if padding not in (0, (0,), [0]) or not same_size(padded, tokens + history):
        raise NotImplementedError(f"packed documents through %{conv.name}: not a left-padded causal convolution")
    emit = Emitter(conv)
    rows = emit("transpose", emit(operator.getitem, source, (..., slice(history, None))), 0, 1)
    x = emit("unsqueeze", emit("flatten", rows, 1), 0)
    ones = emit(torch.ones_like, emit(operator.getitem, x, (0, 0)), dtype=torch.int64)
    position = emit(operator.sub, emit("cumsum", ones, 0), 1)
    bounds = emit("long", boundaries)
    # Boundaries up to a token: at least one, so the first document has its zeros too.
    document = emit(torch.searchsorted, bounds, position, right=True)
    place = emit(operator.add, position, emit(operator.mul, document, history))
    room = emit("repeat_interleave", emit(torch.zeros_like, bounds, dtype=value_of(x).dtype), history)
    room = emit("expand", emit(torch.nn.functional.pad, room, (0, history)), 1, columns, -1)
    spaced = emit(torch.index_copy, emit(torch.cat, (emit(torch.zeros_like, x), room), 2), 2, place, x)
    out = emit(conv.target, spaced, weight, bias, stride, padding, dilation, groups)
    picked = emit("index_select", out, 2, emit(operator.sub, place, history))
    picked = emit("transpose", emit("reshape_as", picked, rows), 0, 1)
    conv.replace_all_uses_with(picked)
    conv.graph.erase_node(conv)


def _note_rules(gm: fx.GraphModule, pieces: _Pieces) -> None:
    for rule in _nodes(gm.graph, _RULE):
        boundaries = _argument(rule, "cu_seqlens")
        if isinstance(boundaries, fx.Node):
            pieces.boundaries = pieces.boundaries or f"%{boundaries.name}"
        else:
            pieces.unpacked_rule = pieces.unpacked_rule or where_of(rule)


def run(gm: fx.GraphModule, ctx: PassContext) -> None:
    trace = TracingContext.try_get()
    pieces = _Pieces() if trace is None else _pieces_of.setdefault(trace, _Pieces())
    _take_marks(gm, ctx, pieces)
    _note_rules(gm, pieces)
    for kind, node in list(_anchors(gm.graph)):
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        found = _boundaries_for(node, _nodes(gm.graph, _RULE), order)
        if kind == "ple" and _argument(node, "cu_seqlens") is not None:
            continue
        where = where_of(node)
        if found is None:
            pieces.unwired = pieces.unwired or where
            continue
        boundaries, rule = found
        if kind == "ple":
            _early_enough(boundaries, node, order)
            _pack(node, boundaries)
        elif kind == "ngram":
            _early_enough(boundaries, node.args[0], order)
            _restart_ngrams(node, boundaries, rule)
        else:
            _early_enough(boundaries, node, order)
            _space_documents(node, boundaries, rule)
        ctx.records.rewrites.append(Rewrite(PASS_NAME, kind, where, f"%{boundaries.name}"))
    pieces.check()


PASS = GraphPass(PASS_NAME, "dynamo", run, required=True)
