"""The backend end to end: what Inductor compiles, it compiles, whatever its own passes do."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import ple_gdn
import ple_gdn.fx_passes
from ple_gdn.fx_passes.records import GraphPass, Rewrite


@pytest.fixture(autouse=True)
def fresh_compiles():
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def use_passes(monkeypatch, *passes):
    monkeypatch.setattr(ple_gdn.fx_passes, "PASSES", passes)
    monkeypatch.setattr(ple_gdn.fx_passes, "FUSIONS", ())


def value_and_gradient(fn, x):
    x = x.clone().requires_grad_()
    y = fn(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": {"rounding": "fast", "max_autotune": False}},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead", "dynamic": True},
    ],
    ids=str,
)
def test_values_and_gradients_equal_eager_and_mode_and_inductor_options_are_taken(arguments):
    def fn(x):
        return (x.sin() * x).tanh()

    x = torch.randn(6, 5)
    compiled = torch.compile(fn, backend="ple_gdn", fullgraph=True, **arguments)
    torch.testing.assert_close(value_and_gradient(compiled, x), value_and_gradient(fn, x))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("max-autotune", {"max_autotune": True, "triton.cudagraphs": True}), (None, {}), ("default", {})],
)
def test_mode_is_expanded_by_inductor_and_options_win_over_it(mode, expected):
    from ple_gdn.backend import open_compilation

    compilation = open_compilation(mode, {"coordinate_descent_tuning": False})
    assert compilation.inductor_options.items() >= {**expected, "coordinate_descent_tuning": False}.items()


def test_unknown_mode_raises_and_names_the_modes():
    with pytest.raises(ValueError, match=r"max-autotunes.*reduce-overhead"):
        torch.compile(lambda x: x + 1, backend="ple_gdn", mode="max-autotunes")(torch.ones(2))


def test_inference_and_dynamic_shapes_compile_once_for_all_lengths():
    def fn(x, w):
        return (x @ w).relu().sum(-1)

    w = torch.randn(4, 4)
    compiled = torch.compile(fn, backend="ple_gdn", dynamic=True)
    before = len(ple_gdn.compile_reports())
    with torch.no_grad():
        for length in (3, 7, 19):
            x = torch.randn(length, 4)
            torch.testing.assert_close(compiled(x, w), fn(x, w))
    assert len(ple_gdn.compile_reports()) == before + 1


def test_buffers_written_in_the_forward_equal_eager():
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    compiled = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    compiled.load_state_dict(eager.state_dict())
    compiled.compile(backend="ple_gdn")
    x = torch.randn(8, 4)
    for model in (eager, compiled):
        model(x).square().sum().backward()
    for a, b in zip(eager.state_dict().values(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("stage", ["dynamo", "joint"])
def test_a_pass_that_raises_is_undone_reported_once_and_the_model_still_compiles(monkeypatch, caplog, stage):
    def spoil_then_raise(gm, context):
        for node in gm.graph.nodes:
            if node.op == "call_function" and "sin" in str(node.target):
                node.target = torch.ops.aten.cos.default
        raise RuntimeError("broken pass")

    use_passes(monkeypatch, GraphPass("unlucky", stage, spoil_then_raise))

    def fn(x):
        return x.sin() * 2

    x = torch.randn(5)
    with caplog.at_level(logging.WARNING, logger="ple_gdn"):
        compiled = torch.compile(fn, backend="ple_gdn", fullgraph=True)
        torch.testing.assert_close(value_and_gradient(compiled, x), value_and_gradient(fn, x))
    warnings = [r for r in caplog.records if r.name == "ple_gdn"]
    assert len(warnings) == 1
    failures = ple_gdn.last_report().failures
    assert [(f.pass_name, f.error) for f in failures] == [("unlucky", "RuntimeError: broken pass")]
    assert "broken pass" in str(ple_gdn.last_report())
    assert ple_gdn.explain(fn, x).failures == failures


def test_a_rewritten_graph_that_inductor_refuses_is_compiled_as_it_came(monkeypatch, caplog):
    def no_such_shape(gm, context):
        for node in gm.graph.nodes:
            if node.op == "call_method" and node.target == "sin":
                node.target, node.args = "reshape", (node.args[0], 7, 11)
                context.records.rewrites.append(Rewrite("bad", "reshape", node.name))

    use_passes(monkeypatch, GraphPass("bad", "dynamo", no_such_shape))
    x = torch.randn(5)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="ple_gdn", fullgraph=True)
    torch.testing.assert_close(value_and_gradient(compiled, x), value_and_gradient(lambda x: x.sin() * 2, x))
    report = ple_gdn.last_report()
    assert report.rewrites == ()
    assert [f.pass_name for f in report.failures] == ["compile"]
    assert "compiled without rewrites" in caplog.text


def test_an_error_of_the_model_itself_is_the_one_that_is_raised(monkeypatch):
    class Refuses(CustomGraphPass):
        def __call__(self, graph):
            raise ZeroDivisionError("the model's own")

        def uuid(self):
            return "refuses"

    options = {"joint_custom_pre_pass": Refuses()}
    with pytest.raises(Exception, match="the model's own"):
        torch.compile(lambda x: x + 1, backend="ple_gdn", options=options)(torch.ones(2))


@pytest.mark.parametrize("given", ["option", "list", "config"])
def test_the_users_own_joint_pass_runs_after_ours(monkeypatch, given):
    order = []
    use_passes(monkeypatch, GraphPass("first", "joint", lambda gm, context: order.append("ours")))

    def theirs(graph):
        order.append("theirs")

    x = torch.randn(3)
    if given == "config":
        with inductor_config.patch(joint_custom_post_pass=theirs):
            torch.compile(lambda x: x.exp(), backend="ple_gdn")(x)
    else:
        options = {"joint_custom_post_pass": [theirs] if given == "list" else theirs}
        torch.compile(lambda x: x.exp(), backend="ple_gdn", options=options)(x)
    assert order == ["ours", "theirs"]


def test_fuse_false_leaves_out_the_fusions_only(monkeypatch):
    ran = []
    fusion = GraphPass("fusion", "dynamo", lambda gm, context: ran.append("fusion"))
    other = GraphPass("other", "dynamo", lambda gm, context: ran.append("other"))
    monkeypatch.setattr(ple_gdn.fx_passes, "PASSES", (fusion, other))
    monkeypatch.setattr(ple_gdn.fx_passes, "FUSIONS", (fusion,))
    torch.compile(lambda x: x + 1, backend="ple_gdn", options={"fuse": False})(torch.ones(2))
    assert ran == ["other"]


def test_threads_compiling_at_once_keep_their_options_apart(monkeypatch):
    seen: dict[str, list[str]] = {}

    def note(gm, context):
        seen.setdefault(context.options.save_mode, []).append(str(context.options.workspace_bytes))

    use_passes(monkeypatch, GraphPass("note", "dynamo", note), GraphPass("note_joint", "joint", note))
    choices = {"light": 1111, "full": 2222}
    results, errors = {}, []
    barrier = threading.Barrier(len(choices))

    def work(save_mode, workspace_bytes):
        def fn(x):
            return x.sin() * workspace_bytes

        try:
            options = {"save_mode": save_mode, "workspace_bytes": workspace_bytes}
            compiled = torch.compile(fn, backend="ple_gdn", options=options)
            barrier.wait()
            results[save_mode] = value_and_gradient(compiled, torch.ones(3))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=choice) for choice in choices.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for save_mode, workspace_bytes in choices.items():
        assert set(seen[save_mode]) == {str(workspace_bytes)}
        torch.testing.assert_close(results[save_mode][0], torch.ones(3).sin() * workspace_bytes)
