"""`ple_gate_conv` and its backward op: values, gradients, memory, packing, validation, compile."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.allocations import peak_bytes
from oracles.ple import TENSORS, ple_chain, ple_inputs, ple_packed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ple_gdn
from ple_gdn.ops.ple.chunking import backward_chunk_rows

FORWARD = torch.ops.ple_gdn.ple_gate_conv
BACKWARD = torch.ops.ple_gdn.ple_gate_conv_backward

# batch, tokens, streams, channels, kernel, dilation, cu_seqlens, masked
CASES = {
    "published shape, small": (1, 37, 4, 16, 4, 3, None, False),
    "packed with an empty and a one-token document": (1, 70, 4, 10, 4, 3, [0, 5, 5, 6, 40, 70], True),
    "rows after the last document": (1, 48, 2, 24, 4, 3, [0, 3, 7, 30], True),
    "no document at all": (1, 6, 2, 8, 4, 3, [0], False),
    "batch rows with a mask": (3, 21, 3, 8, 5, 2, None, True),
    "one tap": (2, 9, 3, 8, 1, 2, None, False),
    "eight taps, every row its own document": (1, 12, 3, 8, 8, 2, list(range(13)), False),
    "fewer tokens than the halo": (2, 3, 2, 160, 4, 3, None, False),
    "one token": (1, 1, 4, 8, 4, 3, None, False),
    "three channels": (1, 20, 5, 3, 2, 1, None, False),
}


def _case(name: str, dtypes=torch.float32):
    batch, tokens, streams, channels, kernel, dilation, cu_seqlens, masked = CASES[name]
    tensors = ple_inputs(batch, tokens, streams, channels, kernel, dtypes=dtypes)
    with torch.no_grad():
        tensors[0][:, tokens // 2] = 0  # a row whose score is exactly 0
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch, tokens, generator=generator) > 0.2 if masked else None
    dout = torch.randn(tensors[0].shape, generator=generator).to(tensors[0].dtype)
    options = {"dilation": dilation, "conv_mask": mask}
    return tensors, cu_seqlens, options, dout


def _run(tensors, cu_seqlens, options, dout, **extra) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    packing = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    out = ple_gdn.ple_gate_conv(*leaves, cu_seqlens=packing, **options, **extra)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def _oracle(tensors, cu_seqlens, options, dout, dtype=torch.float64) -> tuple[Tensor, ...]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = ple_packed(leaves, cu_seqlens, **options)
    if not out.requires_grad:
        return (out, *(torch.zeros_like(x) for x in leaves))
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype)))


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("name", CASES)
def test_output_and_all_seven_gradients_match_float64(name, dtype, bar):
    case = _case(name, dtype)
    got, want = _run(*case), _oracle(*case)
    for label, x, y, leaf in zip(("out", *TENSORS), got, want, (case[0][0], *case[0]), strict=True):
        assert x.dtype == leaf.dtype, label
        assert x.is_contiguous(), label
        assert _relative(x, y) <= bar or ((x == 0).all() and (y == 0).all()), (label, _relative(x, y))


def test_bf16_stays_within_the_published_tolerance_of_the_chain():
    tensors = ple_inputs(2, 64, 4, 64, 4, dtypes=torch.bfloat16)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"dilation": 3, "conv_mask": None}
    got = _run(tensors, None, options, dout)
    want = _oracle(tensors, None, options, dout, torch.float32)
    for label, x, y in zip(("out", *TENSORS), got, want, strict=True):
        torch.testing.assert_close(x.float(), y, atol=2e-3, rtol=1e-2, msg=lambda m, label=label: f"{label}: {m}")


def test_bf16_is_closer_to_float64_than_the_rounded_eager_chain():
    tensors = ple_inputs(1, 128, 4, 64, 4, dtypes=torch.bfloat16)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"dilation": 3, "conv_mask": None}
    exact = _oracle(tensors, None, options, dout)
    eager = _oracle(tensors, None, options, dout, torch.bfloat16)
    for label, x, e, y in zip(("out", *TENSORS), _run(tensors, None, options, dout), eager, exact, strict=True):
        assert _relative(x, y) <= _relative(e, y), label


def test_mixed_dtypes_keep_each_argument_its_own():
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.bfloat16, torch.float32, torch.float16)
    tensors = ple_inputs(2, 19, 4, 12, 4, dtypes=dtypes)
    options = {"dilation": 3, "conv_mask": None}
    dout = torch.randn(tensors[0].shape).bfloat16()
    got, want = _run(tensors, None, options, dout), _oracle(tensors, None, options, dout)
    for x, y, leaf in zip(got, want, (tensors[0], *tensors), strict=True):
        assert x.dtype == leaf.dtype
        assert _relative(x, y) <= 4e-3


@pytest.mark.parametrize("mask", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_conv_mask_of_any_dtype_is_multiplied_and_gets_no_gradient(mask):
    tensors = ple_inputs(2, 11, 2, 8, 4, requires_grad=True)
    rows = (torch.arange(22).view(2, 11) % 3).to(mask)  # 0, 1 and 2 where the dtype has a 2
    if mask.is_floating_point:
        rows.requires_grad_()
    out = ple_gdn.ple_gate_conv(*tensors, dilation=3, conv_mask=rows)
    want = ple_chain(*tensors, dilation=3, conv_mask=rows.detach())
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert rows.grad is None


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e-5])
def test_gate_at_and_below_the_clamp_follows_eager(scale):
    """Score 0: gate 1/2, gradient 0. Below 1e-6: gate sigmoid(+-0.001), gradient 0. Above: eager's slope."""
    tensors = ple_inputs(1, 5, 2, 4, 1, dtypes=torch.float64)
    tensors[0][:] = 1.0
    tensors[1][:] = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat(2)
    tensors[1][:, 1::2, 0] += scale
    tensors[1][:, 2::2, 0] -= scale
    for weight in tensors[3:6]:
        weight.zero_()
    for dtype in (torch.float32, torch.float64):
        case = (
            [x.to(dtype) for x in tensors],
            None,
            {"dilation": 1, "conv_mask": None},
            torch.ones_like(tensors[0], dtype=dtype),
        )
        got, want = _run(*case), _oracle(*case)
        assert torch.isfinite(torch.cat([x.flatten() for x in got])).all()
        for label, x, y in zip(("out", *TENSORS), got, want, strict=True):
            torch.testing.assert_close(x.double(), y, atol=1e-6 * float(y.abs().max()), rtol=1e-5, msg=label)
        if scale < 1e-6:
            assert (got[1] == 0).all()
            assert (got[2] == 0).all()


def test_zero_rows_and_large_half_precision_rows_stay_finite():
    tensors = ple_inputs(1, 8, 4, 64, 4, dtypes=torch.float16)
    tensors[0][:, 1], tensors[1][:, 2] = 0, 0
    tensors[0][:, 3], tensors[1][:, 3], tensors[2][:, 3] = 6e4, -6e4, 6e4  # the square overflows float16
    got = _run(tensors, None, {"dilation": 3, "conv_mask": None}, torch.ones_like(tensors[0]))
    for label, x in zip(("out", *TENSORS[:2]), got, strict=False):
        assert torch.isfinite(x).all(), label


@pytest.mark.parametrize("budget", [1, 3_000, 20_000, 200_000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_equal_each_document_alone_bitwise(budget, dtype):
    tensors, cu_seqlens, options, dout = _case("packed with an empty and a one-token document", dtype)
    packed = _run(tensors, cu_seqlens, options, dout, workspace_bytes=budget)
    for start, stop in itertools.pairwise(cu_seqlens):
        rows = [x[:, start:stop] for x in tensors[:3]] + tensors[3:]
        alone = _run(rows, None, options | {"conv_mask": options["conv_mask"][:, start:stop]}, dout[:, start:stop])
        for label, x, y in zip(("out", *TENSORS[:3]), packed, alone, strict=False):
            assert torch.equal(x[:, start:stop], y), (label, start, stop)


def test_batch_rows_equal_each_row_alone_bitwise():
    tensors, _, options, dout = _case("batch rows with a mask")
    together = _run(tensors, None, options, dout)
    for b in range(3):
        rows = [x[b : b + 1] for x in tensors[:3]] + tensors[3:]
        alone = _run(rows, None, options | {"conv_mask": options["conv_mask"][b : b + 1]}, dout[b : b + 1])
        for label, x, y in zip(("out", *TENSORS[:3]), together, alone, strict=False):
            assert torch.equal(x[b : b + 1], y), (label, b)


def test_documents_and_tail_rows_never_read_each_others_nan():
    tensors, _, options, dout = _case("rows after the last document")
    options["conv_mask"] = None
    clean = _run(tensors, [0, 3, 7, 30], options, dout)
    spoiled = [x.clone() for x in tensors]
    dirty = dout.clone()
    for x in (*spoiled[:3], dirty):
        x[:, 3:7] = float("nan")
        x[:, 30:] = float("nan")
    got = _run(spoiled, [0, 3, 7, 30], options, dirty)
    for label, x, y in zip(("out", *TENSORS[:3]), got, clean, strict=False):
        assert torch.equal(x[:, :3], y[:, :3]), label
        assert torch.equal(x[:, 7:], y[:, 7:]), label
        assert (x[:, 30:] == 0).all(), label
        assert x[:, 3:7].isnan().all(), label
    only_tail = [x.clone() for x in tensors]
    for x in only_tail[:3]:
        x[:, 30:] = float("nan")
    for label, x, y in zip(("out", *TENSORS), _run(only_tail, [0, 3, 7, 30], options, dout), clean, strict=True):
        assert torch.equal(x, y), label


@pytest.mark.parametrize("name", ["published shape, small", "packed with an empty and a one-token document"])
def test_budget_changes_only_the_summation_order_of_weight_gradients(name):
    case = _case(name)
    whole = _run(*case)
    for budget in (1, 9_000, 14_000, 40_000, 80_000):
        parts = _run(*case, workspace_bytes=budget)
        for label, x, y in zip(("out", *TENSORS[:3]), parts, whole, strict=False):
            assert torch.equal(x, y), (label, budget)
        for label, x, y in zip(TENSORS[3:], parts[4:], whole[4:], strict=True):
            assert _relative(x, y) < 1e-6, (label, budget)


def test_explicit_chunk_rows_replace_the_derived_number():
    tensors, _, options, dout = _case("published shape, small")
    _, stats = FORWARD(*tensors, **options)
    whole = BACKWARD(dout, *tensors, None, None, stats, dilation=3)
    for chunk_rows in (1, 2, 5, 8, 36, 37, 1000):
        parts = BACKWARD(dout, *tensors, None, None, stats, dilation=3, chunk_rows=chunk_rows)
        assert all(torch.equal(x, y) for x, y in zip(parts[:3], whole[:3], strict=True)), chunk_rows
        assert all(_relative(x, y) < 1e-6 for x, y in zip(parts[3:], whole[3:], strict=True)), chunk_rows


def test_results_repeat_bitwise_and_do_not_depend_on_the_thread_count():
    tensors = ple_inputs(1, 300, 4, 65, 4)
    dout = torch.randn(tensors[0].shape)
    case = (tensors, None, {"dilation": 3, "conv_mask": None}, dout)
    first, threads = _run(*case), torch.get_num_threads()
    try:
        for count in (1, 2, 3, threads):
            torch.set_num_threads(count)
            assert all(torch.equal(x, y) for x, y in zip(_run(*case), first, strict=True)), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1 << 20, None])
def test_temporaries_stay_within_the_budget(budget, dtype):
    tensors = ple_inputs(1, 2048, 4, 128, 4, dtypes=dtype)
    cu_seqlens = torch.tensor([0, 100, 101, 2000])
    bound = (budget or 64 << 20) + 64 * 2048 * 4  # plus O(T*N)
    with peak_bytes() as forward:
        out, stats = FORWARD(*tensors, cu_seqlens, None, dilation=3, workspace_bytes=budget)
    assert forward.peak - out.nbytes - stats.nbytes <= bound
    with peak_bytes() as backward:
        grads = BACKWARD(out, *tensors, cu_seqlens, None, stats, dilation=3, workspace_bytes=budget)
    assert backward.peak - sum(g.nbytes for g in grads) <= bound


def test_saved_for_backward_are_the_inputs_and_20_bytes_per_token_and_stream():
    tensors = ple_inputs(1, 256, 4, 32, 4, dtypes=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ple_gdn.ple_gate_conv(*tensors, dilation=3)
    inputs = {x.data_ptr() for x in tensors}
    assert sum(x.nbytes for x in saved if x.data_ptr() not in inputs) == 20 * 256 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_equals_the_separate_eager_add_bitwise(dtype):
    tensors, _, options, dout = _case("published shape, small", dtype)
    plain = _run(tensors, None, options, dout)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, _ = FORWARD(*leaves, dilation=3, residual=True)
    assert torch.equal(out, tensors[0] + plain[0])
    grads = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(grads[0], dout + plain[1])
    assert all(torch.equal(x, y) for x, y in zip(grads[1:], plain[2:], strict=True))
    with_tail, _ = FORWARD(*tensors, torch.tensor([0, 20]), dilation=3, residual=True)
    assert torch.equal(with_tail[:, 20:], tensors[0][:, 20:])


def test_every_layout_of_inputs_and_upstream_gradient_gives_the_same_bits():
    tensors, _, options, dout = _case("batch rows with a mask")
    contiguous = _run(tensors, None, options, dout)
    strided = []
    for x in tensors:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
        wide[..., 1::2] = x
        strided.append(wide[..., 1::2])
    strided[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    leaves = [x.requires_grad_() for x in strided]
    got = (ple_gdn.ple_gate_conv(*leaves, **options),)
    got += torch.autograd.grad(got[0], leaves, dout.transpose(1, 2).contiguous().transpose(1, 2))
    assert all(torch.equal(x, y) for x, y in zip(got, contiguous, strict=True))
    ones = _run(tensors, None, options, torch.ones_like(dout))
    leaves = [x.clone().requires_grad_() for x in tensors]
    ple_gdn.ple_gate_conv(*leaves, **options).sum().backward()  # a gradient of strides (0, 0, 0)
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, ones[1:], strict=True))


def test_cu_seqlens_of_any_integer_dtype_stride_or_packing_agree():
    tensors, cu_seqlens, options, _ = _case("packed with an empty and a one-token document")
    plain = torch.tensor(cu_seqlens)
    wide = torch.stack([plain, plain + 99], 1).flatten()
    want = ple_gdn.ple_gate_conv(*tensors, cu_seqlens=plain, **options)
    for packing in (plain.int(), wide[::2], wide.int()[::2], ple_gdn.prepare_varlen(plain)):
        assert torch.equal(ple_gdn.ple_gate_conv(*tensors, cu_seqlens=packing, **options), want)


def test_no_tokens_give_empty_outputs_and_zero_weight_gradients():
    for batch, tokens in ((1, 0), (0, 4)):
        tensors = ple_inputs(batch, tokens, 4, 8, 4)
        got = _run(tensors, None, {"dilation": 3, "conv_mask": None}, tensors[0])
        assert got[0].shape == tensors[0].shape
        assert all((x == 0).all() and x.shape == y.shape for x, y in zip(got[1:], tensors, strict=True))


def test_rows_past_65536_equal_the_same_rows_computed_alone():
    tensors = ple_inputs(1, 65_537 + 32, 2, 16, 4)
    tail = [x[:, -64:] for x in tensors[:3]] + tensors[3:]
    whole, alone = (ple_gdn.ple_gate_conv(*x, dilation=3) for x in (tensors, tail))
    assert torch.equal(whole[:, -55:], alone[:, -55:])


def test_only_the_wanted_gradients_and_inference_work():
    tensors = ple_inputs(1, 9, 2, 8, 4)
    tensors[5].requires_grad_()
    out = ple_gdn.ple_gate_conv(*tensors, dilation=3)
    out.sum().backward()
    assert all((x.grad is None) == (i != 5) for i, x in enumerate(tensors))
    with torch.inference_mode():
        assert torch.equal(ple_gdn.ple_gate_conv(*tensors, dilation=3), out)


def _opcheck_cases():
    tensors = ple_inputs(2, 7, 2, 8, 4, requires_grad=True)
    yield "contiguous", tensors, (None, None), {}
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in tensors[:3]]
    yield "transposed", strided + tensors[3:], (None, torch.ones(2, 7, dtype=torch.bool)), {"residual": True}
    expanded = [x.detach()[:1].expand(2, -1, -1).requires_grad_() for x in tensors[:3]]
    yield "expanded", expanded + tensors[3:], (None, None), {"workspace_bytes": 9_000}
    mixed = ple_inputs(1, 1, 2, 8, 4, dtypes=(torch.bfloat16,) * 3 + (torch.float32,) * 4, requires_grad=True)
    yield "one token", mixed, (torch.tensor([0, 1]), None), {"eps": 1e-5}
    yield "empty", ple_inputs(1, 0, 2, 8, 4, requires_grad=True), (torch.tensor([0, 0]), torch.ones(1, 0)), {}


@pytest.mark.parametrize("case", list(_opcheck_cases()), ids=lambda case: case[0])
def test_opcheck_passes_for_both_ops(case):
    _, tensors, optional, options = case
    torch.library.opcheck(FORWARD.default, (*tensors, *optional), {"dilation": 3, **options})
    plain = [x.detach() for x in tensors]
    out, stats = FORWARD(*plain, *optional, dilation=3, **options)
    options = {"dilation": 3, **options, "chunk_rows": 2}
    torch.library.opcheck(BACKWARD.default, (torch.ones_like(out), *plain, *optional, stats), options)


@pytest.mark.parametrize("budget", [1, 300_000])
def test_outputs_never_alias_inputs_or_each_other(budget):
    tensors = ple_inputs(1, 12, 2, 8, 1)
    rows = backward_chunk_rows(budget, 12, 2, 8, 1, 1)
    assert rows == (1 if budget == 1 else 12)
    out, stats = FORWARD(*tensors, dilation=1, workspace_bytes=budget)
    grads = BACKWARD(out, *tensors, None, None, stats, dilation=1, workspace_bytes=budget)
    pointers = [x.untyped_storage().data_ptr() for x in (*tensors, out, stats, *grads)]
    assert len(set(pointers)) == len(pointers)


def _loss(*tensors: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    out = ple_gdn.ple_gate_conv(*tensors, dilation=3, cu_seqlens=cu_seqlens)
    return (out * out).sum()


def test_compiles_in_one_graph_for_every_length():
    torch._dynamo.reset()
    compiles = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, backend=compiles, fullgraph=True)
    for tokens in (19, 33, 50, 7):
        tensors = ple_inputs(1, tokens, 2, 8, 4, requires_grad=True)
        for x in tensors[:3]:
            torch._dynamo.mark_dynamic(x, 1)
        want = torch.autograd.grad(_loss(*tensors), tensors)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), tokens
    assert compiles.frame_count == 1


def test_autocast_changes_nothing_eager_or_compiled():
    """Autocast hands the op a bf16 linear output beside fp32 parameters; gradients keep each input's dtype."""
    torch._dynamo.reset()
    tensors = ple_inputs(1, 12, 2, 8, 4, requires_grad=True)
    embedding = torch.randn(1, 12, 6)
    projections = [torch.randn(n, 6, requires_grad=True) for n in (16, 8)]

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            key, value = (torch.nn.functional.linear(embedding, w) for w in projections)
            assert key.dtype == torch.bfloat16
            return ple_gdn.ple_gate_conv(tensors[0], key, value, *tensors[3:], dilation=3).square().sum()

    leaves = [tensors[0], *projections, *tensors[3:]]
    want = torch.autograd.grad(loss(), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(), leaves)
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(got, want, strict=True))
