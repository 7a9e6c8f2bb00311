"""The backward in spans: its plan, its start states, and that it changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.gdn import make_case

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs
from ple_gdn.ops.gated_delta_rule.spans import chunk_bytes, plan_spans
from ple_gdn.ops.gated_delta_rule.workspace import Sizes

WIDE = {"HV": 48, "K": 128, "V": 128, "itemsize": 2}


def test_interpreted_tables_are_those_of_the_host_and_spans_change_no_bit() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gdn_spans_worker.py"))],
        capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "right"


@pytest.mark.parametrize(
    ("tokens", "documents", "value_heads", "count", "rows"),
    [
        (32768, 1, 48, 2, 256),  # one long document
        (262144, 1, 48, 15, 288),
        (8192, 1, 48, 2, 64),
        (4096, 1, 48, 1, 64),  # short enough for one span
        (2 * 16384, 2, 48, 2, 288 + 31),
        (8 * 4096, 8, 48, 2, 288 + 31),
        (64 * 4096, 64, 48, 15, 288 + 31),
        (32768, 1, 64, 3, 224),
        (261_987, 7, 6, 2, 2080 + 31),  # few heads, walked whole: all documents side by side
        (1, 1, 48, 1, 1),
        (0, 0, 48, 1, 0),
    ],
)
def test_spans_of_the_sizes_that_count(tokens: int, documents: int, value_heads: int, count: int, rows: int) -> None:
    plan = plan_spans(tokens, documents, tokens // 64 + documents, **{**WIDE, "HV": value_heads})
    assert (plan.count, plan.rows) == (count, rows)


def test_spans_of_pieces_are_whole_pieces_and_as_large_as_one_span_may_be() -> None:
    cut = configs.piece_length(261_987, 2, 6, 128, 128)
    plan = plan_spans(261_987, 7, 4100, **{**WIDE, "HV": 6}, cut=cut)
    assert (plan.length % cut, plan.count) == (0, 2)
    assert plan.rows * chunk_bytes(6, 128, 128, 2) < 1.05 * configs.SPANS.span_bytes


def test_the_arena_of_a_long_document_grows_by_its_tables_and_of_a_rebuilt_one_by_its_tapes() -> None:
    def arena(tokens: int, phase: str) -> int:
        return Sizes(tokens, tokens // 64 + 1, 16, 48, 128, 128, 2).arena_bytes(phase)

    kept = [arena(tokens, "backward_kept") for tokens in (1 << 15, 1 << 17, 1 << 20)]
    assert kept[2] - kept[1] < 1 << 20
    assert kept[0] < 1300 << 20
    rebuilt = [arena(tokens, "backward_replay") for tokens in (1 << 17, 1 << 18)]
    sizes = [Sizes(tokens, 0, 16, 48, 128, 128, 2) for tokens in (1 << 17, 1 << 18)]
    light = [sum(each.bytes_of(n) for n in ("gcum", "k_rstd", "qscale", "x", "starts")) for each in sizes]
    assert 0 <= rebuilt[1] - rebuilt[0] - (light[1] - light[0]) < 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leg", [1, 2])
def test_start_states_are_the_states_in_front_of_legs(
    leg: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "SPANS", configs.SPANS._replace(leg=leg))
    case = make_case((130, 0, 1, 200, 64), trailing=9)
    inputs = [x.to(dtype) for x in case[:6]]
    boundaries = torch.tensor(case.boundaries)
    light = torch.ops.ple_gdn.gated_delta_rule(*inputs, boundaries)[6]
    full = torch.ops.ple_gdn.gated_delta_rule(*inputs, boundaries, save_mode="full")[6]
    slots = light.view(-1, *full.mT.shape[1:])
    assert light.dtype == dtype
    assert len(slots) == case.q.shape[1] // (64 * leg) + 1
    chunk = 0
    for start, end in zip(case.boundaries, case.boundaries[1:], strict=False):
        count = -(-(end - start) // 64)
        for i in range(leg, count, leg):
            assert torch.equal(slots[start // (64 * leg) + i // leg - 1], full[chunk + i].mT)
        chunk += count


@pytest.mark.parametrize("documents", [1, 8, 32, 500])
def test_a_workspace_serves_a_backward_with_and_without_tapes(documents: int) -> None:
    lengths = torch.full((documents,), 4096 // documents)
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    T = int(boundaries[-1])
    sizes = Sizes(T, T // 64 + documents, 2, 4, 64, 64, 2)
    needed = ple_gdn.gdn_workspace_bytes(boundaries, 2, 4, 64, 64, dtype=torch.bfloat16)
    assert needed == max(sizes.arena_bytes(phase) for phase in ("backward_kept", "backward_replay"))


def test_a_call_announces_a_start_state_and_one_more_every_2048_tokens() -> None:
    sizes = {"dtype": torch.bfloat16}
    four = lambda T: T * (4 * 48 + 8 * 16 + 2 * 64 * 48)  # noqa: E731
    for tokens, states in ((1, 1), (2047, 1), (2048, 2), (32768, 17)):
        announced = ple_gdn.gdn_saved_bytes(torch.tensor([0, tokens]), 16, 48, 128, 128, **sizes)
        assert announced == four(tokens) + states * 4 * 48 * 128 * 128


def test_a_compiled_call_keeps_and_reads_start_states_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "SPANS", configs.SPANS._replace(leg=1))
    compiled = torch.compile(
        lambda *x: ple_gdn.gated_delta_rule(*x, use_qk_l2norm=True)[0],
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for length in (150, 70):
        case = make_case((length,), heads=1, value_heads=2, key_width=16, value_width=16)
        results = []
        for call in (compiled, lambda *x: ple_gdn.gated_delta_rule(*x, use_qk_l2norm=True)[0]):
            leaves = [x.clone().requires_grad_() for x in case[:5]]
            results.append(torch.autograd.grad(call(*leaves), leaves, case.do))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
