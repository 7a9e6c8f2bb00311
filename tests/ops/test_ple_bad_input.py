"""`ple_gate_conv`: bad input, chunk rows, and what happens without a usable Triton or GPU."""

from __future__ import annotations

import logging

import pytest
import sympy
import torch
from oracles.ple import TENSORS, ple_inputs

import ple_gdn
from ple_gdn.ops import triton_support
from ple_gdn.ops.ple.chunking import backward_chunk_rows, forward_chunk_rows, useful_dilation

FORWARD = torch.ops.ple_gdn.ple_gate_conv
BACKWARD = torch.ops.ple_gdn.ple_gate_conv_backward


BAD = {
    "hidden": [
        (lambda x: x[0], ValueError, r"hidden: expected 3 dimensions"),
        (lambda x: x[..., :-1], ValueError, r"hidden: expected a width that is a multiple"),
        (lambda x: x[..., :8], ValueError, r"hidden: expected at least 2 streams.*got 1"),
        (lambda x: x.double(), TypeError, r"key: expected dtype float64"),
        (lambda x: x.int(), TypeError, r"hidden: expected dtype"),
        (lambda x: None, TypeError, r"hidden: expected a torch.Tensor, got NoneType"),
    ],
    "key": [
        (lambda x: x[:, :-1], ValueError, r"key: expected shape"),
        (lambda x: x.to("meta"), ValueError, r"key: expected device cpu"),
        (lambda x: x.double(), TypeError, r"key: expected dtype"),
    ],
    "value": [
        (lambda x: x[:, :-1], ValueError, r"value: expected shape"),
        (lambda x: x[0], ValueError, r"value: expected 3 dimensions"),
        (lambda x: x.long(), TypeError, r"value: expected dtype"),
    ],
    "norm_key_weight": [(lambda x: x[:-1], ValueError, r"norm_key_weight: expected shape")],
    "norm_query_weight": [(lambda x: x[None], ValueError, r"norm_query_weight: expected shape")],
    "norm_conv_weight": [(lambda x: x.int(), TypeError, r"norm_conv_weight: expected dtype")],
    "conv_weight": [
        (lambda x: x[:, 0], ValueError, r"conv_weight: expected 3 dimensions"),
        (lambda x: x[..., :0], ValueError, r"conv_weight: expected a kernel of 1 to 8 taps, got 0"),
        (lambda x: x.repeat(1, 1, 3), ValueError, r"conv_weight: expected a kernel of 1 to 8 taps, got 12"),
        (lambda x: x[1:], ValueError, r"conv_weight: expected shape"),
    ],
    "dilation": [
        (lambda _: 0, ValueError, r"dilation: expected at least 1, got 0"),
        (lambda _: 1.5, TypeError, r"dilation: expected an int, got float"),
        (lambda _: 2**63, ValueError, r"dilation: expected an int of 64 bits, .* got 9223372036854775808"),
    ],
    "eps": [
        (lambda _: 0.0, ValueError, r"eps: expected a positive number, got 0"),
        (lambda _: "small", TypeError, r"eps: expected a number, got str"),
    ],
    "workspace_bytes": [
        (lambda _: 0, ValueError, r"workspace_bytes: expected None or a positive"),
        (lambda _: 1e6, TypeError, r"workspace_bytes: expected an int, got float"),
        (lambda _: 2**70, ValueError, r"workspace_bytes: expected an int of 64 bits"),
    ],
    "cp": [(lambda _: object(), TypeError, r"cp: expected a KcpContext")],
    "cu_seqlens": [
        (lambda _: torch.tensor([0, 4, 3, 6]), ValueError, r"cu_seqlens: expected non-decreasing"),
        (lambda _: torch.tensor([1, 6]), ValueError, r"cu_seqlens: expected the first entry to be 0"),
        (lambda _: torch.tensor([0, 7]), ValueError, r"cu_seqlens: expected the last entry to be at most T = 6"),
        (lambda _: torch.tensor([0.0, 6.0]), TypeError, r"cu_seqlens: expected dtype"),
        (lambda _: torch.tensor([[0, 6]]), ValueError, r"cu_seqlens: expected 1 dimensions"),
        (lambda _: [0, 6], TypeError, r"cu_seqlens: expected a torch.Tensor"),
    ],
    "conv_mask": [
        (lambda _: torch.ones(1, 5), ValueError, r"conv_mask: expected shape"),
        (lambda _: torch.ones(1, 6, dtype=torch.complex64), TypeError, r"conv_mask: expected dtype"),
        (lambda _: [1] * 6, TypeError, r"conv_mask: expected a torch.Tensor"),
    ],
}


@pytest.mark.parametrize(("name", "entry"), [(name, entry) for name, entries in BAD.items() for entry in entries])
def test_bad_input_is_named_before_anything_is_computed(name, entry):
    spoil, error, message = entry
    arguments = dict(zip(TENSORS, ple_inputs(1, 6, 2, 8, 4), strict=True)) | {"dilation": 3}
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(error, match=message):
        ple_gdn.ple_gate_conv(**arguments)


def test_packing_refuses_batches_and_a_misspelt_keyword_raises():
    tensors = ple_inputs(2, 6, 2, 8, 4)
    with pytest.raises(ValueError, match="cu_seqlens: expected inputs with batch size 1"):
        ple_gdn.ple_gate_conv(*tensors, dilation=3, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(TypeError, match="workspace_byte"):
        ple_gdn.ple_gate_conv(*tensors, dilation=3, workspace_byte=5)


def test_backward_op_checks_its_own_arguments():
    tensors = ple_inputs(1, 6, 2, 8, 4)
    out, stats = FORWARD(*tensors, dilation=3)
    for spoilt, message in (
        ((out[:, 1:], stats, 1), "dout: expected shape"),
        ((out, stats[1:], 1), "stats: expected shape"),
        ((out, stats, 0), "chunk_rows: expected None or at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            BACKWARD(spoilt[0], *tensors, None, None, spoilt[1], dilation=3, chunk_rows=spoilt[2])
    with pytest.raises(TypeError, match="dout: expected dtype float32"):
        BACKWARD(out.bfloat16(), *tensors, None, None, stats, dilation=3)


def test_chunk_rows_is_one_expression_for_numbers_and_symbols():
    tokens, budget = sympy.symbols("T budget", integer=True, positive=True)
    for formula in (forward_chunk_rows, backward_chunk_rows):
        expression = formula(budget, tokens, 4, 2560, 4, 3)
        for size, value in ((262_144, 64 << 20), (100, 64 << 20), (4096, 1), (0, 1 << 20)):
            number = formula(value, size, 4, 2560, 4, 3)
            assert int(expression.subs({tokens: size, budget: value})) == number
            assert 1 <= number <= max(size, 1)
    assert backward_chunk_rows(64 << 20, 262_144, 4, 2560, 4, 3) == 375


@pytest.mark.parametrize("boundaries", [None, [0, 7, 70]])
def test_a_dilation_beyond_the_rows_costs_and_gives_what_the_rows_can_reach(boundaries):
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    results = []
    for dilation in (70, 2**63 - 1):
        tensors = ple_inputs(1, 70, 2, 8, 4, requires_grad=True)
        out = ple_gdn.ple_gate_conv(*tensors, dilation=dilation, cu_seqlens=cu_seqlens)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert [useful_dilation(d, t) for d, t in ((3, 1), (64, 1), (65, 10), (128, 65), (999, 65))] == [
        3,
        64,
        64,
        128,
        128,
    ]


def test_cuda_without_triton_warns_once_and_takes_the_reference(monkeypatch, caplog):
    triton_support._warn_once.cache_clear()
    monkeypatch.setattr(triton_support, "missing_triton", lambda: "triton cannot be imported (test)")
    with caplog.at_level(logging.WARNING, logger="ple_gdn"):
        for _ in range(3):
            assert not triton_support.triton_ready(torch.device("cuda", 0))
            assert not triton_support.triton_ready(torch.device("cpu"))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["triton cannot be imported (test)"]
    triton_support._warn_once.cache_clear()


def test_a_gpu_older_than_sm80_is_refused_by_name(monkeypatch):
    triton_support._check_capability.cache_clear()
    monkeypatch.setattr(triton_support, "missing_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"compute capability >= 8.0, Tesla T4 has 7.5"):
        triton_support.triton_ready(torch.device("cuda", 0))
    triton_support._check_capability.cache_clear()


def test_stats_carry_no_gradient_and_double_backward_is_refused():
    tensors = ple_inputs(1, 9, 2, 8, 4, requires_grad=True)
    out, stats = FORWARD(*tensors, dilation=3)
    assert not stats.requires_grad
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="ple_gate_conv_backward"):
        grad.sum().backward()
