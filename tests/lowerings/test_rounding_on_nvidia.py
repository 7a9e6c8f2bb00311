"""What the rounding lowerings generate for NVIDIA, without a GPU: Inductor's IR of fake CUDA tensors, its settings."""

from __future__ import annotations

import re

import pytest
import torch
from oracles.gated_residual import all_codes, mismatches
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ple_gdn.backend import open_compilation
from ple_gdn.lowerings import register_lowerings, rounding

aten = torch.ops.aten


def lowered(target: torch._ops.OpOverload, x: torch.Tensor, *numbers: float) -> str:
    """The body of the kernel of one call on CUDA; no number: both operands are tensors, one of them broadcast."""
    register_lowerings()
    with FakeTensorMode():
        left = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        tensors = [left] if numbers else [left, torch.empty(x.shape[-1:], dtype=x.dtype, device="cuda")]
        op = rounding.rounded_op(target, *tensors, *numbers)
        graph = GraphLowering(make_fx(lambda *given: (op(*given, *numbers),))(*tensors))
        with V.set_graph_handler(graph):
            graph.run(*tensors)
            return graph.buffers[-1].data.inner_fn_str()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0.001, 0.3, 3, 11.313708498984761, 0])
def test_every_16_bit_code_divided_by_a_number_has_the_bits_of_atens_cuda_kernel(dtype, number):
    codes = all_codes(dtype)
    factor = re.search(r"ops\.constant\((\S+), torch\.float32\)", lowered(aten.div.Tensor, codes, number))[1]
    # As measured on an H200 (tests/cuda/test_gated_residual_cuda.py): the reciprocal in double, rounded once.
    expected = codes.float() * (torch.ones((), dtype=torch.float64) / number).float()
    assert mismatches((codes.float() * float(factor.strip("'\""))).to(dtype), expected.to(dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quotient_of_two_tensors_is_an_ieee_division(dtype):
    body = lowered(aten.div.Tensor, torch.ones(4, 8, dtype=dtype))
    assert re.search(r"div_rn\(|div\.rn\.f32", body)
    assert " / " not in body


@pytest.mark.parametrize("name", rounding.EAGER_CONFIG)
def test_functions_take_subnormals_as_they_are_where_eager_s_bits_are_asked_for(name):
    def patches(**options):
        return open_compilation(None, options).patches()

    assert name in inductor_config.get_config_copy()
    assert patches(rounding="eager")[name] is patches(rounding="eager_all")[name] is patches()[name] is True
    assert name not in patches(rounding="fast")
    assert patches(**{name: False})[name] is False


def test_an_integer_tensor_is_rounded_before_its_product_with_16_bits():
    register_lowerings()
    with FakeTensorMode():
        x, k = torch.empty(8, dtype=torch.bfloat16, device="cuda"), torch.empty(8, dtype=torch.int64, device="cuda")
        op = rounding.rounded_op(aten.mul.Tensor, x, k)
        graph = GraphLowering(make_fx(lambda x, k: (op(x, k),))(x, k))
        with V.set_graph_handler(graph):
            graph.run(x, k)
            body = graph.buffers[-1].data.inner_fn_str()
    assert body.count("cvt.rn.bf16x2") == 2, body
    product = next(line for line in body.splitlines() if " * " in line and "i0" not in line)
    operands = re.findall(r"tmp\d+", product.split("=")[1])
    assert any(f"{name} = ops.inline_asm_elementwise(" in body for name in operands), body
