"""Memory timeline of a backward under both forms of tape reuse: counted on the graph, drawn with matplotlib."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .explain import read_backward
from .ops.gated_delta_rule.tapes import Tapes
from .ops.gated_delta_rule.workspace import Sizes, backward_phase, sizes_of
from .options import parse_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("hand_off", "replay")


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive while each node of a backward graph runs.

    Attributes:
        form: "hand_off" or "replay".
        nodes: names of the nodes in order.
        live_bytes: tensors of the graph that are alive while the node runs, its outputs and its scratch included;
            parameters and inputs of the function, which the caller owns, excluded.
    """

    form: str
    nodes: tuple[str, ...]
    live_bytes: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_node(self) -> str:
        """The first node at which the peak is reached."""
        return self.nodes[self.live_bytes.index(self.peak)]


def plot_memory(
    fn: Callable[..., Any],
    /,
    *args: Any,
    path: str | os.PathLike[str] | None = "tape_memory.png",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, MemoryTimeline]:
    """Live bytes of the backward of `fn(*args, **kwargs)`, tapes handed over against tapes replayed.

    `fn` holds checkpoint regions with gated delta rules. It is traced like `explain` does, once for each form, and
    nothing is generated: the bytes are those of the backward graph with every node's output materialised (fusion only
    removes some), freed after its last reader, plus the scratch of the gated delta rule ops on the tensors' device. The
    gap between the peaks is what handing over costs.

    Args:
        path: of the image to write (its suffix names the format, "png" without one); None draws nothing and needs no
            matplotlib.
        options: of the backend, without "tape_reuse". A call's own `reuse_recompute_tapes` wins over both forms.

    Returns:
        "hand_off" and "replay" -> `MemoryTimeline`.

    Raises:
        ImportError: matplotlib is missing and `path` is not None.
        OSError: `path` cannot be written.
        TypeError, ValueError: a bad option or "tape_reuse" among them, a suffix that is no image format of matplotlib,
            or no gated delta rule in a checkpoint region.

    All but the last is found before anything is traced.
    """
    parse_options(options)
    if options and "tape_reuse" in options:
        raise ValueError("options: expected no 'tape_reuse': plot_memory traces both forms")
    figure = None if path is None else _new_figure()
    image = None if figure is None else _image_format(figure, path)
    timelines = {}
    for form in FORMS:
        forced = {**(options or {}), "tape_reuse": form}
        report, walks = read_backward(fn, args, kwargs, forced, lambda gm: list(_walk(gm.graph)))
        if not any(decision.verdict in ("hand-off", "replay") for decision in report.tapes):
            raise ValueError("fn: expected a gated delta rule in a checkpoint region, found none")
        # The last graph of the forward runs its backward first.
        steps = [step for walk in reversed(walks) for step in walk]
        timelines[form] = MemoryTimeline(form, tuple(n for n, _ in steps), tuple(size for _, size in steps))
    if figure is not None:
        _draw(figure, timelines)
        figure.savefig(path, format=image)
    return timelines


def _new_figure() -> Figure:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plot_memory draws with matplotlib, which is not installed: `pip install matplotlib`, or pass path=None "
            "for the numbers alone"
        ) from error
    return module.Figure(figsize=(9, 4.5), layout="constrained")


def _image_format(figure: Figure, path: str | os.PathLike[str]) -> str:
    """The format that `path` names, `path` being one that can be written."""
    path = Path(path)
    image = path.suffix.removeprefix(".").lower() or "png"
    formats = figure.canvas.get_supported_filetypes()
    if image not in formats:
        raise ValueError(f"path: expected a suffix out of {', '.join(formats)}, got {str(path)!r}")
    exists = path.exists()
    with path.open("ab"):
        pass
    if not exists:
        path.unlink()
    return image


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def _storages(node: fx.Node) -> dict[int, int]:
    """Storage -> bytes of the tensors a node makes or passes on."""
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return {t.untyped_storage()._cdata: _hint(t.untyped_storage().nbytes()) for t in tensors}


def _scratch(node: fx.Node) -> int:
    """Arena of a gated delta rule node, unless its caller passed a workspace."""
    ops = torch.ops.ple_gdn
    first = {
        ops.gated_delta_rule.default: 0,
        ops.gated_delta_rule_tapes.default: 0,
        ops.gated_delta_rule_backward.default: 2,
    }.get(node.target)
    if first is None:
        return 0
    arguments = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
    inputs = arguments[first : first + 9] + [None] * (first + 9 - len(arguments))
    q, v, cu_seqlens, workspace = inputs[0], inputs[2], inputs[6], inputs[8]
    if workspace is not None:
        return 0
    if first:
        phase = backward_phase(Tapes(*arguments[11:17]))
    else:
        phase = "inference" if node.kwargs.get("save_mode") == "none" else "forward"
    sizes = Sizes(*map(_hint, sizes_of(q, v, cu_seqlens)))
    return sizes.arena_bytes(phase, "cuda" if q.device.type == "cuda" else "cpu")


def _walk(graph: fx.Graph) -> Iterator[tuple[str, int]]:
    """(node, bytes alive while it runs). What a placeholder passes in is freed like the rest, as Inductor does."""
    nodes = list(graph.nodes)
    owned = {
        s for node in graph.find_nodes(op="placeholder") if node.name.startswith("primals") for s in _storages(node)
    }
    last: dict[int, fx.Node] = {}
    for node in nodes:
        for reader in (*node.all_input_nodes, node):
            last.update(dict.fromkeys(_storages(reader), node))
    alive: dict[int, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        alive.update({s: size for s, size in _storages(node).items() if s not in owned})
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        alive.update({s: size for s, size in _storages(node).items() if s not in owned})
        yield node.name, sum(alive.values()) + _scratch(node)
        alive = {s: size for s, size in alive.items() if last[s] is not node}


def _draw(figure: Figure, timelines: dict[str, MemoryTimeline]) -> None:
    axes = figure.add_subplot()
    for form, timeline in timelines.items():
        peak = f"{timeline.peak / 2**20:,.1f} MiB at {timeline.peak_node}"
        steps = [size / 2**20 for size in timeline.live_bytes]
        axes.step(range(len(steps)), steps, where="mid", label=f"{form.replace('_', '-')}: peak {peak}")
    axes.set_xlabel("node of the backward graph")
    axes.set_ylabel("live MiB (parameters and inputs excluded)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
