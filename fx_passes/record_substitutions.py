"""Notes each op that a substituted function put into the graph; the graph stays as it is.

`ple_gdn.substitutions` replaces transformers' and FLA's functions before Dynamo traces them, so no pass ever sees the
chain that was there. The stack trace of the op's node still says which function it stands for.
"""

from __future__ import annotations

import re

import torch

from .matching import where_of
from .records import GraphPass, PassContext, Rewrite

NAME = "substitute"
OPS = ("gated_delta_rule", "causal_conv1d")

_REPLACEMENT = re.compile(r"ple_gdn[/\\]substitutions\.py\", line \d+, in (\w+)")


def _op_name(target: object) -> str | None:
    for name in OPS:
        packet = getattr(torch.ops.ple_gdn, name)
        if target is packet or target is packet.default:
            return name
    return None


def _run(gm: torch.fx.GraphModule, context: PassContext) -> None:
    for node in gm.graph.nodes:
        name = _op_name(node.target)
        function = _REPLACEMENT.search(node.stack_trace or "") if name is not None else None
        if function is not None:
            context.records.rewrites.append(Rewrite(NAME, name, where_of(node), function.group(1)))


PASS = GraphPass(name=NAME, stage="dynamo", run=_run)
