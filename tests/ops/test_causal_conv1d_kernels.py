"""The CUDA path of `causal_conv1d` without a GPU: Triton's interpreter against float64, and compilation for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ple_gdn.ops.causal_conv1d import kernels, kernels_backward, launch  # noqa: E402

ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def test_interpreted_kernels_match_float64_and_the_reference() -> None:
    worker = Path(__file__).with_name("causal_conv1d_interpreter_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def _type(name: str, element: str) -> str:
    if name in ("cu_seqlens", "healthy"):
        return "*i32"
    if name == "partial":
        return "*fp32"
    return f"*{element}" if name in ("x", "y", "dy", "dx", "weight", "bias") else "i32"


def _compile(
    name: str, element: str, width: int, taps: int, kind: int, bias: bool, directory: Path
) -> tuple[int, int, str]:
    """(stack bytes a thread, programs that run at once, PTX) of a kernel as the launcher calls it."""
    kernel, walks = {
        "forward": (kernels.forward_kernel, launch.FORWARD),
        "backward": (kernels_backward.backward_kernel, launch.BACKWARD),
    }[name]
    x = torch.empty(1, 32768, width, dtype=ELEMENTS[element], device="meta")
    weight = torch.empty(width, taps, device="meta")
    _, _, tile = launch.Problem(x, weight, None).plan(walks[x.element_size()])
    warps = tile.pop("num_warps")
    constants = {"D": width, "K": taps, "FLAT": True, "DOCUMENTS": kind, "HAS_BIAS": bias, "SILU": True, **tile}
    if name == "backward":
        constants["DENSE"] = kind != kernels.BATCH_ROWS.value
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _type(n, element) for n in names}
    even = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith(("_row", "_batch"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    options = {"num_warps": warps, **launch.OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = directory / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    # A quarter of a multiprocessor has 16384 registers and hands them out to a warp by 256.
    registers = -(-int(re.search(r"REG:(\d+)", usage)[1]) // 8) * 8
    at_once = 132 * 4 * (16384 // (32 * registers)) // warps
    return int(re.search(r"STACK:(\d+)", usage)[1]), at_once, compiled.asm["ptx"]


# element, channels, taps, documents, bias
SHAPES = {
    "training": ("bf16", 10240, 4, kernels.ONE_DOCUMENT.value, False),
    "packed": ("bf16", 10240, 4, kernels.PACKED.value, True),
    "batch": ("bf16", 1280, 4, kernels.BATCH_ROWS.value, False),
    "fp16": ("fp16", 10240, 4, kernels.PACKED.value, True),
    "fp32": ("fp32", 10240, 4, kernels.PACKED.value, True),
    "eight_taps": ("bf16", 2560, 8, kernels.PACKED.value, True),
    "sixteen_taps": ("fp32", 256, 16, kernels.PACKED.value, True),
}


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    "shape", [n if n in ("training", "packed") else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]
)
def test_kernels_compile_for_hopper_without_spills(shape: str, name: str, tmp_path: Path) -> None:
    element = SHAPES[shape][0]
    stack, at_once, ptx = _compile(name, *SHAPES[shape], tmp_path)
    assert stack == 0
    if SHAPES[shape][2] == 4 and (name == "backward" or not SHAPES[shape][4]):  # with a bias the forward has 1.25 waves
        walks = launch.FORWARD if name == "forward" else launch.BACKWARD
        assert walks[ELEMENTS[element].itemsize].programs <= at_once
    # No division of seven instructions, and no conversion at a quarter of the rate where y is rounded to BF16.
    assert "div.full" not in ptx
    if element == "bf16":
        assert re.search(r"cvt\.rn\.bf16x2\.f32 \S+, \S+, 0f00000000", ptx)
    # Four values a thread and load.
    width = "v4.b32" if element == "fp32" else "v2.b32"
    if SHAPES[shape][2] == 4:
        assert f"ld.global.{width}" in ptx


def test_a_call_plans_one_wave_of_programs_and_covers_every_row() -> None:
    for rows, width, taps in ((32768, 10240, 4), (8192, 10240, 4), (261987, 1280, 4), (1, 8, 4), (100, 40, 11)):
        x = torch.empty(1, rows, width, dtype=torch.bfloat16, device="meta")
        for walk in (launch.FORWARD[2], launch.BACKWARD[2]):
            span, spans, tile = launch.Problem(x, torch.empty(width, taps, device="meta"), None).plan(walk)
            assert (spans - 1) * span < rows <= spans * span
            assert span % walk.rows == 0
            assert spans * -(-width // tile["BC"]) <= max(walk.programs, -(-width // tile["BC"]))
