"""Run with TRITON_INTERPRET=1: X as the plain `prep_kernel` rounds it, float16, against float64.

Prints as JSON, by case, the share of numbers that are not the model's, and the state error over that of plain rounding
and over the model's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.carried import carried, gated_inverse, state_error

from ple_gdn.ops.gated_delta_rule.launch import launch_forward

LENGTHS = (64, 50, 1, 2)


def run(noise: float, beta: str, l2norm: bool) -> tuple[float, float, float]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, k = torch.randn(1, tokens, 1, 32), torch.randn(1, 1, 1, 32) + noise * torch.randn(1, tokens, 1, 32)
    k = k * torch.where(torch.rand(1, tokens, 1, 1) < 0.3, -1.0, 1.0)
    if not l2norm:
        k = 0.8 * torch.nn.functional.normalize(k, dim=-1)
    q, k, v = q.half(), k.half(), torch.randn(1, tokens, 2, 16).half()
    g = -0.2 * torch.rand(1, tokens, 2)
    strength = torch.ones(1, tokens, 2) if beta == "one" else 0.2 + torch.rand(1, tokens, 2)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = launch_forward(q, k, v, g, strength, None, ends, None, None, 1.0, False, l2norm, "full")[5]
    other, errors = 0.0, [0.0, 0.0, 0.0]
    for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        for head in range(2):
            rows = slice(start, end)
            keys = k[0, rows, 0].double()
            keys = keys * (keys.square().sum(1, keepdim=True) + 1e-6).rsqrt() if l2norm else keys
            gates = (g[0, rows, head], strength[0, rows, head])
            exact, found = gated_inverse(keys, *gates), x[0, rows, head, : end - start].double()
            assert (x[0, rows, head].triu() == 0).all()
            assert (found - exact).abs().max() < 3 * 2.0**-11 if end - start > 1 else True
            model = carried(exact, keys, *gates, torch.float16)
            other += (found != model).sum().item() / tokens / 64
            for i, rounded in enumerate((found, exact.half(), model)):
                errors[i] += state_error(rounded, exact, keys, *gates)
    return other, *(errors[0] / max(error, 1e-30) for error in errors[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {"alike": (0.1, "one", True), "alike, own norm": (0.1, "uniform", False), "not alike": (3.0, "one", True)}
    print(json.dumps({name: run(*case) for name, case in cases.items()}))
