"""Runs a function through Dynamo and the fusing passes, the rewritten graph executed op by op (no code generation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import ple_gdn.backend  # noqa: F401  (registers the passes' ops)
from ple_gdn import fx_passes
from ple_gdn.fx_passes.manager import nested_graph_modules, run_dynamo_passes
from ple_gdn.fx_passes.records import GraphPass, PassContext, Records
from ple_gdn.options import Options


@dataclass
class Fusing:
    """A backend: `Fusing().compile(fn)`, then look at `ops()`, `reasons()` and `graphs`."""

    passes: Sequence[GraphPass] = fx_passes.FUSIONS
    options: Options = field(default_factory=Options)
    records: Records = field(default_factory=Records)
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run_dynamo_passes(gm, self.passes, PassContext(self.options, self.records))
        assert self.records.failures == []
        self.graphs.append(gm)
        return gm.forward

    def compile(self, fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(fn, backend=self, fullgraph=True, **kwargs)

    def ops(self) -> list[str]:
        """Names of the ops put in, in the order of the passes."""
        return [rewrite.op for rewrite in self.records.rewrites]

    def reasons(self) -> list[str]:
        return [refusal.reason for refusal in self.records.refusals]

    def nodes(self, name: str) -> list[torch.fx.Node]:
        """The nodes of `torch.ops.ple_gdn.<name>` in every graph."""
        target = getattr(torch.ops.ple_gdn, name).default
        modules = [module for gm in self.graphs for module in nested_graph_modules(gm)]
        return [node for module in modules for node in module.graph.nodes if node.target is target]


def traced(fn: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """Dynamo's graph of `fn(*args)`, not rewritten."""
    fusing = Fusing(passes=())
    fusing.compile(fn)(*args)
    return fusing.graphs[0]


def run_with_grads(fn: Callable[..., Any], args: Sequence[Any], seed: int = 0) -> list[torch.Tensor]:
    """The outputs of `fn` and the gradients of its floating-point arguments under fixed random upstream gradients."""
    for arg in args:
        if torch.is_tensor(arg) and arg.is_floating_point():
            arg.requires_grad_()
    outputs = fn(*args)
    outputs = [outputs] if torch.is_tensor(outputs) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    wanted = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return [*(o.detach() for o in outputs), *(g for g in grads if g is not None)]
