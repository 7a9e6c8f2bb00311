"""`causal_conv1d` on CUDA: float64, the CPU's bits, packing, layouts, graphs, 64-bit offsets, bad boundaries."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from oracles.causal_conv1d import conv_chain, conv_packed
from torch import Tensor

import ple_gdn

pytestmark = pytest.mark.cuda
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKWARD = torch.ops.ple_gdn.causal_conv1d_backward
# batch, tokens, width, kernel, cu_seqlens
CASES = {
    "long row": (1, 3000, 1280, 4, None),
    "batch": (3, 333, 24, 4, None),
    "packed": (1, 700, 640, 4, [0, 5, 5, 6, 300, 301, 680]),
    "every row its own document": (1, 90, 40, 4, list(range(91))),
    "odd width": (1, 200, 37, 3, [0, 77, 200]),
    "one tap": (2, 70, 64, 1, None),
    "eight taps": (1, 260, 96, 8, [0, 3, 130]),
    "eleven taps": (2, 50, 33, 11, None),
    "fewer tokens than taps": (2, 2, 8, 4, None),
}


def _case(
    name: str, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, list | None]:
    batch, tokens, width, kernel, boundaries = CASES[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, width), (width, kernel), (width,), (batch, tokens, width)]
    x, weight, offset, dy = (torch.randn(s, generator=generator).to(dtype).cuda() for s in shapes)
    return x, weight * kernel**-0.5, offset if bias else None, dy, boundaries


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, boundaries: list | None, activation: str | None,
         device: str = "cuda") -> list[Tensor]:  # fmt: skip
    x, weight, bias, dy = (None if t is None else t.to(device) for t in (x, weight, bias, dy))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    cu = None if boundaries is None else torch.tensor(boundaries, device=device)
    y = ple_gdn.causal_conv1d(*leaves, activation=activation, cu_seqlens=cu)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_float64_and_the_cpu(name, dtype, bias, activation) -> None:
    case = _case(name, dtype, bias)
    got = _run(*case, activation)
    leaves = [t.double().requires_grad_() for t in case[:3] if t is not None]
    want = conv_packed(leaves[0], leaves[1], leaves[2] if bias else None, activation, case[4])
    exact = [want.detach(), *torch.autograd.grad(want, leaves, case[3].double())]
    bar = {FP32: 1e-6, BF16: 4e-3, FP16: 1e-3}[dtype]
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == dtype
        assert _relative(x, y) <= bar
    if dtype != FP32:
        for x, y in zip(got[:2], _run(*case, activation, "cpu"), strict=False):
            # The fast exponential and silu_backward's own freedom: one rounding step, in few elements.
            assert (x.cpu() != y).float().mean() <= (0 if activation is None else 2e-3)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_value_goes_through_silu_as_in_eager(dtype: torch.dtype) -> None:
    codes = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    x = codes[codes.isfinite()].reshape(1, -1, 1).cuda()
    weight = torch.ones(1, 1, dtype=dtype, device="cuda")
    got = ple_gdn.causal_conv1d(x, weight, activation="silu")
    want = torch.nn.functional.silu(x)
    assert int((got != want).sum()) <= (8 if dtype == BF16 else 64)
    assert torch.equal(got, torch.where(got == want, want, torch.nextafter(want, got)))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_documents_have_the_bits_of_the_documents_alone(dtype: torch.dtype) -> None:
    x, weight, bias, dy, boundaries = _case("packed", dtype)
    packed = _run(x, weight, bias, dy, boundaries, "silu")
    for start, stop in itertools.pairwise(boundaries):
        if stop > start:
            alone = _run(x[:, start:stop], weight, bias, dy[:, start:stop], None, "silu")
            assert torch.equal(packed[0][:, start:stop], alone[0])
            assert torch.equal(packed[1][:, start:stop], alone[1])
    assert not packed[0][:, 680:].any()
    assert not packed[1][:, 680:].any()


def test_nan_of_one_document_stays_there() -> None:
    x, weight, bias, dy, boundaries = _case("packed", FP32)
    clean = _run(x, weight, bias, dy, boundaries, "silu")
    for t in (x, dy):
        t[:, 6:300], t[:, 680:] = float("nan"), float("inf")
    dirty = _run(x, weight, bias, dy, boundaries, "silu")
    for a, b in zip(dirty[:2], clean[:2], strict=True):
        assert torch.equal(a[:, :6], b[:, :6])
        assert torch.equal(a[:, 300:], b[:, 300:])


def test_twenty_runs_give_equal_bits() -> None:
    case = _case("long row", BF16)
    first = _run(*case, "silu")
    for _ in range(20):
        poison = torch.full((1 << 22,), float("nan"), device="cuda")
        del poison
        assert all(torch.equal(a, b) for a, b in zip(_run(*case, "silu"), first, strict=True))


def test_layouts_and_expanded_gradients_give_the_same_bits() -> None:
    x, weight, bias, dy, _ = _case("batch", BF16)
    want = _run(x, weight, bias, dy, None, "silu")
    wide = torch.full((3, 333, 61), float("nan"), dtype=BF16, device="cuda")
    wide[..., 5:29] = x
    rows_first = dy.transpose(0, 1).contiguous().transpose(0, 1)
    transposed = [t.mT.contiguous().mT for t in (x, dy)]
    for rows, grad in ((wide[..., 5:29], rows_first), transposed):
        got = _run(rows, weight, bias, grad, None, "silu")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ones = _run(x, weight, bias, torch.ones_like(dy), None, "silu")
    got = _run(x, weight, bias, dy.new_ones(()).expand_as(dy), None, "silu")
    assert all(torch.equal(a, b) for a, b in zip(got, ones, strict=True))


def test_mixed_dtypes_round_through_the_weights_dtype() -> None:
    x, weight, bias, dy, boundaries = _case("packed", FP32)
    for dtypes in itertools.permutations((FP32, BF16, FP16), 2):
        case = (x.to(dtypes[0]), weight.to(dtypes[1]), bias.to(dtypes[1]), dy.to(dtypes[0]), boundaries)
        got, want = _run(*case, "silu"), _run(*case, "silu", "cpu")
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            assert _relative(a.cpu(), b.double()) <= 4e-3


def test_captured_in_a_graph_and_replayed_with_other_boundaries() -> None:
    x, weight, bias, dy, _ = _case("packed", BF16)
    cu = torch.tensor([0, 100, 650, 650], device="cuda")
    call = lambda: (ple_gdn.causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=cu),  # noqa: E731
                    *BACKWARD(dy, x, weight, bias, cu, activation="silu"))  # fmt: skip
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for values in ([0, 100, 650, 650], [0, 1, 1, 700]):
        cu.copy_(torch.tensor(values))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))


def test_no_call_synchronises() -> None:
    case = _case("packed", BF16)
    cu = torch.tensor(case[4], device="cuda")
    leaves = [t.requires_grad_() for t in case[:3]]

    def step() -> None:
        y = ple_gdn.causal_conv1d(*leaves, activation="silu", cu_seqlens=cu)
        torch.autograd.grad(y, leaves, case[3])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_document_and_no_token_give_zero_gradients() -> None:
    x, weight, bias, dy, _ = _case("batch", FP32)
    for got in (
        _run(x[:1], weight, bias, dy[:1], [0], "silu"),
        _run(x[:, :0], weight, bias, dy[:, :0], None, "silu"),
        _run(x[:0], weight, bias, dy[:0], None, None),
    ):
        assert not any(t.any() for t in got)


@pytest.mark.slow
def test_offsets_past_two_to_the_thirty_first() -> None:
    """T D = 2^31 + 2^17: the last 64 rows equal the same rows alone."""
    tokens, width = (1 << 20) + 64, 2048
    x = torch.zeros(1, tokens, width, dtype=BF16, device="cuda")
    dy = torch.zeros_like(x)
    weight = torch.randn(width, 4, device="cuda").to(BF16)
    x[:, -64:], dy[:, -64:] = torch.randn(64, width, device="cuda"), torch.randn(64, width, device="cuda")
    cu = torch.tensor([0, tokens - 64, tokens], device="cuda")
    y = ple_gdn.causal_conv1d(x, weight, activation="silu", cu_seqlens=cu)
    dx = BACKWARD(dy, x, weight, None, cu, activation="silu")[0]
    last = slice(tokens - 64, tokens)
    assert torch.equal(y[:, last], conv_of_the_end(x[:, last], weight))
    alone = BACKWARD(dy[:, last], x[:, last], weight, None, None, activation="silu")
    assert torch.equal(dx[:, last], alone[0])


def conv_of_the_end(x: Tensor, weight: Tensor) -> Tensor:
    y = ple_gdn.causal_conv1d(x, weight, activation="silu")
    assert _relative(y, conv_chain(x.double(), weight.double(), None, "silu")) < 4e-3
    return y


@pytest.mark.parametrize("boundaries", [[0, 20, 10, 40], [1, 40], [0, 41]], ids=["decreasing", "not_from_0", "past_T"])
def test_bad_boundaries_trip_a_device_assert(boundaries: list[int]) -> None:
    code = (
        "import torch, ple_gdn\n"
        "x, w = torch.randn(1, 40, 64, device='cuda'), torch.randn(64, 4, device='cuda')\n"
        f"ple_gdn.causal_conv1d(x, w, cu_seqlens=torch.tensor({boundaries}, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr or "Assertion" in done.stderr + done.stdout
