"""A rounding that a lowering asks for is in the generated C++, whatever the release of torch does with casts."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.codegen import cpp

from ple_gdn.lowerings import cpp_casts, register_lowerings
from ple_gdn.ops import torch_versions


@pytest.mark.parametrize("overrides", [cpp.CppOverrides, cpp.CppVecOverrides])
def test_only_releases_that_drop_a_rounding_are_changed_and_once(monkeypatch, overrides):
    register_lowerings()
    assert hasattr(overrides.to_dtype, "__wrapped__") == torch_versions.casts_are_cached()
    before = overrides.to_dtype
    register_lowerings()
    assert overrides.to_dtype is before
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert not torch_versions.casts_are_cached()
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert torch_versions.casts_are_cached()


class Kernel:
    """As much of Inductor's C++ kernel as a cast asks of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cse, self.compute = self, None

    def get_to_dtype_expr(self, x, dtype, src_dtype):
        return f"{src_dtype}->{dtype}({x})"

    def generate(self, compute, expr):
        self.lines.append(expr)
        return Value(expr)


class Value:
    dtype = torch.float32

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def update_on_args(self, name, args, kwargs):
        assert name == "to_dtype"


def test_a_cast_that_asks_to_round_goes_round_the_cache_and_others_do_not():
    class Overrides:
        @staticmethod
        def to_dtype(x, dtype, src_dtype=None, use_compute_types=True):
            return "merged"

    cpp_casts._keep_roundings(Overrides)
    kernel = Kernel()
    with cpp.V.set_kernel_handler(kernel):
        rounded = Overrides.to_dtype(Value("x"), torch.bfloat16, use_compute_types=False)
        assert Overrides.to_dtype(Value("x"), torch.bfloat16) == "merged"
    assert str(rounded) == "torch.float32->torch.bfloat16(x)"
    assert kernel.lines == [str(rounded)]
