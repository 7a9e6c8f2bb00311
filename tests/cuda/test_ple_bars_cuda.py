"""PLE's bars at real width on CUDA: the torch chain, memory at 262,144 tokens, small budgets, chunked token sums."""

from __future__ import annotations

import pytest
import torch
from oracles.ple import TENSORS, ple_chain, ple_inputs
from oracles.scripts import load_script
from torch import Tensor
from torch._inductor import config as inductor_config

import ple_gdn

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
FP32, BF16 = torch.float32, torch.bfloat16
STREAMS, CHANNELS, KERNEL, DILATION = 4, 2560, 4, 3
# A published figure for the weight reduction of a [4096, 512] norm under 128 KiB.
PUBLISHED_BYTES = 90_112
BUDGET = {"workspace_bytes": 131_072}


def _case(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    inputs = [x.to(DEVICE) for x in ple_inputs(1, tokens, STREAMS, CHANNELS, KERNEL, dtypes=dtype, seed=7)]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(8)).to(dtype).to(DEVICE)
    return inputs, dout


def _results(chain, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = chain(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _ours(inputs: list[Tensor], dout: Tensor, **options) -> list[Tensor]:
    return _results(lambda *x: ple_gdn.ple_gate_conv(*x, dilation=DILATION, **options), inputs, dout)


def _requested(which: str) -> int:
    """Bytes asked of the caching allocator, as asked: its blocks can be up to 1 MiB larger."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def test_output_and_gradients_at_1024_rows_are_within_the_bar_of_the_torch_chain() -> None:
    """Every element within 2e-3 + 1e-2 |x| of the chain in fp32, the seven inputs being bf16.

    The chain in bf16 is no measure: it rounds the score, so its own dq, dk and their weights are off by 100 % and
    more at scores near 0 (CPU, these inputs), and 2 % of its output is outside of the bar.
    """
    inputs, dout = _case(1024, BF16)
    got = _ours(inputs, dout)
    with torch.backends.cudnn.flags(enabled=False):  # no TF32
        want = _results(lambda *x: ple_chain(*x, dilation=DILATION), [x.float() for x in inputs], dout.float())
    for name, x, y in zip(("out", *TENSORS), got, want, strict=True):
        assert x.dtype == BF16
        torch.testing.assert_close(x.float(), y, atol=2e-3, rtol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("tokens", [8192, 262_144])
def test_memory_is_within_the_bar_and_the_last_rows_have_the_bits_they_have_alone(tokens: int) -> None:
    """W = 10,240: at 262,144 rows the offsets pass 2^31 as well."""
    facts = load_script("benchmarks/bench_ple.py").memory(tokens)
    torch.cuda.empty_cache()
    assert facts["kept_bytes"] <= facts["kept_bound"] == 64 * tokens * STREAMS
    assert facts["peak_bytes"] <= facts["peak_bound"] == (64 << 20) + 64 * tokens * STREAMS
    assert facts["last_64_rows_equal_alone"]


@pytest.mark.parametrize("budget", [1 << 20, 8 << 20])
def test_smaller_budgets_are_kept_and_change_only_the_order_of_weight_sums(budget: int) -> None:
    """Scalars take 4 bytes per token and stream: 20 of the forward, 8 of a and gate, 80 of the row sums in 10 tiles."""
    tokens = 4096
    inputs, dout = _case(tokens, BF16)
    first = _ours(inputs, dout)
    torch.cuda.synchronize()
    before = _requested("current")
    torch.cuda.reset_peak_memory_stats()
    got = _ours(inputs, dout, workspace_bytes=budget)
    extra = _requested("peak") - before - sum(x.nbytes for x in got)
    assert extra <= budget + tokens * STREAMS * (20 + 8 + 8 * -(-CHANNELS // 256))
    for x, y in zip(got[:4], first[:4], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(got[4:], first[4:], strict=True):
        torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_twenty_runs_of_packed_and_masked_rows_with_the_residual_give_equal_bits(dtype: torch.dtype) -> None:
    inputs, dout = _case(1500, dtype)
    cu = torch.tensor([0, 1, 1, 700, 1400], device=DEVICE)
    mask = torch.arange(1500, device=DEVICE)[None] % 5 != 2
    op = torch.ops.ple_gdn.ple_gate_conv

    def run() -> list[Tensor]:
        return _results(lambda *x: op(*x, cu, mask, dilation=DILATION, residual=True)[0], inputs, dout)

    first = run()
    for _ in range(20):
        poison = torch.full((1 << 24,), float("nan"), device=DEVICE)
        del poison
        assert all(torch.equal(x, y) for x, y in zip(run(), first, strict=True))


def test_a_graph_of_forward_and_backward_at_real_width_replays_on_new_values() -> None:
    inputs, dout = _case(512, BF16)
    _ours(inputs, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _ours(inputs, dout)
    with torch.no_grad():
        for x in (*inputs, dout):
            x.copy_(x.flip(*range(x.dim())))
    graph.replay()
    for x, y in zip(captured, _ours(inputs, dout), strict=True):
        assert torch.equal(x, y)


def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Two weights over one long chain: Inductor stores operands of their sums over tokens, the pass loops instead."""
    h = x * w + b
    return (torch.nn.functional.silu(h) * torch.nn.functional.gelu(h, approximate="tanh")).square().sum()


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A norm's weight: Inductor computes the product inside of the reduction, and the pass leaves it alone."""
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)).sin().sum() + b.sum()


def _backward(chain, backend: str, x: Tensor, weights: list[Tensor], options: dict | None) -> tuple[list[Tensor], int]:
    """Gradients of a compiled chain and the peak of its backward beyond them."""
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(chain, backend=backend, options=options, fullgraph=True)
        torch.autograd.grad(compiled(x, *weights), weights)
        loss = compiled(x, *weights)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(loss, weights)
    return list(grads), torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)


@pytest.mark.parametrize(("chain", "loops"), [(affine, 1), (norm, 0)], ids=["looped", "inside_the_reduction"])
def test_the_weight_reduction_of_the_published_shape_stays_within_its_bytes(chain, loops: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 512, generator=generator).to(DEVICE)
    weights = [torch.randn(512, generator=generator).to(DEVICE).requires_grad_() for _ in range(2)]
    grads, extra = _backward(chain, "ple_gdn", x, weights, BUDGET)
    rewrites = [r for r in ple_gdn.last_report().rewrites if r.pass_name == "chunk_token_sums"]
    assert len(rewrites) == loops
    double = [w.detach().double().requires_grad_() for w in weights]
    want = torch.autograd.grad(chain(x.double(), *double), double)
    for got, y in zip(grads, want, strict=True):
        assert (got - y).norm() <= 1e-5 * y.norm()
    assert extra <= PUBLISHED_BYTES
    plain, stored = _backward(chain, "inductor", x, weights, None)
    assert loops == 0 or stored >= x.nbytes
    for got, y in zip(grads, plain, strict=True):
        assert (got - y).norm() <= 1e-5 * y.norm()
