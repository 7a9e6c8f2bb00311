"""The Triton kernels compile for Hopper on a machine without a GPU."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ple_gdn.ops.gated_residual import kernels  # noqa: E402

POINTERS = {
    "down_kernel": (("x", "y"), ("size",), ("reciprocal",)),
    "down_backward_kernel": (("dy", "x", "dx"), ("size",), ("reciprocal",)),
    "mix_kernel": (("up", "normed", "y"), ("width",), ("reciprocal",)),
    "mix_backward_kernel": (("dy", "up", "normed", "dup", "dnormed"), ("width",), ("reciprocal",)),
    "inject_kernel": (("hidden", "hyper", "weights", "y"), ("width",), ()),
    "inject_backward_kernel": (("dy", "hidden", "weights", "dhidden", "dweights"), ("width",), ()),
}


@pytest.mark.parametrize("name", POINTERS)
@pytest.mark.parametrize(("element", "streams"), [("bf16", 4), ("fp16", 3), ("fp32", 8)])
def test_kernels_compile_for_sm_90_without_contraction(name, element, streams):
    kernel = getattr(kernels, name)
    pointers, sizes, floats = POINTERS[name]
    types = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}
    known = {"N": streams, "PRODUCT": types[element], "BLOCK": 1024}
    constants = {k: v for k, v in known.items() if k in kernel.arg_names}
    signature = {
        **dict.fromkeys(pointers, f"*{element}"),
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(floats, "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    ptx = compiled.asm["ptx"]
    assert ".target sm_90" in ptx
    if element == "bf16":
        # The packed conversion over a zero, four times as fast as the single one.
        assert re.search(r"cvt\.rn\.bf16x2\.f32 \S+, \S+, 0f00000000", ptx)
    # A BF16 gate is too coarse to show the fast exp and division (no code of 65,536). Everything else takes libdevice's
    # exponential, reduced by fused steps, and divides exactly.
    if element != "bf16" or not name.startswith("mix"):
        assert "div.full" not in ptx
        assert "ex2.approx" not in ptx or "fma.rn" in ptx
