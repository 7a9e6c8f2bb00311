"""The pass manager: order, nested graphs, roll-back of a pass that raises, and what the cache key covers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ple_gdn.fx_passes
import ple_gdn.lowerings
import ple_gdn.ops
from ple_gdn.fx_passes.graph_text import graph_text
from ple_gdn.fx_passes.manager import ChainedPass, JointPasses, Rewriting, cache_key, run_dynamo_passes, source_digest
from ple_gdn.fx_passes.records import GraphPass, PassContext, Records, Rewrite
from ple_gdn.options import Options


@pytest.fixture
def context():
    return PassContext(Options(), Records())


def dynamo_graph(fn, *args):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*args)
    return graphs[0]


def our_warning(caplog):
    (record,) = [r for r in caplog.records if r.name == "ple_gdn"]
    return record.getMessage()


def swap_silu_for_relu(gm, context):
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.silu:
            node.target = torch.nn.functional.relu
            node.kwargs = {}
            context.records.rewrites.append(Rewrite("swap", "relu", node.name))


def swap_then_raise(gm, context):
    swap_silu_for_relu(gm, context)
    gm.graph.erase_node(next(n for n in gm.graph.nodes if n.op == "output"))
    gm.register_buffer("left_behind", torch.ones(1))
    gm.plain_attribute = 3
    raise RuntimeError("half-way")


def swap_then_break_the_order(gm, context):
    swap_silu_for_relu(gm, context)
    first, second = [n for n in gm.graph.nodes if n.op == "call_function"][:2]
    second.append(first)


@pytest.mark.parametrize("run", [swap_then_raise, swap_then_break_the_order])
def test_a_pass_that_fails_leaves_graph_attributes_and_records_as_they_were(run, context, caplog):
    gm = dynamo_graph(lambda x: torch.nn.functional.silu(x * 2) + 1, torch.ones(3))
    before, attributes = graph_text(gm), set(gm.__dict__)
    sources = [n._dynamo_source for n in gm.graph.find_nodes(op="placeholder")]
    with caplog.at_level(logging.WARNING, logger="ple_gdn"):
        Rewriting(gm, context).run(GraphPass("unlucky", "dynamo", run))
    assert graph_text(gm) == before
    assert set(gm.__dict__) == attributes
    assert "left_behind" not in dict(gm.named_buffers())
    assert [n._dynamo_source for n in gm.graph.find_nodes(op="placeholder")] == sources
    torch.testing.assert_close(gm(torch.ones(3))[0], torch.nn.functional.silu(torch.ones(3) * 2) + 1)
    assert context.records.rewrites == []
    assert [f.pass_name for f in context.records.failures] == ["unlucky"]
    assert "pass unlucky failed" in our_warning(caplog)


def test_a_pass_that_fails_undoes_itself_and_not_the_passes_before_it(context):
    gm = dynamo_graph(lambda x: torch.nn.functional.silu(x * 2) + 1, torch.ones(3))
    passes = [GraphPass("swap", "dynamo", swap_silu_for_relu), GraphPass("unlucky", "dynamo", swap_then_raise)]
    run_dynamo_passes(gm, passes, context)
    assert "relu" in graph_text(gm)
    torch.testing.assert_close(gm(torch.ones(3))[0], torch.relu(torch.ones(3) * 2) + 1)
    assert [r.pass_name for r in context.records.rewrites] == ["swap"]
    assert [f.pass_name for f in context.records.failures] == ["unlucky"]


def test_passes_after_a_failing_one_still_run(context):
    gm = dynamo_graph(lambda x: torch.nn.functional.silu(x), torch.ones(3))
    passes = [GraphPass("unlucky", "dynamo", swap_then_raise), GraphPass("swap", "dynamo", swap_silu_for_relu)]
    run_dynamo_passes(gm, passes, context)
    assert "relu" in graph_text(gm)
    assert len(context.records.rewrites) == 1


def test_dynamo_passes_see_the_body_of_a_checkpoint_once_and_joint_passes_do_not_run(context):
    def fn(x):
        return checkpoint(lambda y: torch.nn.functional.silu(y), x, use_reentrant=False)

    gm = dynamo_graph(fn, torch.ones(3, requires_grad=True))
    seen = []
    count = GraphPass("count", "dynamo", lambda module, context: seen.append(module))
    never = GraphPass("never", "joint", lambda module, context: pytest.fail("joint pass in the dynamo stage"))
    observed = []
    swap = GraphPass("swap", "dynamo", swap_silu_for_relu)
    run_dynamo_passes(gm, [count, never, swap], context, lambda graph_pass, _: observed.append(graph_pass.name))
    assert len(seen) == len(set(map(id, seen))) == 2
    assert observed == ["count", "swap"]
    assert "relu" in graph_text(gm)


def test_one_failure_in_many_subgraphs_is_reported_once(context, caplog):
    def fn(x):
        return checkpoint(torch.sin, checkpoint(torch.cos, x, use_reentrant=False), use_reentrant=False)

    def fail(gm, context):
        raise ValueError("always")

    gm = dynamo_graph(fn, torch.ones(3, requires_grad=True))
    run_dynamo_passes(gm, [GraphPass("unlucky", "dynamo", fail)], context)
    assert len(context.records.failures) == 1
    assert "always" in our_warning(caplog)


def test_chained_passes_run_in_order_on_the_current_graph_and_cache_only_if_each_can(context):
    order = []
    ours = JointPasses([GraphPass("a", "joint", lambda gm, c: order.append("ours"))], context, "key")

    def theirs(graph):
        order.append("theirs")

    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    ChainedPass([ours, theirs])(gm.graph)
    assert order == ["ours", "theirs"]
    assert ChainedPass([ours, theirs]).uuid() is None
    assert ChainedPass([ours, ours]).uuid() == ("key", "key")


def copy_sources(tmp_path: Path) -> list[Path]:
    roots = []
    for package in (ple_gdn, ple_gdn.ops, ple_gdn.lowerings, ple_gdn.fx_passes):
        source = Path(package.__file__).parent
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        roots.append(tmp_path / source.name)
    return roots


def test_editing_adding_or_renaming_any_source_changes_the_digest(tmp_path):
    roots = copy_sources(tmp_path)
    digest = source_digest(roots)
    assert source_digest(roots) == digest
    files = sorted(p for root in roots for p in root.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content + b"#\n")
        assert source_digest(roots) != digest, path
        path.write_bytes(content)
    assert source_digest(roots) == digest
    (roots[1] / "new_kernel.cu").write_text("// one more source")
    assert source_digest(roots) != digest
    (roots[1] / "new_kernel.cu").unlink()
    files[0].rename(files[0].with_name("renamed.py"))
    assert source_digest(roots) != digest


def test_cache_key_differs_for_every_option():
    changed = [
        Options(rounding="fast"),
        Options(workspace_bytes=1 << 20),
        Options(tape_reuse="replay"),
        Options(save_mode="full"),
        Options(memory_budget=1),
        Options(fuse=False),
    ]
    keys = {cache_key("digest", options) for options in (Options(), *changed)} | {cache_key("other", Options())}
    assert len(keys) == len(changed) + 2
    assert cache_key("digest", Options()) == cache_key("digest", Options())
