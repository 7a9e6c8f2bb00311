"""When the front goes round the dispatcher: never where something would notice."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import NAMES, make_case, run_front
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ple_gdn
from ple_gdn.ops.direct import unobserved

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
    direct = run_front(case)
    with Seen() as seen:
        dispatched = run_front(case)
    for name in NAMES:
        assert torch.equal(direct[name], dispatched[name]), name
    called = [op for op in seen.ops if op.startswith("ple_gdn")]
    assert called == ["ple_gdn.gated_delta_rule.default", "ple_gdn.gated_delta_rule_backward.default"]


def test_the_direct_way_refuses_second_derivatives_and_autocast_changes_nothing() -> None:
    case = make_case((5,))
    leaves = [x.requires_grad_() for x in case[:5]]
    o, _ = ple_gdn.gated_delta_rule(*leaves)
    assert type(o.grad_fn).__name__ == "_DirectBackward"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = ple_gdn.gated_delta_rule(*leaves)
    assert torch.equal(o, cast)
    (dq,) = torch.autograd.grad(o.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(dq.sum(), leaves[1])
