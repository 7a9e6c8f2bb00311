"""Gated residual ops: bits of eager, shapes, dtypes, strides, compile, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles import gated_residual as oracle
from oracles.gated_residual import all_codes, mismatches

import ple_gdn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW = (torch.bfloat16, torch.float16)
OPS = torch.ops.ple_gdn


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + shape[-1])
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def cases(rows: tuple[int, ...], streams: int, width: int, dtypes: tuple) -> dict:
    a, b, c = dtypes
    return {
        "down": (ple_gdn.gated_residual_down, oracle.down, (rand(*rows, 5 * width, dtype=a, seed=1), streams)),
        "mix": (
            ple_gdn.gated_residual_mix,
            oracle.mix,
            (rand(*rows, streams * width, dtype=a, seed=2), rand(*rows, streams * width, dtype=b, seed=3), streams),
        ),
        "inject": (
            ple_gdn.gated_residual_inject,
            oracle.inject,
            (
                rand(*rows, width, dtype=a, seed=4),
                rand(*rows, streams * width, dtype=b, seed=5),
                rand(*rows, streams, dtype=c, seed=6),
            ),
        ),
    }


def check_bits(front, eager, args: tuple, dy: torch.Tensor | None = None) -> None:
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    actual, expected = front(*args), eager(*args)
    assert actual.is_contiguous()
    assert mismatches(actual, expected) == 0
    dy = torch.randn(expected.shape).to(expected.dtype) if dy is None else dy
    pairs = zip(torch.autograd.grad(actual, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True)
    for (ours, theirs), leaf in zip(pairs, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert mismatches(ours, theirs) == 0


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
@pytest.mark.parametrize("streams", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_have_the_bits_of_eager(op, streams, dtype):
    for rows, width in itertools.product([(1,), (17,), (2, 9), ()], [64, 96]):
        check_bits(*cases(rows, streams, width, (dtype,) * 3)[op])


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
@pytest.mark.parametrize("dtype", LOW)
def test_wide_rows_have_the_bits_of_eager(op, dtype):
    check_bits(*cases((257,), 4, 2560, (dtype,) * 3)[op])


@pytest.mark.parametrize("op", ["mix", "inject"])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)))
def test_mixed_dtypes_promote_as_eager_and_each_gradient_has_its_inputs_dtype(op, dtypes):
    check_bits(*cases((17,), 4, 96, dtypes)[op])


@pytest.mark.parametrize("dtype", LOW)
def test_every_16_bit_code_has_the_bits_of_eager(dtype):
    codes = all_codes(dtype).reshape(64, 1024)
    other = torch.randn(64, 1024).to(dtype).requires_grad_()
    leaf = codes.clone().requires_grad_()
    for streams in (2, 3, 4, 8):
        check_bits(ple_gdn.gated_residual_down, oracle.down, (leaf, streams))
    check_bits(ple_gdn.gated_residual_mix, oracle.mix, (leaf, other, 4))
    check_bits(ple_gdn.gated_residual_mix, oracle.mix, (other, leaf, 4))
    weights = torch.randn(64, 4).to(dtype).requires_grad_()
    check_bits(ple_gdn.gated_residual_inject, oracle.inject, (other[:, :256], leaf, weights))
    check_bits(ple_gdn.gated_residual_inject, oracle.inject, (leaf[:, :256], other, weights))


def test_the_stream_mean_accumulates_in_fp32():
    up = torch.full((1, 4), 40.0, dtype=torch.bfloat16)
    normed = torch.tensor([[256.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    assert ple_gdn.gated_residual_mix(up, normed, 4).item() == 65.0


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
def test_strided_inputs_and_expanded_gradients_have_the_bits_of_eager(op):
    front, eager, args = cases((17,), 4, 96, (torch.bfloat16,) * 3)[op]
    strided = tuple(
        a.detach().t().contiguous().t().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args
    )
    shape = eager(*args).shape
    check_bits(front, eager, strided)
    check_bits(front, eager, args, torch.tensor(1.5, dtype=torch.bfloat16).expand(shape))
    check_bits(front, eager, args, torch.randn(17, dtype=torch.float32).bfloat16().unsqueeze(-1).expand(shape))


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
def test_no_rows_give_empty_outputs_and_gradients(op):
    check_bits(*cases((0,), 4, 96, (torch.bfloat16,) * 3)[op])


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
def test_autocast_does_not_change_what_an_op_computes(op):
    front, _, args = cases((17,), 4, 96, (torch.bfloat16, torch.float32, torch.float32))[op]
    plain = front(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert mismatches(front(*args), plain) == 0


def test_an_injection_with_a_frozen_block_still_passes_the_residual_gradient():
    _, _, (hidden, hyper_input, weights) = cases((17,), 4, 96, (torch.bfloat16,) * 3)["inject"]
    y = ple_gdn.gated_residual_inject(hidden.detach(), hyper_input, weights.detach())
    dy = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, hyper_input, dy)
    assert mismatches(grad, dy) == 0


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
def test_double_backward_raises(op):
    front, _, args = cases((3,), 4, 8, (torch.float32,) * 3)[op]
    leaf = args[0]
    (grad,) = torch.autograd.grad(front(*args).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def opcheck_samples() -> list[tuple]:
    samples = []
    for rows, dtypes in [((5,), (torch.bfloat16,) * 3), ((2, 3), (torch.bfloat16, torch.float32, torch.float16))]:
        table = cases(rows, 4, 16, dtypes)
        for name in ("down", "mix", "inject"):
            _, eager, args = table[name]
            samples.append((getattr(OPS, f"gated_residual_{name}").default, args))
            dy = torch.randn_like(eager(*args))
            saved = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
            if name == "inject":
                saved.pop(1)
            samples.append((getattr(OPS, f"gated_residual_{name}_backward").default, (dy, *saved)))
    up = rand(16, 6).detach()
    samples.append((OPS.gated_residual_mix.default, (up.t(), up.t()[:, :1].expand(6, 16), 4)))
    samples.append((OPS.gated_residual_down.default, (rand(0, 8), 4)))
    return samples


@pytest.mark.parametrize("sample", opcheck_samples(), ids=lambda s: s[0]._opname)
def test_opcheck(sample):
    torch.library.opcheck(*sample)


@pytest.mark.parametrize("op", ["down", "mix", "inject"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph_with_the_same_bits(op, dynamic):
    front, eager, args = cases((9,), 4, 32, (torch.bfloat16,) * 3)[op]
    torch._dynamo.reset()
    check_bits(torch.compile(front, backend="aot_eager", fullgraph=True, dynamic=dynamic), eager, args)


BF16 = torch.bfloat16
BAD = [
    ("down", (torch.zeros(2, 8), 1), ValueError, "streams: expected at least 2"),
    ("down", (torch.zeros(2, 8), 0), ValueError, "streams: expected at least 2"),
    ("down", (torch.zeros(2, 8), 2**70), ValueError, "streams: expected an int of 64 bits"),
    ("down", (torch.zeros(2, 8), 4.0), TypeError, "streams: expected an int, got float"),
    ("down", (torch.zeros(()), 4), ValueError, "x: expected at least 1 dimension"),
    ("down", (torch.zeros(2, 8, dtype=torch.int64), 4), TypeError, "x: expected dtype"),
    ("down", (torch.zeros(2, 8, dtype=torch.float64), 4), TypeError, "x: expected dtype"),
    ("down", ([1.0], 4), TypeError, "x: expected a torch.Tensor"),
    ("mix", (torch.zeros(2, 8), torch.zeros(2, 8), 1), ValueError, "streams: expected at least 2"),
    ("mix", (torch.zeros(2, 8), torch.zeros(2, 8), 3), ValueError, "divisible by streams=3, got 8"),
    ("mix", (torch.zeros(2, 8), torch.zeros(3, 8), 4), ValueError, "normed: expected shape"),
    ("mix", (torch.zeros(2, 8), torch.zeros(2, 8, device="meta"), 4), ValueError, "normed: expected device"),
    ("mix", (torch.zeros(2, 8), torch.zeros(2, 8).bool(), 4), TypeError, "normed: expected dtype"),
    ("inject", (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 1)), ValueError, "at least 2 residual streams"),
    ("inject", (torch.zeros(2, 8), torch.zeros(2, 31), torch.zeros(2, 4)), ValueError, "hyper_input: expected shape"),
    ("inject", (torch.zeros(2, 8), torch.zeros(2, 32), torch.zeros(3, 4)), ValueError, "weights: expected shape"),
    ("inject", (torch.zeros(2, 8), torch.zeros(32), torch.zeros(2, 4)), ValueError, "hyper_input: expected shape"),
    ("inject", (torch.zeros(2, 8), None, torch.zeros(2, 4)), TypeError, "hyper_input: expected a torch.Tensor"),
]


@pytest.mark.parametrize(("op", "args", "error", "message"), BAD)
def test_bad_input_is_named(op, args, error, message):
    with pytest.raises(error, match=message):
        getattr(ple_gdn, f"gated_residual_{op}")(*args)


@pytest.mark.parametrize(
    ("op", "args", "error", "message"),
    [
        ("down", (torch.zeros(2, 7), torch.zeros(2, 8), 4), ValueError, "dy: expected shape"),
        ("down", (torch.zeros(2, 8, dtype=BF16), torch.zeros(2, 8), 4), TypeError, "dy: expected dtype float32"),
        ("mix", (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 8), 4), ValueError, "dy: expected shape"),
        ("inject", (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 4)), ValueError, "dy: expected shape"),
    ],
)
def test_bad_gradient_is_named(op, args, error, message):
    with pytest.raises(error, match=message):
        getattr(OPS, f"gated_residual_{op}_backward")(*args)
