"""Precision over many ranks, and what the exchange skips: ranks run as threads of this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ple_gdn

sys.path.insert(0, str(Path(__file__).parent))
import kcp_threads
import kcp_worker

TOKENS = ("q", "k", "v", "g", "beta")


def undamped(dtype: torch.dtype, T: int = 8192) -> dict[str, torch.Tensor]:
    """g = 0 and beta = .01: nothing decays, so an error made at a boundary lives to the end of the document."""
    generator = torch.Generator().manual_seed(3)
    H, HV, K, V = 1, 2, 32, 32

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = {"q": rand(1, T, H, K), "k": rand(1, T, H, K), "v": rand(1, T, HV, V), "do": rand(1, T, HV, V)}
    return {
        **{name: x.to(dtype) for name, x in tokens.items()},
        "g": torch.zeros(1, T, HV),
        "beta": torch.full((1, T, HV), 0.01),
        "initial_state": rand(1, HV, K, V),
        "dht": rand(1, HV, K, V),
    }


def exact(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The op on one rank in float64."""
    wide = {name: x.double() for name, x in case.items()}
    return kcp_worker.run_gdn(wide, cu_seqlens=torch.tensor([0, case["q"].shape[1]]))


def error(got: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], contexts: list) -> dict[str, float]:
    """Relative RMS error of every output and gradient over all ranks' shards together."""
    out = {}
    for name, reference in expected.items():
        if name in ("ht", "dinitial_state"):
            whole = sum(rank[name].double() for rank in got)
        else:
            whole = torch.empty_like(reference)
            for rank, ctx in zip(got, contexts, strict=True):
                whole[:, ctx.positions] = rank[name].double()
        out[name] = float((whole - reference).norm() / reference.norm())
    return out


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_error_does_not_grow_from_2_to_8_ranks_without_decay(layout, monkeypatch, one_thread):
    case = undamped(torch.float32)
    expected = exact(case)
    errors = {}
    for world in (1, 2, 8):
        part = ple_gdn.kcp_partition([0, case["q"].shape[1]], world, layout)
        contexts = [None] * world

        def work(ctx, contexts=contexts):
            contexts[ctx.rank] = ctx
            return kcp_worker.run_gdn(kcp_worker.shard(case, ctx), cp=ctx)

        results = kcp_threads.run_ranks(monkeypatch, part, (1, 2), work, p_rule=1)
        errors[world] = error(results, expected, contexts)
    for name in expected:
        assert errors[8][name] <= 1.2 * errors[2][name], (name, errors)
        assert errors[8][name] <= 1e-5, (name, errors)
