"""Decides, for every gated delta rule of the joint graph, where its backward gets the tapes from.

In a checkpoint region the forward runs again before the backward. Two forms, bitwise equal in their gradients:

    replay     fwd(save_mode="none") -> o          the region's rerun makes o only, for those who read it
               bwd(do, ..., empty tapes)           the backward rebuilds the tapes where they are consumed

    hand-off   fwd(save_mode="none") -> o          nothing in the backward reads o, so it is not rerun at all
               tapes = gated_delta_rule_tapes(...) right before their reader
               bwd(do, ..., tapes)

"auto" hands off exactly when the node is its region's last saver: nothing else makes the backward rerun it. If
something does, tapes handed over by that rerun would live through the backward of every later saver and raise the peak
by all of them; forced with "hand_off", that is what happens. Outside checkpoint regions the call's save_mode stands, or
with a `memory_budget` "full" for as many nodes as fit, the largest time saved per byte first. A node that selective
checkpointing keeps (MUST_SAVE) is left alone.

After that, what a region hands to a later one is made storable where it is a view (see `_store_boundaries`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import OpTypes, get_default_op_list, must_recompute
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

from ..ops.gated_delta_rule.tape_decisions import make_decision, replay_flops
from ..ops.gated_delta_rule.tapes import KEPT, Tapes
from ..ops.gated_delta_rule.workspace import Sizes, sizes_of
from .records import GraphPass, PassContext

_NAME = "tape_reuse"
_FIRST_TAPE_OUTPUT = 2  # after o and final_state
_FIRST_TAPE_ARGUMENT = 11  # of the backward op
_INPUTS = slice(2, 11)  # of the backward op: q, k, v, g, beta, initial_state, cu_seqlens, chunk_offsets, workspace


@dataclass(frozen=True)
class _Pair:
    """One forward node and the backward node that reads its tapes."""

    forward: fx.Node
    backward: fx.Node

    @property
    def checkpointed(self) -> bool:
        return must_recompute(self.forward)

    @property
    def request(self) -> str:
        return self.forward.kwargs.get("reuse_recompute_tapes", "auto")

    @property
    def save_mode(self) -> str:
        return self.forward.kwargs.get("save_mode", "light")


def _pairs(graph: fx.Graph) -> Iterator[_Pair]:
    ops = torch.ops.ple_gdn
    for backward in list(graph.find_nodes(op="call_function", target=ops.gated_delta_rule_backward.default)):
        tape = backward.args[_FIRST_TAPE_ARGUMENT]
        source = tape.args[0] if isinstance(tape, fx.Node) and tape.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.target is ops.gated_delta_rule.default:
            yield _Pair(source, backward)


def _region(node: fx.Node) -> Any:
    return node.meta.get("ac_graph_id")


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def _kept(node: fx.Node) -> bool:
    """Whether the partitioner stores the node rather than rerun it (its cleanup_recompute_tags)."""
    if not must_recompute(node):
        return True
    region = _region(node)
    return any(must_recompute(u) and _region(u) is not None and _region(u) > region for u in node.users)


@functools.cache
def _op_types() -> OpTypes:
    return get_default_op_list()


def _store_boundaries(graph: fx.Graph) -> None:
    """Keeps what one region hands to the next where that is a view.

    The partitioner means to store a region's last node that a later region reads, but never stores views: it then
    reruns every region before it instead, one working set a layer. Its base is stored in its place.
    """
    for node in graph.nodes:
        if not (must_recompute(node) and _kept(node) and _op_types().is_view(node)):
            continue
        base = node
        while _op_types().is_view(base) and _region(base) == _region(node):
            base = base.args[0]
        if not must_recompute(base) or _region(base) != _region(node):
            continue
        base.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if base.target is operator.getitem and len(base.args[0].users) == 1:
            # The partitioner asks a getitem's producer; one with other outputs in use is left to it.
            base.args[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _rerun_with(node: fx.Node, forward: fx.Node) -> bool:
    """Whether the partitioner reruns a reader of the region rather than store it: region nodes, and cheap ones outside,
    since everything the region's rerun makes is free to it while storing is not."""
    if _region(node) == _region(forward):
        return True
    return _region(node) is None and (node.target is operator.getitem or _op_types().is_recomputable(node))


def _rerun_reason(pair: _Pair) -> str | None:
    """Why the backward reruns the forward for its output or final state; None if only its tapes are wanted."""
    tapes = set(pair.backward.args[_FIRST_TAPE_ARGUMENT : _FIRST_TAPE_ARGUMENT + len(Tapes._fields)])
    todo, seen = [user for user in pair.forward.users if user not in tapes], set()
    while todo:
        node = todo.pop()
        if node in seen or (_region(node) is not None and _kept(node)):
            continue
        seen.add(node)
        for user in node.users:
            if _is_backward(user):
                return f"{user.name} reads {node.name}, so the region's rerun makes the output anyway"
            if _rerun_with(user, pair.forward):
                todo.append(user)
    return None


def _refresh(node: fx.Node) -> None:
    """Recomputes the fake value of a node whose arguments changed, and of its getitems."""
    fakes = [x.meta["val"] for x in node.all_input_nodes]
    values = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with detect_fake_mode(fakes):
        node.meta["val"] = node.target(*values[0], **values[1])
    # What Inductor would replay the original call with does not fit the new arguments.
    for key in ("eager_input_vals", "tensor_meta"):
        node.meta.pop(key, None)
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["val"] = node.meta["val"][user.args[1]]
            user.meta.pop("tensor_meta", None)


def _backward_meta(pair: _Pair) -> dict[str, Any]:
    keep = ("partitioner_tag", "autograd_backward", "seq_nr", "nn_module_stack", "stack_trace")
    return {key: pair.backward.meta[key] for key in keep if key in pair.backward.meta}


def _set_save_mode(node: fx.Node, mode: str) -> None:
    node.update_kwarg("save_mode", mode)
    _refresh(node)


def _set_tapes(pair: _Pair, tapes: list[fx.Node]) -> None:
    args = list(pair.backward.args)
    args[_FIRST_TAPE_ARGUMENT : _FIRST_TAPE_ARGUMENT + len(Tapes._fields)] = tapes
    pair.backward.args = tuple(args)
    pair.backward.meta.pop("eager_input_vals", None)
    pair.backward.meta.pop("tensor_meta", None)


def _replay(pair: _Pair) -> None:
    upstream = pair.backward.args[0]
    with pair.forward.graph.inserting_before(pair.backward):
        # Made from the upstream gradient, so that the partitioner cannot place it in the forward and save it.
        empty = pair.forward.graph.call_function(torch.ops.aten.new_empty.default, (upstream, [0]))
    empty.meta = _backward_meta(pair)
    _refresh(empty)
    _set_tapes(pair, [empty] * len(Tapes._fields))
    _set_save_mode(pair.forward, "none")


def _hand_off(pair: _Pair) -> None:
    graph = pair.forward.graph
    with graph.inserting_before(pair.backward):
        made = graph.call_function(
            torch.ops.ple_gdn.gated_delta_rule_tapes.default, pair.backward.args[_INPUTS], dict(pair.backward.kwargs)
        )
        made.meta = _backward_meta(pair)
        tapes = [graph.call_function(operator.getitem, (made, i)) for i in range(len(Tapes._fields))]
    for tape in tapes:
        tape.meta = _backward_meta(pair)
    _refresh(made)
    _set_tapes(pair, tapes)
    _set_save_mode(pair.forward, "none")


def _bytes(values: list[torch.Tensor]) -> Any:
    return sum(value.numel() * value.element_size() for value in values)


def _full_shapes(pair: _Pair) -> tuple[Any, Any]:
    """(bytes of h and delta, FLOPs that keeping them saves)."""
    q, v = pair.backward.args[2].meta["val"], pair.backward.args[4].meta["val"]
    cu_seqlens = pair.backward.args[8]
    documents = cu_seqlens.meta["val"].shape[0] - 1 if isinstance(cu_seqlens, fx.Node) else 0
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    chunks = T // 64 + documents if isinstance(cu_seqlens, fx.Node) else B * ((T + 63) // 64)
    return (chunks * HV * K * V + B * T * HV * V) * v.element_size(), replay_flops(q, v)


def _light_bytes(pair: _Pair) -> int:
    q, v, cu_seqlens = (pair.backward.args[i] for i in (2, 4, 8))
    q, v, cu_seqlens = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (q, v, cu_seqlens))
    sizes = Sizes(*map(_hint, sizes_of(q, v, cu_seqlens)))
    return sum(sizes.bytes_of(name) for name in KEPT["light"])


def _hint(value: Any) -> int:
    """The size this trace saw, of a number that may be symbolic."""
    return value.node.hint if isinstance(value, torch.SymInt) else int(value)


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else node.name


def _record(ctx: PassContext, pair: _Pair, verdict: str, reason: str, at_stake: Any) -> None:
    flops = _full_shapes(pair)[1]
    ctx.records.tapes.append(make_decision(_where(pair.forward), verdict, reason, at_stake, flops))


def _decide_region(pair: _Pair, ctx: PassContext) -> None:
    outputs = pair.forward.meta["val"]
    at_stake = _bytes(list(outputs[_FIRST_TAPE_OUTPUT:]))
    reason = _rerun_reason(pair)
    if pair.request == "hand_off" and reason is not None:
        _record(ctx, pair, "hand-off", f"asked for; {reason}, and hands its tapes over", at_stake)
    elif pair.request != "replay" and reason is None:
        _hand_off(pair)
        _record(ctx, pair, "hand-off", "the region's last saver: nothing else reruns it", at_stake)
    else:
        _replay(pair)
        _record(ctx, pair, "replay", "asked for" if pair.request == "replay" else reason, at_stake)


def _decide_saved(pairs: list[_Pair], ctx: PassContext) -> None:
    """Forward nodes outside checkpoint regions: the call's save mode, or "full" while the budget lasts."""
    budget = ctx.options.memory_budget
    if budget is None:
        for pair in pairs:
            _record(ctx, pair, "saved", f"save_mode {pair.save_mode!r}", _bytes(list(pair.forward.meta["val"][2:])))
        return
    left = budget - sum(map(_light_bytes, pairs))
    sizes = {pair: tuple(map(_hint, _full_shapes(pair))) for pair in pairs}
    order = sorted(pairs, key=lambda p: -sizes[p][1] / max(sizes[p][0], 1))  # stable: graph order among equals
    for pair in order:
        extra = sizes[pair][0]
        fits = extra <= left
        left -= extra if fits else 0
        mode = "full" if fits else "light"
        if mode != pair.save_mode:
            _set_save_mode(pair.forward, mode)
        reason = f"h and delta take {extra} bytes, {'within' if fits else 'beyond'} the memory budget"
        _record(ctx, pair, "saved", f"save_mode {mode!r}: {reason}", _bytes(list(pair.forward.meta["val"][2:])))


def _run(gm: fx.GraphModule, ctx: PassContext) -> None:
    pairs = list(_pairs(gm.graph))
    for pair in pairs:
        if pair.checkpointed:
            _decide_region(pair, ctx)
    _decide_saved([pair for pair in pairs if not pair.checkpointed], ctx)
    gm.graph.eliminate_dead_code()
    _store_boundaries(gm.graph)


PASS = GraphPass(name=_NAME, stage="joint", run=_run)
