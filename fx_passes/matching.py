"""Structural matching on terms, and the one way a matched chain is replaced by an op.

A pattern module gives one function `find(chain, node)` per anchor: None where `node` starts nothing that resembles the
pattern, a `Plan` where it does, and a raised `Refuse` (with the reason a user reads in `explain()`) where it resembles
the pattern and is not it. `run_pattern` then checks what all patterns share before it edits the graph:

* nothing outside the chain needs an intermediate (views and casts of the inputs may be shared: they stay alive);
* the chain, views and casts of its inputs included, lies in one grad mode, in one autocast mode and outside
  `torch.func` transforms (a checkpoint body is a graph module of its own, so no chain can straddle its edge);
* nothing is written in place between the chain's first and last node;
* the op itself accepts the arguments (its fake implementation runs on them).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_map_only

from ..ops.validation import FLOATS
from .normalize import Term, is_mutation, read_term, same_shape, value_of
from .records import PassContext, Refusal, Rewrite

# Stream counts whose division and mean are tested to round as eager does, for every 16-bit value.
STREAM_COUNTS = (2, 3, 4, 8)

_IN_TRANSFORM = "the chain is inside a torch.func transform"
# What a new node inherits from the node it replaces.
_KEPT_META = ("nn_module_stack", "source_fn_stack", "stack_trace", "fwd_nn_module_stack", "fwd_source_fn_stack")
_MODE_SWITCHES = frozenset(
    (
        *("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"),
        *("_saved_tensors_hooks_enable", "_saved_tensors_hooks_disable"),
    )
)


class Refuse(Exception):
    """A candidate resembles the pattern and is not it; the message is the reason a user reads."""


@dataclass(frozen=True)
class Reshaped:
    """An input no node holds in the shape the op wants: one view of `node`, made beside the op."""

    node: fx.Node
    method: str
    dim: int


@dataclass(frozen=True)
class Plan:
    """Replace `output` by `op(*args, **kwargs)`; `anchor` says where in the model the chain stands."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: fx.Node
    anchor: fx.Node
    detail: str = ""


@dataclass
class Chain:
    """A graph as terms, with the position and the mode region of every node. Read afresh after each rewrite."""

    graph: fx.Graph
    terms: dict[fx.Node, Term] = field(default_factory=dict)
    position: dict[fx.Node, int] = field(default_factory=dict)
    region: dict[fx.Node, int] = field(default_factory=dict)
    transformed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        for table in (self.terms, self.position, self.region, self.transformed):
            table.clear()
        region = depth = 0
        for index, node in enumerate(self.graph.nodes):
            self.position[node] = index
            name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            region += name in _MODE_SWITCHES
            depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
            self.region[node] = region
            if depth:
                self.transformed.add(node)

    def term(self, node: Any) -> Term:
        if not isinstance(node, fx.Node):
            return Term("constant", (node,))
        if node not in self.terms:
            self.terms[node] = read_term(node)
        return self.terms[node]

    def skip(self, node: Any, *, casts: bool = False) -> Any:
        """Walks back over views and over casts that change no dtype; with `casts`, over any between floats."""
        while True:
            term = self.term(node)
            if term.op not in ("view", "cast"):
                return node
            if term.op == "cast" and dtype_of(term.args[0]) != dtype_of(node):
                between_floats = casts and is_float(node) and is_float(term.args[0])
                if not between_floats:
                    return node
            node = term.args[0]

    def without_casts(self, node: fx.Node) -> fx.Node:
        """The node that `node` is a mere no-op cast of."""
        while (term := self.term(node)).op == "cast" and dtype_of(term.args[0]) == dtype_of(node):
            node = term.args[0]
        return node

    def operand(self, node: Any, op: str, *, casts: bool = False) -> Any:
        """The operand of `node` if it is (behind views) an `op`, else None."""
        term = self.term(self.skip(node, casts=casts))
        return term.args[0] if term.op == op else None

    def factor(self, node: Any, op: str, *, casts: bool = False) -> tuple[Any, Any] | None:
        """`(x, other)` if `node`, commutative, combines op(x) with `other`, else None."""
        for one, other in self.pairs(node):
            if (operand := self.operand(one, op, casts=casts)) is not None:
                return operand, other
        return None

    def pairs(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Both orders of a commutative term's operands."""
        a, b = self.term(node).args[:2]
        yield a, b
        yield b, a

    def scalar_and_node(self, node: Any) -> tuple[float, fx.Node] | None:
        """For a commutative term of one number and one tensor, in either order."""
        for number, other in self.pairs(node):
            if (fixed := fixed_number(number)) is not None and isinstance(other, fx.Node):
                return float(fixed), other
        return None

    def with_rows(self, node: fx.Node, rows: Iterable[Any], method: str, dim: int) -> fx.Node | Reshaped:
        """The nearest node behind `node`'s views of shape [*rows, any], else one view of `node` that has it.

        A view keeps the number of elements, so the last dimension follows from the rows, symbolic sizes included.
        """
        rows, current = tuple(rows), node
        while not has_rows(current, rows):
            term = self.term(current)
            if term.op != "view" and not (term.op == "cast" and dtype_of(term.args[0]) == dtype_of(current)):
                break
            current = term.args[0]
        else:
            return self.without_casts(current)
        if not same_shape(value_of(node).shape[:-2], rows):
            raise Refuse(f"{value_name(node)} {list(value_of(node).shape)} does not have the rows {list(rows)}")
        return Reshaped(node, method, dim)


def has_rows(node: fx.Node, rows: tuple) -> bool:
    """Whether `node` has shape [*rows, any]."""
    shape = value_of(node).shape
    return len(shape) > 0 and same_shape(shape[:-1], rows)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fixed_number(value: Any) -> int | float | None:
    """A number of the graph as such, or None for anything else.

    Dynamo makes a float that changed between two compiles of one code object (the eps of another model of the same
    class) an input. Reading it here guards on its value, so that a third one compiles anew.
    """
    if is_number(value):
        return value
    symbolic = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    if isinstance(symbolic, torch.SymFloat) and symbolic.node.hint is not None:
        return float(symbolic)
    return None


def dtype_of(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def is_float(node: Any) -> bool:
    return dtype_of(node) in FLOATS


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_streams(count: Any) -> int:
    """The stream count as an int, or Refuse."""
    if not isinstance(count, int):
        raise Refuse(f"the stream count {count} is not a constant")
    if count not in STREAM_COUNTS:
        raise Refuse(f"{count} streams: supported are {', '.join(map(str, STREAM_COUNTS))}")
    return count


def check_floats(*nodes: Any) -> None:
    """Refuses tensor subclasses and dtypes that no op of ours takes."""
    for node in nodes:
        value = value_of(node.node if isinstance(node, Reshaped) else node)
        if not isinstance(value, FakeTensor):
            raise Refuse(f"{value_name(node)} is a {type(value).__name__}, expected a plain tensor")
        if value.dtype not in FLOATS:
            raise Refuse(f"{value_name(node)} is {short(value.dtype)}; the op takes float32, bfloat16 and float16")


def value_name(node: Any) -> str:
    node = node.node if isinstance(node, Reshaped) else node
    return f"%{node.name}" if isinstance(node, fx.Node) else repr(node)


def reduced_dims(term: Term, rank: int) -> tuple[int, ...] | None:
    """The reduced dims counted from the left, or None for a reduction over everything."""
    dims = term.args[1]
    if dims is None:
        return None
    return tuple(dim % rank for dim in (dims if isinstance(dims, list | tuple) else (dims,)))


def where_of(node: fx.Node) -> str:
    """Module path of the innermost module that made `node`, else its source line, else its name."""
    stack = node.meta.get("nn_module_stack") or {}
    if stack:
        path = list(stack.values())[-1][0]
        path = re.sub(r"^[LG]\['([^']*)'\]\.?", lambda m: "" if m[1] == "self" else f"{m[1]}.", path).strip(".")
        path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", lambda m: f".{m[1] or m[2] or m[3]}", path)
        if path.strip("."):
            return path.strip(".")
    lines = re.findall(r'File "([^"]*)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]}" if lines else f"%{node.name}"


def _nodes_of(plan: Plan) -> list[fx.Node]:
    values = [*plan.args, *plan.kwargs.values()]
    return [value.node if isinstance(value, Reshaped) else value for value in values if _is_input(value)]


def _is_input(value: Any) -> bool:
    return isinstance(value, fx.Node | Reshaped)


def _chain_between(chain: Chain, output: fx.Node, inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes whose values `output` needs besides `inputs`, in graph order; one asked for a dtype or size is not."""
    known, seen, stack = set(inputs), set(), [output]
    while stack:
        node = stack.pop()
        if node in known or node in seen or node.op in ("placeholder", "get_attr") or value_of(node) is None:
            continue
        seen.add(node)
        stack.extend([chain.term(node).args[0]] if chain.term(node).op in ("view", "cast") else node.all_input_nodes)
    return sorted(seen, key=chain.position.__getitem__)


def _check_chain(chain: Chain, plan: Plan) -> list[fx.Node]:
    interior = _chain_between(chain, plan.output, _nodes_of(plan))
    members = set(interior)
    free: set[fx.Node] = set()  # views and casts of the inputs alone: whoever else needs them keeps them
    for node in interior:
        term = chain.term(node)
        if term.op in ("view", "cast") and (term.args[0] not in members or term.args[0] in free):
            free.add(node)
    for node in members - free - {plan.output}:
        outside = [user for user in node.users if user not in members and not _reads_size(user)]
        if outside:
            users = len(node.users)
            raise Refuse(f"intermediate %{node.name} ({chain.term(node).op}) is used by {users} nodes, not all matched")
    if len({chain.region[node] for node in interior}) > 1:
        raise Refuse("the chain straddles a change of grad or autocast mode")
    if not members.isdisjoint(chain.transformed):
        raise Refuse(_IN_TRANSFORM)
    # The op reads its inputs where the chain's last node stood: nothing may be written since the first.
    first, last = chain.position[interior[0]], chain.position[plan.output]
    for node in chain.graph.nodes:
        if first < chain.position[node] < last and is_mutation(node):
            raise Refuse(f"%{node.name} writes in place between the chain's first and last node")
    return interior


def _reads_size(user: fx.Node) -> bool:
    """Whether `user` takes only a size of its operand, which the operand keeps giving at no cost."""
    return isinstance(user.meta.get("example_value"), int | torch.SymInt | torch.Size)


def _insert(graph: fx.Graph, plan: Plan) -> fx.Node:
    """Puts the op before the output, checked by running its fake implementation on the recorded fakes."""
    made: list[fx.Node] = []
    output_value = value_of(plan.output)

    def emit(op: str, target: Any, args: tuple, kwargs: dict, run: Callable) -> fx.Node:
        with output_value.fake_mode:
            value = run(*tree_map_only(fx.Node, lambda node: node.meta["example_value"], args), **kwargs)
        node = graph.create_node(op, target, args, kwargs)
        node.meta = {key: plan.output.meta[key] for key in _KEPT_META if key in plan.output.meta}
        node.meta["example_value"] = value
        made.append(node)
        return node

    def materialise(value: Any) -> Any:
        if not isinstance(value, Reshaped):
            return value
        run = getattr(torch.Tensor, value.method)
        return emit("call_method", value.method, (value.node, value.dim), {}, run)

    try:
        with graph.inserting_before(plan.output):
            args = tuple(materialise(value) for value in plan.args)
            result = emit("call_function", plan.op, args, dict(plan.kwargs), plan.op)
            if isinstance(result.meta["example_value"], tuple | list):
                result = emit("call_function", operator.getitem, (result, 0), {}, operator.getitem)
            value = result.meta["example_value"]
            if value.dtype != output_value.dtype or not same_shape(value.shape, output_value.shape):
                got = f"{short(value.dtype)}{list(value.shape)}"
                raise Refuse(f"the op gives {got}, the chain {short(output_value.dtype)}{list(output_value.shape)}")
    except (Refuse, ValueError, TypeError, GuardOnDataDependentSymNode) as error:
        for node in reversed(made):
            graph.erase_node(node)
        raise error if isinstance(error, Refuse) else Refuse(f"the op refuses: {error}") from error
    return result


def apply_plan(chain: Chain, plan: Plan) -> None:
    """Checks and makes the rewrite, or raises Refuse with the graph untouched."""
    interior = _check_chain(chain, plan)
    result = _insert(chain.graph, plan)
    plan.output.replace_all_uses_with(result)
    for node in reversed(interior):
        if not node.users:
            chain.graph.erase_node(node)
    chain.refresh()


def run_pattern(
    gm: fx.GraphModule, ctx: PassContext, pass_name: str, find: Callable[[Chain, fx.Node], Plan | None]
) -> None:
    """Offers every node of the graph to `find`, replaces what matches, and records each rewrite and refusal."""
    if not ctx.options.fuse:
        return
    chain, changed = Chain(gm.graph), False
    for node in list(gm.graph.nodes):
        if node not in chain.position:  # erased with an earlier match
            continue
        anchor = node
        try:
            plan = find(chain, node)
            if plan is None:
                continue
            anchor = plan.anchor
            apply_plan(chain, plan)
        except Refuse as refusal:
            reason = _IN_TRANSFORM if anchor in chain.transformed else str(refusal)
            ctx.records.refusals.append(Refusal(pass_name, where_of(anchor), reason))
            continue
        changed = True
        name = plan.op._schema.name.removeprefix("ple_gdn::")
        ctx.records.rewrites.append(Rewrite(pass_name, name, where_of(anchor), plan.detail))
    if changed:
        gm.recompile()
