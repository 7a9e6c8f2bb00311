"""PLE on CUDA against the float64 eager chain: values, gradients, packing, bits, memory, graphs, bad boundaries."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from oracles.layouts import LAYOUTS
from oracles.ple import TENSORS, ple_inputs, ple_packed
from torch import Tensor

import ple_gdn

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = (BF16, FP32, FP16, FP32, BF16, FP32, FP16)
# Relative RMS. d(score) grows as 1/sqrt(|score|), so near a zero score (3.8e-6 in packed-mixed) fp32 rounding is
# amplified: there the fp32 eager chain itself is off by 6e-3, and the bound of 16-bit inputs adds four times that
# chain's error. Of fp32 inputs the score is summed in float64: their bound stands alone.
BOUND = {FP32: 1e-5, BF16: 4e-3, FP16: 1e-3}
CASES = {
    "real_width": {"batch": 1, "tokens": 300, "streams": 4, "channels": 2560, "kernel": 4, "dilation": 3},
    "packed": {"batch": 1, "tokens": 500, "streams": 4, "channels": 100, "kernel": 4, "dilation": 3,
               "cu": [0, 5, 5, 6, 300, 480], "masked": True},
    "batch_rows_of_odd_width": {"batch": 3, "tokens": 200, "streams": 3, "channels": 33, "kernel": 5, "dilation": 2},
    "eight_taps": {"batch": 2, "tokens": 150, "streams": 2, "channels": 257, "kernel": 8, "dilation": 1,
                   "masked": True},
    "one_tap": {"batch": 1, "tokens": 100, "streams": 8, "channels": 160, "kernel": 1, "dilation": 1},
    "long_dilation": {"batch": 1, "tokens": 300, "streams": 5, "channels": 96, "kernel": 3, "dilation": 7,
                      "cu": [0, 9, 290]},
}  # fmt: skip


def _make(case: dict, dtypes, seed: int = 3) -> tuple[list[Tensor], list[int] | None, Tensor | None]:
    sizes = (case[k] for k in ("batch", "tokens", "streams", "channels", "kernel"))
    inputs = [x.to(DEVICE) for x in ple_inputs(*sizes, dtypes=dtypes, seed=seed)]
    mask = None
    if case.get("masked"):
        generator = torch.Generator().manual_seed(1)
        mask = (torch.rand(case["batch"], case["tokens"], generator=generator) > 0.3).to(DEVICE)
    return inputs, case.get("cu"), mask


def _cu(cu: list[int] | None) -> Tensor | None:
    return None if cu is None else torch.tensor(cu, device=DEVICE, dtype=torch.int32)


def _run(inputs: list[Tensor], dout: Tensor, cu: Tensor | None = None, mask: Tensor | None = None, *, dilation: int,
         residual: bool = False, **options) -> list[Tensor]:  # fmt: skip
    """Output and the seven gradients through the raw op."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, _ = torch.ops.ple_gdn.ple_gate_conv(*leaves, cu, mask, dilation=dilation, residual=residual, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _oracle(inputs: list[Tensor], dout: Tensor, cu, mask, dilation: int, residual: bool, dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    mask = None if mask is None else mask.to(dtype)
    out = ple_packed(leaves, cu, dilation=dilation, conv_mask=mask)
    out = out + leaves[0] if residual else out
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]


def _error(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y).norm() / y.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("dtypes", [FP32, BF16, FP16, MIXED], ids=["fp32", "bf16", "fp16", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_float64(name: str, dtypes, residual: bool) -> None:
    case = CASES[name]
    inputs, cu, mask = _make(case, dtypes)
    dout = torch.randn(inputs[0].shape, device=DEVICE).to(inputs[0].dtype)
    got = _run(inputs, dout, _cu(cu), mask, dilation=case["dilation"], residual=residual)
    want = _oracle(inputs, dout, cu, mask, case["dilation"], residual, torch.float64)
    chain = _oracle(inputs, dout, cu, mask, case["dilation"], residual, torch.float32)
    for label, x, y, eager, like in zip(("out", *TENSORS), got, want, chain, (inputs[0], *inputs), strict=True):
        assert x.dtype == like.dtype
        bound = BOUND[like.dtype] + (0 if dtypes is FP32 else 4 * _error(eager, y))
        assert _error(x, y) <= bound, f"{label}: {_error(x, y):.2e} > {bound:.2e}"


def test_score_exactly_zero_gets_gate_one_half_and_no_gradient() -> None:
    inputs, _, _ = _make(CASES["packed"], FP32)
    inputs[0][0, 2] = 0
    inputs[1][0, 3] = 0
    dout = torch.randn(inputs[0].shape, device=DEVICE)
    got = _run(inputs, dout, dilation=3)
    want = _oracle(inputs, dout, None, None, 3, False, torch.float64)
    assert _error(got[0], want[0]) < 1e-6
    assert not got[1][0, 2].any()
    assert not got[2][0, 3].any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_documents_have_the_bits_of_the_documents_alone(dtype: torch.dtype) -> None:
    cu = [0, 1, 1, 70, 333, 640]
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 700, 4, 2560, 4, dtypes=dtype)]
    dout = torch.randn(inputs[0].shape, device=DEVICE).to(dtype)
    packed = _run(inputs, dout, _cu(cu), dilation=3)
    for start, stop in itertools.pairwise(cu):
        if stop > start:
            part = [x[:, start:stop] for x in inputs[:3]] + inputs[3:]
            alone = _run(part, dout[:, start:stop], dilation=3)
            for x, y in zip(packed[:4], alone[:4], strict=True):
                assert torch.equal(x[:, start:stop], y)
    for x in packed[:4]:
        assert not x[:, 640:].any()


def test_nan_of_one_document_stays_there() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 96, 4, 64, 4)]
    dout = torch.randn(inputs[0].shape, device=DEVICE)
    clean = _run(inputs, dout, _cu([0, 30, 50, 90]), dilation=3)
    for x in inputs[:3]:
        x[:, 30:50] = float("nan")
        x[:, 90:] = float("nan")
    dirty = _run(inputs, dout, _cu([0, 30, 50, 90]), dilation=3)
    for x, y in zip(dirty[:4], clean[:4], strict=True):
        assert torch.equal(x[:, :30], y[:, :30])
        assert torch.equal(x[:, 50:], y[:, 50:])
        assert x[:, 30:50].isnan().any()


def test_twenty_runs_and_budgets_of_equal_split_give_equal_bits() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 2048, 4, 2560, 4, dtypes=BF16)]
    dout = torch.randn(inputs[0].shape, device=DEVICE).to(BF16)
    first = _run(inputs, dout, dilation=3)
    for i in range(20):
        options = {} if i % 2 else {"workspace_bytes": 48 << 20}
        for x, y in zip(_run(inputs, dout, dilation=3, **options), first, strict=True):
            assert torch.equal(x, y)
    for x, y in zip(_run(inputs, dout, dilation=3, workspace_bytes=1 << 20)[:4], first[:4], strict=True):
        assert torch.equal(x, y)


def test_strided_inputs_and_expanded_gradients_are_accepted() -> None:
    wide = torch.randn(2, 90, 3 * 256, device=DEVICE)
    inputs = [x.to(DEVICE) for x in ple_inputs(2, 90, 4, 64, 4)]
    inputs[0] = wide[..., :256]
    inputs[1] = torch.randn(256, 2, 90, device=DEVICE).permute(1, 2, 0)
    inputs[2] = torch.randn(90, 2, 64, device=DEVICE).transpose(0, 1)
    dout = torch.ones(1, device=DEVICE).expand(2, 90, 256)
    got = _run(inputs, dout, dilation=3)
    want = _run([x.contiguous() for x in inputs], dout.contiguous(), dilation=3)
    for x, y in zip(got, want, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, y)


def _with_stats(rows: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Output, scalars of the forward and the seven gradients of rows that end with the upstream gradient."""
    *tensors, dout = rows
    leaves = [x.detach().requires_grad_() for x in (*tensors, *weights)]
    out, stats = torch.ops.ple_gdn.ple_gate_conv(*leaves, dilation=2, residual=True)
    return [out.detach(), stats, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "channels", "kernel"), [(BF16, 45, 1), (BF16, 64, 4), (FP32, 48, 4)], ids=["odd", "aligned", "fp32"]
)
def test_every_layout_gives_the_bits_of_dense_rows(dtype: torch.dtype, channels: int, kernel: int, layout: str) -> None:
    """Triton lays tiles out by what it knows of addresses, and sums them in the order of their layout."""
    inputs = [x.to(DEVICE) for x in ple_inputs(3, 57, 3, channels, kernel, dtypes=dtype)]
    rows = [*inputs[:3], torch.randn(inputs[0].shape, device=DEVICE).to(dtype)]
    dense = _with_stats(rows, inputs[3:])
    moved = [LAYOUTS[layout](x) for x in rows]
    for given in (moved, [*rows[:2], moved[2], rows[3]]):
        for label, x, y in zip(("out", "stats", *TENSORS), _with_stats(given, inputs[3:]), dense, strict=True):
            assert torch.equal(x, y), label


def test_many_documents_exceed_no_grid_axis() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 70_000, 2, 16, 4)]
    dout = torch.randn(inputs[0].shape, device=DEVICE)
    cu = torch.arange(70_001, device=DEVICE)
    got = _run(inputs, dout, cu, dilation=3)
    rows = [x.transpose(0, 1) for x in inputs[:3]] + inputs[3:]
    want = _run(rows, dout.transpose(0, 1), dilation=3)
    for x, y in zip(got[:4], want[:4], strict=True):
        assert torch.equal(x, y.transpose(0, 1) if y.shape[0] == 70_000 else y)


def test_cuda_graph_replays_with_other_boundaries() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 40, 4, 64, 4)]
    dout = torch.randn(inputs[0].shape, device=DEVICE)
    cu = _cu([0, 16, 40, 40, 40])
    _run(inputs, dout, cu, dilation=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(inputs, dout, cu, dilation=3)
    cu.copy_(_cu([0, 8, 20, 33, 40]))
    graph.replay()
    for x, y in zip(captured, _run(inputs, dout, cu, dilation=3), strict=True):
        assert torch.equal(x, y)


def test_no_call_synchronises() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 64, 4, 64, 4)]
    dout = torch.randn(inputs[0].shape, device=DEVICE)
    cu = _cu([0, 10, 64])
    _run(inputs, dout, cu, dilation=3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(inputs, dout, cu, dilation=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_temporaries_stay_within_the_bound() -> None:
    tokens, streams, channels = 8192, 4, 2560
    inputs = [x.to(DEVICE) for x in ple_inputs(1, tokens, streams, channels, 4, dtypes=BF16)]
    dout = torch.randn(inputs[0].shape, device=DEVICE).to(BF16)
    leaves = [x.requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ple_gdn.ple_gate_conv(*leaves, dilation=3)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    grads = torch.autograd.grad(out, leaves, dout)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - sum(x.nbytes for x in grads)
    assert kept <= 64 * tokens * streams
    assert extra <= (64 << 20) + 64 * tokens * streams


def test_empty_inputs_give_empty_outputs_and_zero_weight_gradients() -> None:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, 0, 4, 64, 4)]
    got = _run(inputs, torch.empty(1, 0, 256, device=DEVICE), dilation=3)
    assert got[0].shape == (1, 0, 256)
    assert not any(x.any() for x in got[4:])


@pytest.mark.parametrize("boundaries", [[0, 20, 10, 40], [1, 40], [0, 41]], ids=["decreasing", "not_from_0", "past_T"])
def test_bad_boundaries_trip_a_device_assert(boundaries: list[int]) -> None:
    code = (
        "import torch, ple_gdn\n"
        "f = lambda *s: torch.randn(*s, device='cuda')\n"
        f"cu = torch.tensor({boundaries}, device='cuda')\n"
        "ple_gdn.ple_gate_conv(f(1, 40, 64), f(1, 40, 64), f(1, 40, 16), f(64), f(64), f(64), f(64, 1, 4), dilation=3, "
        "cu_seqlens=cu)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr or "Assertion" in done.stderr + done.stdout
