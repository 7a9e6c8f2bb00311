"""The PLE kernels compile for sm_90 without a GPU, and at the shapes the block is used at they spill no register."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from ple_gdn.ops.ple import configs, kernels_backward, kernels_common, kernels_forward, kernels_tokens  # noqa: E402

COUNTS = ("rows", "tokens", "span", "documents", "steps", "blocks", "walks", "spans", "value_span", "score_span",
          "value_programs", "score_programs")  # fmt: skip
BF16 = configs.CONFIGS[2]
WIDTH = {"C": 2560, "N": 4, "K": 4, "D": 3, "W": 10240, "HAS_FIRST": False, "FLAT": True, "HAS_MASK": False,
"HAS_DOCUMENTS": False,
             "HAS_STATS": True, "RESIDUAL": False, "VALUE": kernels_common.BF16_PAIRS.value,
             "DOUT": kernels_common.BF16_PAIRS.value, "HIDDEN": kernels_common.BF16_PAIRS.value,
             "KEY": kernels_common.BF16_PAIRS.value,
             "FOLD_BLOCKS": 10, "BLOCK": 1024, "NP": 4, "TILES": 10, "BP": 64, "BW": 32}  # fmt: skip
PACKED = {"HAS_FIRST": True, "HAS_MASK": True, "HAS_DOCUMENTS": True}
KERNELS = {
    "prepare": (kernels_common.ple_prepare_kernel, {}, 4, None),
    "scalars": (kernels_forward.ple_scalars_kernel, {"BT": BF16.scalars.rows, "BC": BF16.scalars.block},
                BF16.scalars.warps, None),
    "output": (kernels_forward.ple_output_kernel, {"BC": BF16.output.block, "UNROLL": BF16.output.unroll},
               BF16.output.warps, None),
    "conv": (kernels_backward.ple_conv_backward_kernel, {"BC": BF16.conv.block, "UNROLL": BF16.conv.unroll},
             BF16.conv.warps, None),
    "scores": (kernels_backward.ple_score_backward_kernel, {"BT": 32}, 4, None),
    "tokens": (kernels_tokens.ple_token_gradients_kernel,
               {"VALUE_BC": BF16.value.block, "SCORE_BT": BF16.score.rows, "SCORE_BC": BF16.score.block}, 1,
               BF16.token_registers),
    "weights": (kernels_tokens.ple_weight_gradient_kernel, {}, 4, None),
}  # fmt: skip
BF16_POINTERS = ("hidden", "key", "out", "dout", "dvalue", "dhidden", "dkey", "key_w", "query_w", "conv_w")
PAIR_POINTERS = {"ple_output_kernel": ("value",), "ple_conv_backward_kernel": ("dout", "value"),
                 "ple_token_gradients_kernel": ("dout_walk", "value", "hidden", "key")}  # fmt: skip


def _type(kernel: str, name: str, element: str = "*bf16") -> str:
    if name in COUNTS or name.endswith(("_batch", "_row")):
        return "i32"
    if name in ("eps", "root_c"):
        return "fp32"
    if name in PAIR_POINTERS.get(kernel, ()) or name in ("first", "healthy", "cu_seqlens"):
        return "*i32"
    return element if name in (*BF16_POINTERS, "value") else "*fp32"


def _local_memory(
    kernel, constants: dict, warps: int, registers: int | None, directory: Path, element: str = "*bf16"
) -> tuple[int, int]:
    """(stack bytes, local bytes) per thread in the compiler's report."""
    signature, values, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if parameter.is_constexpr else _type(kernel.fn.__name__, name, element)
        if parameter.is_constexpr:
            values[name] = constants[name]
        elif name not in COUNTS and signature[name] != "fp32":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, values, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=target, options=options)
    binary = directory / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", report).groups()
    return int(stack), int(local)


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_sm90_without_spills(name: str, packed: bool, tmp_path: Path) -> None:
    kernel, constants, warps, registers = KERNELS[name]
    constants = {**WIDTH, **constants, **(PACKED if packed else {})}
    bound = registers[packed] if registers else None
    assert _local_memory(kernel, constants, warps, bound, tmp_path) == (0, 0)


def test_float64_score_of_fp32_inputs_compiles_for_sm90_without_spills(tmp_path: Path) -> None:
    kernel, constants, warps, _ = KERNELS["scalars"]
    assert _local_memory(kernel, {**WIDTH, **constants}, warps, None, tmp_path, "*fp32") == (0, 0)


@pytest.mark.parametrize("name", ["output", "tokens"])
def test_kernel_with_the_residual_add_compiles_for_sm90_without_spills(name: str, tmp_path: Path) -> None:
    kernel, constants, warps, registers = KERNELS[name]
    bound = registers[1] if registers else None
    assert _local_memory(kernel, {**WIDTH, **constants, "RESIDUAL": True}, warps, bound, tmp_path) == (0, 0)


def test_a_register_bound_that_is_too_low_shows_in_the_report(tmp_path: Path) -> None:
    kernel, constants, warps, _ = KERNELS["conv"]
    assert _local_memory(kernel, {**WIDTH, **constants}, warps, 96, tmp_path)[0] > 0
