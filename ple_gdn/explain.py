"""`explain` and `capture_graphs`: one traced call, forward and backward, without code generation.

The function runs once, its graphs interpreted op by op (Python between graph breaks needs real values); what it would
change is put back. The backward is traced at compile time and never run, so no gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from .options import parse_options
from .report import Report, make_report, merge_reports
from .untouched import Guarded, untouched

if TYPE_CHECKING:
    from .fx_passes.records import GraphPass

_T = TypeVar("_T")


@dataclass
class CapturedGraphs:
    """Stable text of every stage, one entry for each graph Dynamo made.

    dynamo: as traced. pre_grad: after the passes that run before autograd. joint: forward and backward in one, after
    the joint-graph passes. forward, backward: after partitioning, as handed to code generation. `joint` and `backward`
    have entries for graphs that need a gradient only. passes: for each pass, in order, the graphs after it.
    """

    dynamo: list[str] = field(default_factory=list)
    pre_grad: list[str] = field(default_factory=list)
    joint: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    passes: dict[str, list[str]] = field(default_factory=dict)


def explain(fn: Callable[..., Any], /, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """What the backend does to `fn(*args, **kwargs)`: rewrites, refusals with reasons, tape decisions, failures.

    `fn` is a module or a function; it runs once in eager arithmetic. Parameters, gradients, buffers, tensor arguments
    and random state are as before afterwards. On the meta device it costs no memory; Inductor's folding of constants,
    which would drop such a graph whole, is then left out. Raises ValueError or TypeError for a bad option, and what
    `fn` raises. A function with a keyword of its own named `options` needs a `functools.partial` around it.
    """
    return _trace(fn, args, kwargs, options).report()


def capture_graphs(
    fn: Callable[..., Any], /, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> CapturedGraphs:
    """Text of the graphs of `fn(*args, **kwargs)` at every stage and after every pass, to pin with `expecttest`.

    The same bytes in every process. Runs `fn` once and leaves state alone as `explain` does; raises what it raises.
    """
    return _trace(fn, args, kwargs, options).graphs


def read_backward(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: dict[str, Any] | None,
    read: Callable[[torch.fx.GraphModule], _T],
) -> tuple[Report, list[_T]]:
    """The report of one traced call, and what `read` says of each backward graph, in the order their forwards run."""
    values: list[_T] = []
    report = _trace(fn, args, kwargs, options, lambda gm: values.append(read(gm))).report()
    return report, values


class _Tracer:
    """A backend that traces everything, generates nothing, and notes each graph at each stage."""

    def __init__(
        self, options: dict[str, Any] | None, guarded: Guarded, see_backward: Callable[[torch.fx.GraphModule], None]
    ) -> None:
        self.options = options
        self.see_backward = see_backward
        self.guarded = guarded
        self.graphs = CapturedGraphs()
        self.reports: list[Report] = []

    def report(self) -> Report:
        return merge_reports(self.reports)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._functorch import config as functorch_config

        from .backend import open_compilation
        from .fx_passes.graph_text import graph_text

        on_meta = _makes_meta_tensors(gm)
        stages = _Stages(graph_text(gm), self.see_backward, on_meta)
        compilation = open_compilation(None, self.options)
        compilation.inductor_options["force_disable_caches"] = True
        if on_meta:
            # Inductor's no-op removal replaces each meta output by an empty tensor, and nothing of the graph is left.
            compilation.inductor_options["joint_graph_constant_folding"] = False
        compilation.inner_compile = stages.inner_compile
        compilation.observer = stages.after_pass
        compilation.last_joint_passes = (stages.after_joint,)
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            run = compilation.run(gm, example_inputs)
        self.reports.append(make_report(gm, compilation.records))
        stages.file(self.graphs)
        return self._protecting(run, _written_inputs())

    def _protecting(self, run: Callable[..., Any], written: list[int]) -> Callable[..., Any]:
        def protected(*args: Any) -> Any:
            self.guarded.protect([args[i] for i in written if isinstance(args[i], torch.Tensor)])
            return run(*args)

        return protected


class _Stages:
    """Texts of one graph on its way through the backend."""

    def __init__(self, dynamo: str, see_backward: Callable[[torch.fx.GraphModule], None], on_meta: bool) -> None:
        self.dynamo = dynamo
        self.on_meta = on_meta
        self.see_backward = see_backward
        self.pre_grad = dynamo
        self.passes: dict[str, str] = {}
        self.joint: str | None = None
        self.forward: str | None = None
        self.backward: str | None = None
        self.is_inference = False

    def after_pass(self, graph_pass: GraphPass, gm: torch.fx.GraphModule) -> None:
        from .fx_passes.graph_text import graph_text

        # Subgraphs of a joint graph come first, the graph that holds them last: the last text stands.
        self.passes[graph_pass.name] = graph_text(gm)
        if graph_pass.stage == "dynamo":
            self.pre_grad = self.passes[graph_pass.name]

    def after_joint(self, graph: torch.fx.Graph) -> None:
        from .fx_passes.graph_text import graph_text
        from .fx_passes.records import MADE_BY_PASS

        if not graph.owning_module.meta.get(MADE_BY_PASS):
            self.joint = graph_text(graph.owning_module)

    def inner_compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Stands in for Inductor's code generation: notes the graph and returns its interpreter."""
        from functorch.compile import make_boxed_func

        from .fx_passes.graph_text import graph_text

        if kwargs.get("is_backward", False):
            self.backward = graph_text(gm)
            self.see_backward(gm)
        else:
            self.is_inference = kwargs.get("is_inference", False)
            self.forward = graph_text(gm)
            if self.on_meta:
                _draw_on_meta(gm)
        return make_boxed_func(gm.forward)

    def file(self, graphs: CapturedGraphs) -> None:
        graphs.dynamo.append(self.dynamo)
        graphs.pre_grad.append(self.pre_grad)
        if self.forward is not None:
            graphs.forward.append(self.forward)
        if not self.is_inference and self.joint is not None:
            graphs.joint.append(self.joint)
        if self.backward is not None:
            graphs.backward.append(self.backward)
        for name, text in self.passes.items():
            graphs.passes.setdefault(name, []).append(text)


def _makes_meta_tensors(gm: torch.fx.GraphModule) -> bool:
    values = pytree.tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def _draw_without_state(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return torch.empty(0, dtype=torch.uint8), op(*args, **kwargs)


def _draw_on_meta(gm: torch.fx.GraphModule) -> None:
    """Random ops of checkpoint regions keep their generator's state for the rerun; the meta device has no generator."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.run_and_save_rng_state):
        node.target = _draw_without_state
    gm.recompile()


def _written_inputs() -> list[int]:
    """Positions of the inputs that the graph just compiled writes to."""
    metadata = torch._guards.TracingContext.get().fw_metadata
    return [i for i, info in enumerate(metadata.input_info) if info.mutates_data] if metadata is not None else []


def _trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: dict[str, Any] | None,
    see_backward: Callable[[torch.fx.GraphModule], None] = lambda gm: None,
) -> _Tracer:
    parse_options(options)  # here, since a function without a graph never reaches the backend
    if not callable(fn):
        raise TypeError(f"fn: expected a module or a function, got {type(fn).__name__}")
    from . import backend  # noqa: F401  (entered before Dynamo traces, as torch.compile does: it installs substitutions)
    from .dynamo_cache import forgotten, uncompiled
    from .ops.torch_versions import compile_arguments_of_a_trace

    with uncompiled(fn) as plain, untouched(plain, args, kwargs) as guarded:
        tracer = _Tracer(options, guarded, see_backward)
        # As the first compile of a process sees it: Dynamo remembers the sizes and numbers of earlier traces of the
        # same code, and would make those that differ symbolic, so that the text would depend on what ran before.
        with forgotten(tracer), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            torch.compile(plain, backend=tracer, **compile_arguments_of_a_trace())(*args, **kwargs)
    return tracer
