"""The CUDA launchers of PLE pass on no layout of which Triton makes another order of sums than of dense tensors."""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from oracles.layouts import LAYOUTS
from oracles.ple import ple_inputs

triton = pytest.importorskip("triton")

from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402

from ple_gdn.ops.ple import backward, forward, launch  # noqa: E402

KERNELS = {
    forward: ("ple_scalars_kernel", "ple_output_kernel"),
    backward: ("ple_conv_backward_kernel", "ple_score_backward_kernel", "ple_token_gradients_kernel",
               "ple_weight_gradient_kernel"),
    launch: ("ple_prepare_kernel",),
}  # fmt: skip
SCALARS = 1  # after the preparation
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
COMPILED_OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
BF16, FP16 = torch.bfloat16, torch.float16
# Dense rows begin anywhere; all at multiples of 16 elements, and of 16 pairs; of 16 elements only; at pairs.
SHAPES = {"odd": (BF16, 2, 45), "aligned": (BF16, 2, 64), "aligned_elements": (FP16, 3, 48), "even": (BF16, 2, 42)}

Launch = tuple[Any, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]


def _argument(parameter: Any, value: Any) -> tuple[str, Any]:
    """(Triton's type, what it is specialised on): a constant's value, or whether it is a multiple of 16."""
    if parameter.is_constexpr or value is None:
        return "constexpr", value
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if parameter.do_not_specialize:
        return "i32", False
    return ("constexpr", 1) if value == 1 else ("i32", value % 16 == 0)


class _Recorder:
    """Stands in for a kernel: notes what a launch would compile, and runs nothing."""

    def __init__(self, kernel: Any, made: list[Launch]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> _Recorder:
        return self

    def __call__(self, *given: Any, **named: Any) -> None:
        parameters = self.kernel.params
        values = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        arguments = tuple((p.name, _argument(p, values[p.name])) for p in parameters)
        options = tuple((name, named[name]) for name in COMPILED_OPTIONS if name in named)
        self.made.append((self.kernel, arguments, options))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    made: list[Launch] = []

    def stand_in(module: ModuleType, name: str) -> None:
        monkeypatch.setattr(module, name, _Recorder(getattr(module, name), made))

    for module, names in KERNELS.items():
        for name in names:
            stand_in(module, name)
    return made


def _record(
    launches: list[Launch], dtype: torch.dtype, streams: int, channels: int, layout: str | None = None
) -> list[Launch]:
    """What forward and backward launch, with the rows of all tokens dense or in a layout."""
    inputs = ple_inputs(3, 5, streams, channels, 1, dtypes=dtype)
    rows = [*inputs[:3], torch.ones_like(inputs[0])]
    if layout is not None:
        rows = [LAYOUTS[layout](x) for x in rows]
    launches.clear()
    tensors = [*rows[:3], *inputs[3:]]
    _, stats = forward.launch_forward(*tensors, None, None, 2, 1e-6, 64 << 20, True)
    backward.launch_backward(rows[3], *tensors, None, None, stats, 2, 1e-6, 64 << 20, None, True)
    assert len(launches) == 8
    return list(launches)


class _Reached(Exception):
    """Ends a compilation where the layouts are known: what follows takes most of its time."""


def _stop(backend: Any, module: Any, *given: Any) -> None:
    raise _Reached(str(module))


@functools.cache
def sums_of(made: Launch) -> list[str]:
    """The operands of every reduction, with their layouts, of the kernel compiled for sm_90."""
    kernel, arguments, options = made
    signature = {name: kind for name, (kind, _) in arguments}
    constants = {name: fact for name, (kind, fact) in arguments if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (_, (kind, fact)) in enumerate(arguments)
               if kind != "constexpr" and fact}  # fmt: skip
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_llir", _stop)
        try:
            text = triton.compile(source, target=target, options=dict(options)).asm["ttgir"]  # cached
        except _Reached as reached:
            text = str(reached)
    names = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r'"tt\.reduce"\(.*\n(?:(?!.*"tt\.reduce").*\n)*?\s*\}\) : (\(.*?\)) ->', text)
    assert len(found) == text.count('"tt.reduce"(')
    return [re.sub(r"#\w+(?![\w.])", lambda m: names.get(m[0], m[0]), operands) for operands in found]


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.slow] * (name == "aligned_elements")) for name in SHAPES]
)
def test_no_layout_changes_the_order_of_a_sum(shape: str, launches: list[Launch]) -> None:
    dense = _record(launches, *SHAPES[shape])
    for layout in LAYOUTS:
        for made, usual in zip(_record(launches, *SHAPES[shape], layout), dense, strict=True):
            if made != usual and sums_of(usual):
                assert sums_of(made) == sums_of(usual), (layout, made[0].__name__)
    assert sums_of(dense[SCALARS])


def test_padded_rows_would_change_the_order_of_a_sum_were_they_let_through(launches: list[Launch]) -> None:
    kernel, arguments, options = _record(launches, *SHAPES["odd"])[SCALARS]
    assert ("value_row", ("i32", False)) in arguments
    padded = tuple((name, ("i32", True) if name == "value_row" else kind) for name, kind in arguments)
    assert sums_of((kernel, padded, options)) != sums_of((kernel, arguments, options))
