"""Calls repeated from a record on a GPU: they follow their inputs, and have the bits of calls without one."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from oracles.gdn import Case, make_case

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs, repeats

pytestmark = pytest.mark.cuda

LENGTHS = (130, 0, 1, 400, 64, 65)
FORMS = ("whole", "spans", "pieces", "pieces in spans")


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    repeats.forget()


def example(seed: int = 0, dtype: torch.dtype = torch.bfloat16, width: int = 128) -> Case:
    sizes = {"heads": 2, "value_heads": 6, "key_width": width, "value_width": width, "dtype": dtype, "seed": seed}
    case = make_case(LENGTHS, **sizes)
    return Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))


def step_of(case: Case, mode: str = "light", workspace: torch.Tensor | None = None) -> Callable[[], list[torch.Tensor]]:
    """A training step on leaves that stay where they are."""
    leaves = [x.requires_grad_() for x in case[:6]]
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries, device="cuda"))

    def step() -> list[torch.Tensor]:
        options = {"cu_seqlens": packing, "save_mode": mode, "use_qk_l2norm": True, "workspace": workspace}
        out = ple_gdn.gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True, **options)
        return [*out, *torch.autograd.grad(out, leaves, (case.do, case.dfinal_state))]

    return step


def records() -> int:
    return sum(isinstance(found, repeats.Launches) for found in repeats._records.values())


def refill(case: Case, seed: int) -> None:
    with torch.no_grad():
        for old, new in zip(case, example(seed, case.q.dtype, case.q.shape[3]), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["light", "full"])
@pytest.mark.parametrize("given", [False, True], ids=["", "workspace"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 32)])
def test_repeated_steps_follow_what_their_inputs_hold(
    dtype: torch.dtype, width: int, given: bool, mode: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "spans" in form:
        monkeypatch.setattr(configs, "SPANS", configs.SpanConfig(1, 0, 1 << 20))
    if "pieces" in form:
        monkeypatch.setattr(configs, "CUTS", ((1 << 30, 1),))
    case = example(0, dtype, width)
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device="cuda") if given else None
    step = step_of(case, mode, workspace)
    for seed in range(8):
        refill(case, seed)
        with monkeypatch.context() as patch:
            patch.setattr(repeats, "DEVICES", ())
            expected = [x.cpu() for x in step()]
        actual = [x.cpu() for x in step()]
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), seed
        gc.collect()
    assert records() >= 2


def test_addresses_that_change_are_new_calls() -> None:
    case = example()
    step = step_of(case)
    expected = step()
    held = []
    for i in range(12):
        held.append([torch.empty(1 + 513 * i, device="cuda") for _ in range(i % 4)])
        actual = step()
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        held.append(actual if i % 3 else None)


def test_a_recorded_call_is_captured_in_a_graph_and_on_another_stream() -> None:
    case = example()
    boundaries = torch.tensor(case.boundaries, device="cuda")
    packing = ple_gdn.prepare_varlen(boundaries)
    inputs = (*case[:6], *packing)

    def call() -> list[torch.Tensor]:
        o, _, *tapes = torch.ops.ple_gdn.gated_delta_rule(*inputs, use_qk_l2norm=True)
        backward = torch.ops.ple_gdn.gated_delta_rule_backward
        return [o, *backward(case.do, None, *inputs, None, *tapes, use_qk_l2norm=True)]

    expected = [x.clone() for x in call()]
    for _ in range(4):
        call()
    assert records() >= 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            beside = call()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(beside, expected, strict=True))
    graphs = []
    for _ in range(4):  # the pool hands the same addresses to later captures
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graphs.append((graph, captured))
    refill(case, 3)
    expected = [x.clone() for x in call()]
    for graph, captured in graphs:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_a_profile_sees_the_kernels_of_a_repeated_call() -> None:
    step = step_of(example())
    for _ in range(5):
        step()
    seen = []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        seen.append(sorted(e.key for e in profile.key_averages() if e.key.endswith("_kernel")))
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 6
