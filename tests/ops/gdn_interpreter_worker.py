"""Run with TRITON_INTERPRET=1: the CUDA launchers of the gated delta rule on CPU tensors; prints the errors as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms

from ple_gdn.ops.gated_delta_rule import arena, configs, workspace
from ple_gdn.ops.gated_delta_rule.launch import launch_backward, launch_forward


def _used(tapes: tuple[torch.Tensor, ...], boundaries: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tapes without h's rows past the last chunk, which nothing writes or reads."""
    *rows, h, delta = tapes
    return (*rows, h[: int(((boundaries.diff() + 63) // 64).sum())], delta)


def run(lengths: tuple[int, ...], use_qk_l2norm: bool, save_mode: str, **sizes: object) -> dict[str, float]:
    case = make_case(lengths, trailing=5, **sizes)
    if not use_qk_l2norm:
        case = case._replace(k=0.98 * torch.nn.functional.normalize(case.k, dim=-1))
    scale = case.q.shape[-1] ** -0.5
    expected = oracle(case, scale, use_qk_l2norm)
    boundaries = torch.tensor(case.boundaries)
    shared = (*case[:6], boundaries, None, None)
    o, final_state, *tapes = launch_forward(*shared, scale, True, use_qk_l2norm, save_mode)
    full = launch_forward(*shared, scale, False, use_qk_l2norm, "full")[2:]
    alone = launch_forward(*shared, scale, False, use_qk_l2norm, "full", output=False)[2:]
    assert all(torch.equal(a, b) for a, b in zip(_used(full, boundaries), _used(alone, boundaries), strict=True))
    gradients = launch_backward(case.do, case.dfinal_state, *shared, *tapes, scale, use_qk_l2norm)
    actual = dict(zip(NAMES, (o, final_state, *gradients), strict=True))
    return {name: relative_rms(actual[name], expected[name]) for name in NAMES}


PHASES = {"none": ("inference", "backward_replay"), "light": ("forward", "backward_kept"), "full": ("forward", "full")}
SMALL = {"heads": 1, "value_heads": 2, "key_width": 16, "value_width": 32}


def call(case: Case, save_mode: str, packed: bool = True) -> dict[str, torch.Tensor]:
    """Outputs and gradients by the launchers; bound bytes equal the announced ones."""
    boundaries = torch.tensor(case.boundaries) if packed else None
    shared = (*case[:6], boundaries, None, None)
    with arena.recording() as arenas:
        o, final_state, *tapes = launch_forward(*shared, None, True, True, save_mode)
        gradients = launch_backward(case.do, case.dfinal_state, *shared, *tapes, None, True)
    sizes = workspace.sizes_of(case.q, case.v, boundaries)
    for phase, bound in zip(PHASES[save_mode], arenas, strict=True):
        assert bound.peak == sizes.arena_bytes(phase), (phase, bound.bound)
        assert ("piece_maps" in bound.bound) == (case.q.shape[1] > 64 * configs.CUTS[0][1])
    return dict(zip(NAMES, (o, final_state, *gradients), strict=True))


def alone(case: Case, n: int) -> Case:
    start, end = case.boundaries[n : n + 2]
    rows, one = slice(start, end), slice(n, n + 1)
    inputs = (*(x[:, rows] for x in case[:5]), case.initial_state[one], (0, end - start))
    return Case(*inputs, case.do[:, rows], case.dfinal_state[one])


def run_cut(length: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """Documents in pieces of `length` chunks: equal bits kept and replayed, and of the first in the pack and alone."""
    configs.CUTS = ((1 << 30, length),)
    case = make_case(lengths, trailing=5, **SMALL)
    expected, packed = oracle(case, 0.25, True), call(case, "none")
    kept, one = call(case, "full"), call(alone(case, 0), "light", packed=False)
    for name in NAMES:
        assert torch.equal(kept[name], packed[name]), name
        of_pack = packed[name][:1] if "state" in name else packed[name][:, : lengths[0]]
        assert torch.equal(one[name], of_pack), name
    configs.CUTS = ()
    return {name: relative_rms(packed[name], expected[name]) for name in NAMES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [
        run((65, 0, 1), True, "light", heads=1, value_heads=2, key_width=16, value_width=32),
        run((70,), False, "full", heads=1, value_heads=1, key_width=48, value_width=16, mode="mixed_decay"),
    ]
    results.append(run_cut(1, (193, 0, 70)))
    print(json.dumps(results))
