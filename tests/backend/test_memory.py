"""`plot_memory`: the numbers against hand counts and against an eager run, and the image."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from oracles.op_log import OpLog
from oracles.regions import Stack, SwigluRegion, tokens
from torch import fx
from torch._subclasses import FakeTensorMode

import ple_gdn
from ple_gdn import memory

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, VALUE_HEADS, WIDTH = 320, 1, 3, 32


def region_and_inputs(save_mode: str = "light", **options) -> tuple[SwigluRegion, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, TOKENS, *shape, generator=generator)

    q, k, v = normal(HEADS, WIDTH), normal(HEADS, WIDTH), normal(VALUE_HEADS, WIDTH)
    gates = -normal(VALUE_HEADS).abs(), normal(VALUE_HEADS).sigmoid()
    # Wide enough that the peak lies in the SwiGLU's backward, where tapes that were handed over wait.
    model = SwigluRegion(HEADS, VALUE_HEADS, WIDTH, inner=512, save_mode=save_mode, **options)
    return model, [x.requires_grad_() for x in (q, k, v, *gates)]


def tape_bytes(save_mode: str) -> int:
    light = 4 * TOKENS * (VALUE_HEADS + 2 * HEADS + 64 * VALUE_HEADS)
    states = 4 * (TOKENS // 64) * VALUE_HEADS * WIDTH * WIDTH + 4 * TOKENS * VALUE_HEADS * WIDTH
    starts = 4 * (TOKENS // 2048 + 1) * VALUE_HEADS * WIDTH * WIDTH
    return light + (states if save_mode == "full" else starts)


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_handing_over_raises_the_peak_of_a_swiglu_region_by_exactly_the_tapes(save_mode: str) -> None:
    model, inputs = region_and_inputs(save_mode)
    timelines = ple_gdn.plot_memory(model, *inputs, path=None)
    assert timelines["hand_off"].peak - timelines["replay"].peak == tape_bytes(save_mode)
    assert timelines["hand_off"].peak_node == timelines["replay"].peak_node


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_an_eager_run_has_the_same_gap(save_mode: str) -> None:
    peaks = {}
    for reuse in (True, False, "auto"):
        model, inputs = region_and_inputs(save_mode, reuse_recompute_tapes=reuse)
        with OpLog() as log:
            model(*inputs).backward(torch.ones(1, TOKENS, VALUE_HEADS * WIDTH))
        peaks[reuse] = log.peak_bytes
    assert peaks[True] - peaks[False] == tape_bytes(save_mode)
    assert peaks["auto"] == peaks[False]


def test_the_timeline_is_an_image_and_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    timelines = ple_gdn.plot_memory(Stack(closing=False), tokens(), path=path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000
    assert tuple(timelines) == memory.FORMS
    for form, timeline in timelines.items():
        assert timeline.form == form
        assert len(timeline.nodes) == len(timeline.live_bytes) > 3
        assert "gated_delta_rule_backward" in timeline.nodes
        assert timeline.peak == max(timeline.live_bytes) > 0


def test_a_backward_that_ends_holds_its_gradients_and_nothing_else() -> None:
    model, inputs = region_and_inputs()
    gradients = sum(x.nbytes for x in (*inputs, *model.parameters()))
    for timeline in ple_gdn.plot_memory(model, *inputs, path=None).values():
        # The last node makes the last gradients, while its own operands are still alive.
        assert timeline.live_bytes[-1] >= gradients
        assert timeline.live_bytes[0] < gradients


def test_a_hand_made_graph_is_counted_by_storage_and_last_reader() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        a, b, c = torch.empty(100), torch.empty(50), torch.empty(10)
        nodes = [graph.placeholder("primals_1"), graph.placeholder("tangents_1")]
        nodes.append(graph.call_function(torch.ops.aten.view.default, (nodes[1], [2, 50])))
        nodes.append(graph.call_function(torch.ops.aten.add.Tensor, (nodes[2], nodes[0])))
        nodes.append(graph.call_function(torch.ops.aten.neg.default, (nodes[3],)))
        graph.output((nodes[4],))
        for node, value in zip(nodes, (a, b, b.view(2, 25), c, torch.empty(20)), strict=True):
            node.meta["val"] = value
        # The parameter is its owner's; the tangent dies with its view's reader; the result lives on.
        assert [size for _, size in memory._walk(graph)] == [4 * 50, 4 * 60, 4 * 30]


def test_without_matplotlib_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="plot_memory draws with matplotlib, which is not installed: `pip install"):
        ple_gdn.plot_memory(Stack(closing=True), tokens(), path=tmp_path / "memory.png")
    assert not list(tmp_path.iterdir())


def test_what_has_no_region_or_asks_for_one_form_is_refused() -> None:
    with pytest.raises(ValueError, match="fn: expected a gated delta rule in a checkpoint region"):
        ple_gdn.plot_memory(Stack(closing=True, checkpointed=False), tokens(), path=None)
    with pytest.raises(ValueError, match="options: expected no 'tape_reuse'"):
        ple_gdn.plot_memory(Stack(closing=True), tokens(), path=None, options={"tape_reuse": "auto"})


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("nowhere/memory.png", FileNotFoundError, "nowhere"),
        (".", IsADirectoryError, "directory"),
        ("memory.docx", ValueError, r"path: expected a suffix out of .*png.*, got '.*memory.docx'"),
    ],
    ids=["no such folder", "a folder", "no image format"],
)
def test_a_path_that_cannot_be_written_fails_before_anything_is_traced(
    name: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def must_not_run() -> None:
        raise AssertionError

    with pytest.raises(error, match=says):
        ple_gdn.plot_memory(must_not_run, path=tmp_path / name)
    with pytest.raises(TypeError, match=r"not '?int"):
        ple_gdn.plot_memory(must_not_run, path=1)
    assert not list(tmp_path.iterdir())


def test_an_image_that_was_there_survives_a_call_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="fn: expected a gated delta rule"):
        ple_gdn.plot_memory(torch.sin, torch.ones(2), path=path)
    assert path.read_bytes() == b"mine"


def test_meta_tensors_give_the_bytes_of_real_ones() -> None:
    model, inputs = region_and_inputs()
    real = ple_gdn.plot_memory(model, *inputs, path=None)
    meta = ple_gdn.plot_memory(model.to("meta"), *(x.to("meta") for x in inputs), path=None)
    assert {form: timeline.peak for form, timeline in meta.items()} == {f: t.peak for f, t in real.items()}
