"""A backend that stops before code generation: our Dynamo passes, then the graph runs as it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import ple_gdn.backend  # noqa: F401  (installs the substitutions)
from ple_gdn import fx_passes
from ple_gdn.fx_passes.manager import nested_graph_modules, run_dynamo_passes
from ple_gdn.fx_passes.records import PassContext, Records
from ple_gdn.options import Options


@dataclass
class Capture:
    """`torch.compile(..., backend=Capture())`: counts and keeps the graphs, seconds where Inductor takes minutes."""

    options: Options = field(default_factory=Options)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    records: Records = field(default_factory=Records)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        passes = [p for p in fx_passes.PASSES if self.options.fuse or p not in fx_passes.FUSIONS]
        run_dynamo_passes(gm, passes, PassContext(self.options, self.records))
        self.graphs.append(gm)
        return gm

    def count(self, op: str) -> int:
        """Nodes of `torch.ops.ple_gdn.<op>`, checkpoint regions included, over all graphs."""
        return self.ops()[op]

    def ops(self) -> Counter[str]:
        nodes = (n for graph in self.graphs for gm in nested_graph_modules(graph) for n in gm.graph.nodes)
        return Counter(str(n.target).split(".")[1] for n in nodes if str(n.target).startswith("ple_gdn."))


def fresh() -> None:
    """Forgets every compiled frame."""
    torch._dynamo.reset()
