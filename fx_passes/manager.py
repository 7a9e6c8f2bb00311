"""Runs the passes: order, roll-back of one that raises, and the cache key that covers all our sources."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from .records import MADE_BY_PASS, GraphPass, PassContext, PassFailure, Records

log = logging.getLogger("ple_gdn")

# Called after each pass that ran, with the graph as the pass left it; used by `capture_graphs`.
Observer = Callable[[GraphPass, torch.fx.GraphModule], None]

SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")


class GraphSnapshot:
    """A graph module's graph and attributes, to go back to when a pass raises half-way."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        # Shares every node's metadata values, so this costs microseconds a node.
        self.graph = _copy_graph(gm.graph)
        self.attributes = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in gm.__dict__.items()}

    def restore(self, gm: torch.fx.GraphModule) -> None:
        for name in set(gm.__dict__) - set(self.attributes):
            del gm.__dict__[name]
        gm.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in self.attributes.items()})
        gm.graph = _copy_graph(self.graph)


def _copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = copy.deepcopy(graph)
    # AOTAutograd reads where each placeholder came from off this attribute, which node copies drop.
    for old, new in zip(graph.find_nodes(op="placeholder"), copied.find_nodes(op="placeholder"), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


def nested_graph_modules(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """`gm` and the bodies of its higher-order operators (checkpoint regions and so on), outermost first, each once."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield module


class Rewriting:
    """Runs passes, one by one, on one graph module. One that raises, or leaves an ill-formed graph, is undone.

    There is one snapshot, from before the first pass, and the passes that succeeded are run again on it: passes are
    deterministic and failures rare, while a copy before each pass was 2 % of a sampled cold compile.
    """

    def __init__(self, gm: torch.fx.GraphModule, context: PassContext) -> None:
        self.gm = gm
        self.context = context
        self.before = GraphSnapshot(gm)
        self.done: list[GraphPass] = []
        self.well_formed = _lints(gm.graph)

    def run(self, graph_pass: GraphPass) -> None:
        marks = {name: len(entries) for name, entries in vars(self.context.records).items()}
        try:
            self._apply(graph_pass, self.context)
            if self.well_formed:
                self.gm.graph.lint()
        except Exception as error:
            if graph_pass.required:
                raise
            self.before.restore(self.gm)
            for name, mark in marks.items():
                del getattr(self.context.records, name)[mark:]
            repeated = PassContext(self.context.options, Records())
            for earlier in self.done:
                self._apply(earlier, repeated)
            _record_failure(graph_pass.name, error, self.context)
            return
        self.done.append(graph_pass)

    def _apply(self, graph_pass: GraphPass, context: PassContext) -> None:
        # A user's saved-tensor hooks (save_on_cpu, byte counters) must not see the fakes the passes compute with.
        with torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing():
            graph_pass.run(self.gm, context)


def _lints(graph: torch.fx.Graph) -> bool:
    # A graph may come with something lint() refuses and Inductor takes; that is not the next pass's failure.
    try:
        graph.lint()
    except Exception:
        return False
    return True


def _record_failure(name: str, error: Exception, context: PassContext) -> None:
    failure = PassFailure(name, f"{type(error).__name__}: {error}")
    if failure not in context.records.failures:
        context.records.failures.append(failure)
        log.warning("pass %s failed; the graph goes on without it: %s", name, failure.error, exc_info=error)


def run_dynamo_passes(
    gm: torch.fx.GraphModule, passes: Iterable[GraphPass], context: PassContext, observer: Observer | None = None
) -> list[Rewriting]:
    """Runs the "dynamo" stage on `gm` and on every nested graph module, pass by pass; returns one entry a module."""
    modules: dict[torch.fx.GraphModule, Rewriting] = {}
    for graph_pass in passes:
        if graph_pass.stage != "dynamo":
            continue
        for module in list(nested_graph_modules(gm)):
            if module not in modules:
                modules[module] = Rewriting(module, context)
            modules[module].run(graph_pass)
        if observer is not None:
            observer(graph_pass, gm)
    for module in modules:
        module.recompile()
    return list(modules.values())


class JointPasses(CustomGraphPass):
    """The "joint" stage, as Inductor's `joint_custom_post_pass`. `key` is all that its effect depends on."""

    def __init__(
        self, passes: Iterable[GraphPass], context: PassContext, key: str, observer: Observer | None = None
    ) -> None:
        self.passes = tuple(p for p in passes if p.stage == "joint")
        self.context = context
        self.key = key
        self.observer = observer

    def __call__(self, graph: torch.fx.Graph) -> None:
        gm = graph.owning_module
        if gm.meta.get(MADE_BY_PASS):
            return
        rewriting = Rewriting(gm, self.context)
        for graph_pass in self.passes:
            rewriting.run(graph_pass)
            if self.observer is not None:
                self.observer(graph_pass, gm)
        gm.recompile()

    def uuid(self) -> str:
        return self.key


class ChainedPass(CustomGraphPass):
    """Graph passes one after the other; cacheable when each of them is (torch 2.11 takes no list)."""

    def __init__(self, passes: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        gm = graph.owning_module
        for graph_pass in self.passes:
            graph_pass(gm.graph)

    def uuid(self) -> Any | None:
        keys = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return tuple(keys) if all(keys) else None


def source_digest(roots: Iterable[Path]) -> str:
    """SHA-256 over every source file below `roots`, by path relative to its root: any edit gives another digest."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCE_SUFFIXES):
            content = path.read_bytes()
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def cache_key(digest: str, options: Any) -> str:
    """What Inductor's caches must tell apart: our sources, our options, the Triton release (torch adds its own)."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return hashlib.sha256(f"{digest} {options!r} triton {triton}".encode()).hexdigest()
