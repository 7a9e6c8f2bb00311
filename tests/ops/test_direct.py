"""When the front goes round the dispatcher: never where something would notice."""

from __future__ import annotations

import threading

import pytest
import torch
from oracles.gdn import NAMES, make_case, run_front
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ple_gdn
from ple_gdn.ops import direct
from ple_gdn.ops.direct import unobserved
from ple_gdn.ops.gated_delta_rule import op

pytestmark = pytest.mark.usefixtures("one_thread")


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def test_plain_tensors_outside_of_everything_are_unobserved() -> None:
    x = torch.zeros(3)
    assert unobserved((x, None, torch.nn.Parameter(x), x[1:], x.detach(), x.expand(2, 3)))
    with torch.no_grad(), torch.autocast("cpu"):
        assert unobserved((x,))


def test_whatever_could_notice_is_observed() -> None:
    x = torch.zeros(3)
    with torch.inference_mode():
        inference = torch.zeros(3)
    with FakeTensorMode() as fake:
        made = fake.from_tensor(x)
    odd = (x.as_subclass(Sub), inference, made, torch.zeros(3, device="meta"), torch._efficientzerotensor(3))
    for t in (*odd, x.to_sparse(), torch._neg_view(x)):
        assert not unobserved((x, t)), type(t)
    for mode in (Seen(), FlopCounterMode(display=False), torch.device("cpu"), torch.profiler.profile()):
        with mode:
            assert not unobserved((x,)), mode
    assert torch.func.vmap(lambda t: torch.tensor(unobserved((x,))))(torch.zeros(2)).tolist() == [False, False]
    traced = []
    torch.jit.trace(lambda t: traced.append(unobserved((t,))) or t + 1, x, check_trace=False)
    assert traced == [False]
    with torch.autograd.forward_ad.dual_level():
        assert not unobserved((x,))


def test_both_ways_have_the_same_bits_and_a_mode_sees_both_ops() -> None:
    case = make_case((70, 0, 3))
    alone = run_front(case)
    with Seen() as seen:
        dispatched = run_front(case)
    for name in NAMES:
        assert torch.equal(alone[name], dispatched[name]), name
    called = [op for op in seen.ops if op.startswith("ple_gdn")]
    assert called == ["ple_gdn.gated_delta_rule.default", "ple_gdn.gated_delta_rule_backward.default"]


def test_the_direct_way_refuses_second_derivatives_and_autocast_changes_nothing() -> None:
    case = make_case((5,))
    leaves = [x.requires_grad_() for x in case[:5]]
    o, _ = ple_gdn.gated_delta_rule(*leaves)
    assert o.grad_fn.name() == "GatedDeltaRuleBackward"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = ple_gdn.gated_delta_rule(*leaves)
    assert torch.equal(o, cast)
    (dq,) = torch.autograd.grad(o.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(dq.sum(), leaves[1])


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_rule_backward"])
def test_somebodys_autocast_rule_is_applied(name: str) -> None:
    key, seen = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU), []

    def rule(*args, **kwargs):
        seen.append(name)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return getattr(torch.ops.ple_gdn, name)(*args, **kwargs)

    def step() -> int:
        seen.clear()
        ple_gdn.gated_delta_rule(*leaves)[0].sum().backward()
        return len(seen)

    leaves = [x.requires_grad_() for x in make_case((5,))[:5]]
    with torch.library._scoped_library("ple_gdn", "IMPL") as library:
        library.impl(name, rule, "AutocastCPU")
        assert step() == 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert step() == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert step() == 0
        assert not direct.cast_by_a_rule(f"ple_gdn::{name}")


def test_a_first_call_in_inference_mode_is_no_measure_of_plain_tensors() -> None:
    direct._plain_keys.cache_clear()
    x = torch.zeros(3)
    with torch.inference_mode():
        assert unobserved((x,))
        inference = torch.zeros(3)
    assert unobserved((x,))
    assert not unobserved((inference,))


def test_a_pre_dispatch_trace_has_the_backward() -> None:
    def gradients(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(ple_gdn.gated_delta_rule(*leaves)[0].sum(), leaves)

    graph = make_fx(gradients, pre_dispatch=True)(*make_case((5,))[:5]).graph
    called = [str(node.target) for node in graph.nodes if "ple_gdn" in str(node.target)]
    assert called == ["ple_gdn.gated_delta_rule.default", "ple_gdn.gated_delta_rule_backward.default"]


def test_the_body_of_somebodys_op_makes_no_graph() -> None:
    leaves = [x.requires_grad_() for x in make_case((5,))[:5]]
    seen = []

    @torch.library.custom_op("ple_gdn_test_direct::body", mutates_args=())
    def body(x: torch.Tensor) -> torch.Tensor:
        o, _ = ple_gdn.gated_delta_rule(*leaves)
        seen.append((torch.is_grad_enabled(), o.requires_grad))
        return x.clone()

    body(torch.zeros(1))
    assert seen == [(True, False)]


def test_the_implementation_gets_the_types_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = op._forward_impl
    monkeypatch.setattr(op, "_forward_impl", lambda *t, **options: seen.append(options) or run(*t, **options))
    inputs = make_case((5,))[:5]
    for leaf in (inputs[0], inputs[0].clone().requires_grad_()):
        ple_gdn.gated_delta_rule(leaf, *inputs[1:], scale=2, output_final_state=1, use_qk_l2norm=0)
    for options in seen:
        assert [type(options[name]) for name in ("scale", "output_final_state", "use_qk_l2norm")] == [float, bool, bool]
    assert len(seen) == 2


def test_a_profiler_of_all_threads_sees_the_ops_by_name() -> None:
    def step() -> None:
        leaves = [x.requires_grad_() for x in make_case((5,))[:5]]
        ple_gdn.gated_delta_rule(*leaves)[0].sum().backward()
        with torch.no_grad():
            ple_gdn.gated_delta_rule(*leaves)

    with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profile:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("ple_gdn::")}
    assert counts == {"ple_gdn::gated_delta_rule": 2, "ple_gdn::gated_delta_rule_backward": 1}
