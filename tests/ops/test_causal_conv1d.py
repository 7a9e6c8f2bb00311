"""`causal_conv1d` and its backward op: bits of eager, packing, layouts, validation, compile."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.utils.checkpoint
from oracles.causal_conv1d import conv_chain, conv_packed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ple_gdn

FORWARD = torch.ops.ple_gdn.causal_conv1d
BACKWARD = torch.ops.ple_gdn.causal_conv1d_backward

# batch, tokens, width, kernel, cu_seqlens
CASES = {
    "batch": (2, 33, 24, 4, None),
    "packed with an empty and a one-token document": (1, 40, 17, 4, [0, 5, 5, 6, 30, 40]),
    "rows after the last document": (1, 20, 8, 3, [0, 2, 13]),
    "every row its own document": (1, 9, 8, 4, list(range(10))),
    "fewer tokens than taps": (2, 2, 8, 4, None),
    "one tap": (1, 7, 8, 1, None),
    "wide kernel": (1, 50, 5, 11, [0, 3, 50]),
}


def _case(name: str, dtype: torch.dtype = torch.float32, bias: bool = True):
    batch, tokens, width, kernel, cu_seqlens = CASES[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, width), (width, kernel), (width,), (batch, tokens, width)]
    x, weight, offset, dy = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return x, weight * kernel**-0.5, offset if bias else None, dy, cu_seqlens


def _run(x, weight, bias, dy, cu_seqlens, activation, function=None) -> tuple[Tensor, ...]:
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    if function is None:
        packing = None if cu_seqlens is None else torch.tensor(cu_seqlens)
        y = ple_gdn.causal_conv1d(*leaves, activation=activation, cu_seqlens=packing)
    else:
        y = function(*leaves, activation, cu_seqlens)
    return (y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy))


def _oracle(x, weight, bias, dy, cu_seqlens, activation, dtype=torch.float64) -> tuple[Tensor, ...]:
    tensors = [t if t is None else t.to(dtype) for t in (x, weight, bias, dy)]
    return _run(*tensors, cu_seqlens, activation, conv_packed)


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_float64(name, dtype, bar, bias, activation):
    case = _case(name, dtype, bias)
    for x, y in zip(_run(*case, activation), _oracle(*case, activation), strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert _relative(x, y) <= bar


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_low_precision_has_the_bits_of_eager_per_document(name, dtype, bias, activation):
    """Output and dx bitwise; weight gradients at least as close to float64 as eager's, which sums rounded documents."""
    case = _case(name, dtype, bias)
    got, eager = _run(*case, activation), _oracle(*case, activation, dtype)
    exact = _oracle(*case, activation)
    assert torch.equal(got[0], eager[0])
    assert torch.equal(got[1], eager[1])
    for x, e, y in zip(got[2:], eager[2:], exact[2:], strict=True):
        assert x.dtype == dtype
        assert _relative(x, y) <= max(1.05 * _relative(e, y), torch.finfo(dtype).eps)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_goes_through_silu_as_in_eager(dtype, activation):
    codes = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    # Normal values: oneDNN's convolution flushes bf16 subnormals to zero.
    x = codes[codes.isfinite() & (codes.abs() >= torch.finfo(dtype).tiny)].reshape(1, -1, 1)
    weight = torch.ones(1, 1, dtype=dtype)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = _run(x, weight, None, dy, None, activation)
    want = _run(x, weight, None, dy, None, activation, lambda x, w, b, a, _: conv_chain(x, w, b, a))
    assert torch.equal(got[0], want[0])
    differing = int(((got[1] != want[1]) & ~(got[1].isnan() & want[1].isnan())).sum())
    # Eager's vector body contracts silu_backward: up to 2 of 65,000 results move by one rounding step.
    assert differing <= 8


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), list(itertools.permutations([torch.float32, torch.bfloat16, torch.float16], 2))
)
def test_mixed_dtypes_round_through_the_weights_dtype_as_eager_does(x_dtype, weight_dtype):
    x, weight, bias, dy, _ = _case("batch")
    case = (x.to(x_dtype), weight.to(weight_dtype), bias.to(weight_dtype), dy.to(x_dtype), None, "silu")
    got, want = _run(*case), _run(*case, conv_packed)
    assert [g.dtype for g in got] == [x_dtype, x_dtype, weight_dtype, weight_dtype]
    for x, y in zip(got, want, strict=True):
        assert _relative(x, y) <= (1e-6 if x.dtype == weight_dtype == torch.float32 else 4e-3)
    if weight_dtype != torch.float32:
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_equal_each_document_alone_bitwise(dtype, activation):
    x, weight, bias, dy, cu_seqlens = _case("packed with an empty and a one-token document", dtype)
    packed = _run(x, weight, bias, dy, cu_seqlens, activation)
    for start, stop in itertools.pairwise(cu_seqlens):
        alone = _run(x[:, start:stop], weight, bias, dy[:, start:stop], None, activation)
        assert torch.equal(packed[0][:, start:stop], alone[0])
        assert torch.equal(packed[1][:, start:stop], alone[1])


def test_documents_and_tail_rows_never_read_each_others_nan():
    x, weight, bias, dy, _ = _case("batch")
    x, dy, cu_seqlens = x[:1], dy[:1], [0, 3, 7, 30]
    clean = _run(x, weight, bias, dy, cu_seqlens, "silu")
    spoiled, dirty = x.clone(), dy.clone()
    for t in (spoiled, dirty):
        t[:, 3:7], t[:, 30:] = float("nan"), float("nan")
    for got, want in zip(_run(spoiled, weight, bias, dirty, cu_seqlens, "silu")[:2], clean, strict=False):
        assert torch.equal(got[:, :3], want[:, :3])
        assert torch.equal(got[:, 7:], want[:, 7:])
        assert (got[:, 30:] == 0).all()
    spoiled, dirty = x.clone(), dy.clone()
    spoiled[:, 30:], dirty[:, 30:] = float("nan"), float("nan")
    got = _run(spoiled, weight, bias, dirty, cu_seqlens, "silu")
    assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))


def test_no_document_and_no_token_give_zero_gradients():
    x, weight, bias, dy, _ = _case("batch")
    for got in (
        _run(x[:1], weight, bias, dy[:1], [0], "silu"),
        _run(x[:, :0], weight, bias, dy[:, :0], None, "silu"),
        _run(x[:0], weight, bias, dy[:0], None, None),
    ):
        assert all((g == 0).all() for g in got)


def test_every_layout_of_input_and_upstream_gradient_gives_the_same_bits():
    x, weight, bias, dy, _ = _case("batch")
    contiguous = _run(x, weight, bias, dy, None, "silu")
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy)]
    wide = torch.full((2, 33, 60), float("nan"))
    wide[..., 7:31] = x
    every_other = torch.full((24, 8), float("nan"))
    every_other[:, ::2] = weight
    for rows, taps, grad in ((transposed[0], weight, transposed[1]), (wide[..., 7:31], every_other[:, ::2], dy)):
        leaves = [t.detach().requires_grad_() for t in (rows, taps, bias)]
        y = ple_gdn.causal_conv1d(*leaves, activation="silu")
        got = (y, *torch.autograd.grad(y, leaves, grad))
        assert all(torch.equal(a, b) for a, b in zip(got, contiguous, strict=True))
    ones = _run(x, weight, bias, torch.ones_like(dy), None, "silu")
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    ple_gdn.causal_conv1d(*leaves, activation="silu").sum().backward()  # a gradient of strides (0, 0, 0)
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, ones[1:], strict=True))
    outputs = [ple_gdn.causal_conv1d(*leaves, activation="silu") for _ in range(3)]
    grads = torch.autograd.grad(torch.cat(outputs, -1)[..., 24:48], leaves, dy)  # gradient is a slice of a wider one
    assert all(torch.equal(a, b) for a, b in zip(grads, contiguous[1:], strict=True))


def test_cu_seqlens_of_any_integer_dtype_stride_or_packing_agree():
    x, weight, bias, _, cu_seqlens = _case("packed with an empty and a one-token document")
    plain = torch.tensor(cu_seqlens)
    wide = torch.stack([plain, plain + 99], 1).flatten()
    want = ple_gdn.causal_conv1d(x, weight, bias, cu_seqlens=plain)
    for packing in (plain.int(), wide[::2], wide.int()[::2], ple_gdn.prepare_varlen(plain)):
        assert torch.equal(ple_gdn.causal_conv1d(x, weight, bias, cu_seqlens=packing), want)


def test_double_backward_is_refused():
    x, weight, bias, _, _ = _case("batch")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ple_gdn.causal_conv1d(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_conv1d_backward"):
        grad.sum().backward()


def _opcheck_cases():
    x, weight, bias, dy, cu_seqlens = _case("rows after the last document")
    yield "packed", (x, weight, bias, torch.tensor(cu_seqlens)), dy, "silu"
    x, weight, bias, dy, _ = _case("batch", bias=False)
    yield "no bias", (x, weight, None, None), dy, None
    yield "transposed", (x.transpose(1, 2).contiguous().transpose(1, 2), weight, None, None), dy, "silu"
    yield "expanded", (x[:1].expand(2, -1, -1), weight, None, None), dy, "silu"
    yield "one token, one tap", (x[:, :1], weight[:, :1], None, None), dy[:, :1], None
    yield "mixed", (x.bfloat16(), weight, None, None), dy.bfloat16(), "silu"
    yield "empty", (x[:, :0], weight, None, None), dy[:, :0], "silu"


@pytest.mark.parametrize("case", list(_opcheck_cases()), ids=lambda case: case[0])
def test_opcheck_passes_for_both_ops(case):
    _, tensors, dy, activation = case
    leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    torch.library.opcheck(FORWARD.default, tuple(leaves), {"activation": activation})
    torch.library.opcheck(BACKWARD.default, (dy, *tensors), {"activation": activation})


def test_outputs_never_alias_inputs_or_each_other():
    x, weight, bias, dy, _ = _case("one tap")
    y = FORWARD(x, weight, bias)
    grads = BACKWARD(dy, x, weight, bias)
    pointers = [t.untyped_storage().data_ptr() for t in (x, weight, bias, dy, y, *grads)]
    assert len(set(pointers)) == len(pointers)


def _loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ple_gdn.causal_conv1d(x, weight, bias, activation="silu").square().sum()


def test_compiles_in_one_graph_for_every_length():
    torch._dynamo.reset()
    compiles = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, backend=compiles, fullgraph=True)
    for tokens in (19, 33, 50, 2):
        tensors = [torch.randn(2, tokens, 8), torch.randn(8, 4), torch.randn(8)]
        torch._dynamo.mark_dynamic(tensors[0], 1)
        leaves = [t.requires_grad_() for t in tensors]
        want = torch.autograd.grad(_loss(*leaves), leaves)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True))
    assert compiles.frame_count == 1


def test_autocast_changes_nothing_eager_or_compiled():
    torch._dynamo.reset()
    weight, bias = torch.randn(8, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    rows, projection = torch.randn(2, 9, 6), torch.randn(8, 6, requires_grad=True)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.nn.functional.linear(rows, projection)
            assert x.dtype == torch.bfloat16
            return ple_gdn.causal_conv1d(x, weight, bias, activation="silu").float().square().sum()

    leaves = [projection, weight, bias]
    want = torch.autograd.grad(loss(), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(), leaves)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(got, want, strict=True))


BAD = {
    "x": [
        (lambda x: x[0], ValueError, "x: expected 3 dimensions"),
        (lambda x: x.int(), TypeError, "x: expected dtype"),
        (lambda x: x.double(), TypeError, "weight: expected dtype float64"),
        (lambda x: None, TypeError, "x: expected a torch.Tensor, got NoneType"),
    ],
    "weight": [
        (lambda w: w[:-1], ValueError, "weight: expected shape"),
        (lambda w: w.unsqueeze(1), ValueError, "weight: expected 2 dimensions"),
        (lambda w: w[:, :0], ValueError, "weight: expected at least one tap"),
        (lambda w: w.to("meta"), ValueError, "weight: expected device cpu"),
        (lambda w: w.long(), TypeError, "weight: expected dtype"),
    ],
    "bias": [
        (lambda b: b[1:], ValueError, "bias: expected shape"),
        (lambda b: b.bfloat16(), TypeError, "bias: expected dtype float32"),
        (lambda b: 1.0, TypeError, "bias: expected a torch.Tensor, got float"),
    ],
    "activation": [
        (lambda _: "swish", ValueError, "activation: expected None or 'silu', got 'swish'"),
        (lambda _: "relu", ValueError, "activation: expected None or 'silu', got 'relu'"),
    ],
    "cp": [(lambda _: object(), TypeError, "cp: expected a KcpContext")],
    "cu_seqlens": [
        (lambda _: torch.tensor([0, 4, 3, 6]), ValueError, "cu_seqlens: expected non-decreasing"),
        (lambda _: torch.tensor([1, 6]), ValueError, "cu_seqlens: expected the first entry to be 0"),
        (lambda _: torch.tensor([0, 8]), ValueError, "cu_seqlens: expected the last entry to be at most T = 7"),
        (lambda _: torch.tensor([0.0, 6.0]), TypeError, "cu_seqlens: expected dtype"),
        (lambda _: torch.tensor([[0, 6]]), ValueError, "cu_seqlens: expected 1 dimensions"),
        (lambda _: [0, 6], TypeError, "cu_seqlens: expected a torch.Tensor"),
    ],
}


@pytest.mark.parametrize(("name", "entry"), [(name, entry) for name, entries in BAD.items() for entry in entries])
def test_bad_input_is_named_before_anything_is_computed(name, entry):
    spoil, error, message = entry
    x, weight, bias, _, _ = _case("one tap")
    arguments = {"x": x, "weight": weight, "bias": bias}
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(error, match=message):
        ple_gdn.causal_conv1d(**arguments)


def test_packing_refuses_batches_and_backward_checks_the_upstream_gradient():
    x, weight, bias, dy, _ = _case("batch")
    with pytest.raises(ValueError, match="cu_seqlens: expected inputs with batch size 1"):
        ple_gdn.causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="dy: expected shape"):
        BACKWARD(dy[:, 1:], x, weight, bias)
    with pytest.raises(TypeError, match="dy: expected dtype float32"):
        BACKWARD(dy.bfloat16(), x, weight, bias)


def test_inside_a_checkpoint_the_gradients_are_the_same():
    x, weight = torch.randn(1, 9, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return ple_gdn.causal_conv1d(x, weight, activation="silu")

    plain = torch.autograd.grad(step(x, weight).sum(), (x, weight))
    again = torch.utils.checkpoint.checkpoint(step, x, weight, use_reentrant=False)
    for actual, expected in zip(torch.autograd.grad(again.sum(), (x, weight)), plain, strict=True):
        assert torch.equal(actual, expected)
