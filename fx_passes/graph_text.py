"""Stable text of a graph: the same bytes in every process, and across refactors that leave the computation alone.

Nodes are named after what they call and numbered in order, symbolic sizes are renumbered, and nothing that depends on
an address, a path, a line number or a hash seed is printed. Placeholders keep their names.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import torch
from torch.utils._dtype_abbrs import dtype_abbrs

# Longer calls are broken, one argument a line.
WIDTH = 110

_SYMBOL = re.compile(r"\b([suz])(\d+)\b")


def graph_text(gm: torch.fx.GraphModule) -> str:
    """`gm` and the graph modules it refers to, each as `graph name(inputs): ...`."""
    blocks: list[str] = []
    _write(gm, "main", blocks, set())
    symbols: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return symbols.setdefault(match.group(0), f"{match.group(1)}{len(symbols)}")

    return _SYMBOL.sub(rename, "\n\n".join(blocks)) + "\n"


def _write(gm: torch.fx.GraphModule, name: str, blocks: list[str], seen: set[int]) -> None:
    if id(gm) in seen:
        return
    seen.add(id(gm))
    names = _number_nodes(gm.graph)
    inputs, lines, nested = [], [], []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(f"    {names[node]}{_annotation(node)},")
        elif node.op == "output":
            lines.append(f"    return {_format(node.args[0], names)}")
        elif node.op == "get_attr":
            target = _attribute(gm, node.target)
            if isinstance(target, torch.fx.GraphModule):
                nested.append((target, names[node]))
            else:
                lines.append(f"    {names[node]}{_annotation(node)} = self.{node.target}")
        else:
            lines.append(_call(node, names))
    blocks.append("\n".join([f"graph {name}(", *inputs, "):", *lines]))
    for module, module_name in nested:
        _write(module, module_name if name == "main" else f"{name}.{module_name}", blocks, seen)


def _number_nodes(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    names = {node: node.name for node in graph.nodes if node.op == "placeholder"}
    taken = set(names.values())
    last: dict[str, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        base = name = _base_name(node)
        while name in taken:
            last[base] = last.get(base, 0) + 1
            name = f"{base}_{last[base]}"
        taken.add(name)
        names[node] = name
    return names


def _base_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        text = target._schema.name.split("::")[-1]
    elif isinstance(target, str):
        # An attribute's or module's own number is the order it was installed in.
        text = re.sub(r"_\d+$", "", target.split(".")[-1])
    else:
        text = getattr(target, "__name__", type(target).__name__)
    return re.sub(r"\W", "_", text)


def _attribute(gm: torch.fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part, None)
    return value


def _annotation(node: torch.fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    text = _type(value)
    return f": {text}" if text else ""


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs.get(value.dtype, value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"Sym({value})"
    if isinstance(value, tuple | list):
        return f"({', '.join(_type(item) or '_' for item in value)})"
    return ""


def _call(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    args = [_format(arg, names) for arg in node.args]
    kwargs = [f"{key}={_format(value, names)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        target, args = f"{args[0]}.{node.target}", args[1:]
    else:
        target = f"self.{node.target}" if node.op == "call_module" else _callable_name(node.target)
    head = f"    {names[node]}{_annotation(node)} = {target}("
    line = f"{head}{', '.join(args + kwargs)})"
    if len(line) <= WIDTH:
        return line
    return "\n".join([head, *(f"        {arg}," for arg in args + kwargs), "    )"])


def _callable_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        return str(target)
    name = getattr(target, "__qualname__", getattr(target, "__name__", type(target).__qualname__))
    # Where torch keeps its functions is its own business; users write torch.sigmoid.
    name = name.removeprefix("_VariableFunctionsClass.")
    module = (getattr(target, "__module__", None) or "").replace("_operator", "operator")
    return f"{module}.{name}" if module else name


def _format(value: Any, names: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names.get(value, "?")
    if isinstance(value, tuple):
        items = [_format(item, names) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, list):
        return f"[{', '.join(_format(item, names) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_format(item, names)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(_format(part, names) for part in parts)})"
    if isinstance(value, enum.Enum):
        return str(value)
    plain = (str, int, float, complex, bool, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
    if isinstance(value, (*plain, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(value)
    return _callable_name(value) if callable(value) else f"<{type(value).__qualname__}>"
