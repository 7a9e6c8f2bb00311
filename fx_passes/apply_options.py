"""Writes the backend's options into the op nodes that left them open.

before: torch.ops.ple_gdn.ple_gate_conv(h, k, v, ..., dilation=3)
after:  torch.ops.ple_gdn.ple_gate_conv(h, k, v, ..., dilation=3, workspace_bytes=67108864)

A call's own argument wins unless it is the schema's default; from here on the options stand in the graph's text.
"""

from __future__ import annotations

from typing import Any

import torch

from .records import GraphPass, PassContext


def _open_arguments(options: Any) -> dict[str, dict[str, Any]]:
    """Raw op name -> argument -> value of the option that fills it."""
    return {
        "ple_gdn::gated_delta_rule": {
            "save_mode": options.save_mode,
            "reuse_recompute_tapes": options.tape_reuse,
        },
        "ple_gdn::ple_gate_conv": {"workspace_bytes": options.workspace_bytes},
    }


def _schema_of(target: Any) -> torch.FunctionSchema | None:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _run(gm: torch.fx.GraphModule, context: PassContext) -> None:
    fills = _open_arguments(context.options)
    for node in gm.graph.nodes:
        schema = _schema_of(node.target) if node.op == "call_function" else None
        if schema is None or schema.name not in fills:
            continue
        for argument in schema.arguments:
            value = fills[schema.name].get(argument.name)
            given = node.kwargs.get(argument.name, argument.default_value)
            # Both arguments are keyword-only in the schema, so they are never in node.args.
            if value is not None and given == argument.default_value and value != argument.default_value:
                node.update_kwarg(argument.name, value)


PASS = GraphPass(name="apply_options", stage="dynamo", run=_run)
