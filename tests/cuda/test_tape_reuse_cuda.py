"""Tape reuse on a GPU: peaks at 261,987 tokens, nothing retained, and the arena's bytes against the formulas."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch
from oracles.gdn import make_case
from oracles.regions import Stack, tokens
from oracles.scripts import load_script
from torch.utils.checkpoint import checkpoint

import ple_gdn
from ple_gdn.ops.gated_delta_rule import arena, eager_regions

pytestmark = pytest.mark.cuda

MIB = 2**20
GEOMETRY = {"heads": 2, "value_heads": 6, "key_width": 128, "value_width": 128}
SIZES = (2, 6, 128, 128)
PACKS = ((64,), (70, 0, 1, 64, 65), (1, 1, 1), (3000, 55))
PHASES = {"backward_replay": "none", "backward_kept": "light", "full": "full"}


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_keeping_the_tapes_of_an_open_region_costs_exactly_their_bytes(save_mode: str) -> None:
    bench = load_script("benchmarks/bench_tape_reuse.py")
    args = argparse.Namespace(device="cuda", tokens=261987, width=128, inner=2048, repeats=0)
    peaks = {}
    for name, reuse in bench.FORMS.items():
        form = bench.Form(args, False, save_mode, reuse)
        peaks[name] = form.peak()
        del form
    assert ple_gdn.last_tape_decision().verdict == "replay"
    assert abs(peaks["kept"] - peaks["replay"] - bench.tape_bytes(args, save_mode)) <= MIB
    assert abs(peaks["auto"] - peaks["replay"]) <= MIB


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_all_forms_give_the_same_bits(closed: bool, save_mode: str) -> None:
    bench = load_script("benchmarks/bench_tape_reuse.py")
    args = argparse.Namespace(device="cuda", tokens=5000, width=128, inner=512, repeats=0)
    results = [bench.Form(args, closed, save_mode, reuse).backward()() for reuse in bench.FORMS.values()]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert ple_gdn.last_tape_decision().verdict == ("hand-off" if closed else "replay")


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("backend", [None, "ple_gdn"])
def test_a_step_retains_nothing(closing: bool, backend: str | None) -> None:
    torch._dynamo.reset()
    model = Stack(closing, 4).cuda()
    run = model if backend is None else torch.compile(model, backend=backend)
    x = tokens().cuda().requires_grad_()
    gradients = (x, *model.parameters())
    torch.autograd.grad(run(x).square().sum(), gradients)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = run(x)
    if backend is None:  # compiled backwards donate their buffers: one backward each
        torch.autograd.grad(y.square().sum(), gradients, retain_graph=True)
    torch.autograd.grad(y.square().sum(), gradients)
    del y
    assert eager_regions.handed_bytes() == 0
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_real_run_binds_the_evaluated_formulas(lengths: tuple[int, ...], phase: str) -> None:
    case = make_case(lengths, dtype=torch.bfloat16, **GEOMETRY)
    inputs = [x.cuda() for x in case[:6]]
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries, device="cuda"))
    layout = ple_gdn.gdn_workspace_layout(packing, *SIZES, dtype=torch.bfloat16)
    with arena.recording() as forward:
        outputs = torch.ops.ple_gdn.gated_delta_rule(*inputs, *packing, save_mode=PHASES[phase])
    with arena.recording() as backward:
        torch.ops.ple_gdn.gated_delta_rule_backward(
            case.do.cuda(), case.dfinal_state.cuda(), *inputs, *packing, None, *outputs[2:]
        )
    assert sum(a.peak for a in forward) == layout.bytes("inference" if PHASES[phase] == "none" else "forward")
    assert sum(a.peak for a in backward) == layout.bytes(phase)


def allocated_by(call: Callable[[], object]) -> int:
    """Bytes that a call asks the caching allocator for, as asked: its blocks can be up to 1 MiB larger."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before


def test_a_workspace_takes_all_scratch_and_may_hold_anything() -> None:
    case = make_case((3000, 0, 1, 55), dtype=torch.bfloat16, **GEOMETRY)
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries, device="cuda"))
    needed = ple_gdn.gdn_workspace_bytes(packing, *SIZES, dtype=torch.bfloat16)
    given = torch.full((needed,), 255, dtype=torch.uint8, device="cuda")  # NaN in every float type
    results, allocated = [], []
    for workspace in (None, given):
        leaves = [x.cuda().requires_grad_() for x in case[:5]]

        def rule(*x: torch.Tensor, workspace: torch.Tensor | None = workspace) -> torch.Tensor:
            return ple_gdn.gated_delta_rule(*x, use_qk_l2norm=True, cu_seqlens=packing, workspace=workspace)[0]

        o = checkpoint(rule, *leaves, use_reentrant=False, early_stop=False)
        grads: list[torch.Tensor] = []
        upstream = torch.ones_like(o)
        allocated.append(allocated_by(lambda: grads.extend(torch.autograd.grad(o, leaves, upstream))))  # noqa: B023
        results.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    layout = ple_gdn.gdn_workspace_layout(packing, *SIZES, dtype=torch.bfloat16)
    scratch = layout.bytes("inference") + layout.bytes("backward_replay")
    # The arena rounds a buffer up to 256 bytes and has at most 16 of them in both passes.
    assert 0 <= scratch - (allocated[0] - allocated[1]) <= 256 * 16
    assert not bool((given == 255).all())
