"""The pinned configurations compile for sm_90 without a GPU, fit its shared memory, and keep small stack frames."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ple_gdn.ops.gated_delta_rule import gradients, piece_kernels, prep, scan, scores, span_tables  # noqa: E402
from ple_gdn.ops.gated_delta_rule.configs import TABLE, block_width, select  # noqa: E402
from ple_gdn.ops.gated_delta_rule.pieces import FOLD, fold_warps  # noqa: E402

SHARED_LIMIT = 232448
FP32 = {
    *("gcum_ptr", "k_rstd_ptr", "qscale_ptr", "h0_ptr", "ht_ptr", "dht_ptr", "dh0_ptr", "g_ptr", "beta_ptr"),
    *("dg_ptr", "dbeta_ptr", "rows_ptr", "starts_ptr", "carried_ptr", "carry_ptr"),
    *("states_ptr", "adjoints_ptr", "maps_ptr"),
}
INDICES = {
    *("cu_ptr", "offsets_ptr", "source_ptr", "end_ptr", "target_ptr", "out_ptr"),
    *("leg_cu_ptr", "leg_offsets_ptr", "leg_source_ptr", "windows_ptr"),
}
WALK = {"VARLEN": True, "HAS_H0": True, "DOT": "tf32x3"}


def specs(itemsize: int, K: int, V: int, H: int = 16, HV: int = 48) -> dict[str, tuple]:
    """Kernel, constexpr arguments and warps of each launch of a shape class."""
    config = select(itemsize, K, V)
    common = {"H": H, "HV": HV, "K": K}
    tiles = {**common, "V": V, "BK": block_width(K)}
    walk = {**tiles, **WALK, "BV": config.scan.BV, "STAGES": config.scan.num_stages}
    flags = {"VARLEN": True, "L2NORM": True, "DOT": "tf32x3"}
    fold = {"HV": HV, "K": K, "V": V, "BK": block_width(K), "DOT": "tf32x3", **FOLD}
    pieces = {**common, "BK": block_width(K), "LENGTH": 256, "BLOCK": 256, "VARLEN": True}
    return {
        "prep": (
            prep.prep_kernel,
            {**common, **flags, "BLOCK": config.prep.BLOCK, "PREC": "tf32x3"},
            config.prep.num_warps,
        ),
        "score": (scores.score_kernel, {**common, "BK": block_width(K), "VARLEN": True, "DOT": "tf32x3"}, 4),
        "forward": (
            scan.forward_kernel,
            {**walk, "STORE_HT": True, "STORE_H": False, "OUTPUT": True, "SPAN": False, "LEG": 32, "KIND": 0},
            config.scan.num_warps,
        ),
        "tapes": (
            scan.forward_kernel,
            {**walk, "STORE_HT": False, "STORE_H": True, "OUTPUT": False, "SPAN": False, "LEG": 0, "KIND": 0},
            config.scan.num_warps,
        ),
        "adjoint": (
            scan.adjoint_kernel,
            {**walk, "HAS_DHT": True, "STORE_DH0": True, "REPLAY": True, "SPAN": False, "KIND": 0},
            config.scan.num_warps,
        ),
        "adjoint of a span": (
            scan.adjoint_kernel,
            {**walk, "HAS_DHT": True, "STORE_DH0": True, "REPLAY": True, "SPAN": True, "KIND": 0},
            config.scan.num_warps,
        ),
        "start states": (
            scan.forward_kernel,
            {**walk, "STORE_HT": False, "STORE_H": False, "OUTPUT": False, "SPAN": True, "LEG": 32, "KIND": 0},
            config.scan.num_warps,
        ),
        "tables": (span_tables.span_tables_kernel, {"LEG": 32, "CUT": 64, "VARLEN": True, "BLOCK": 128}, 4),
        "forward of pieces": (
            scan.forward_kernel,
            {**walk, "STORE_HT": True, "STORE_H": False, "OUTPUT": True, "SPAN": False, "LEG": 32, "KIND": 1},
            config.scan.num_warps,
        ),
        "summary of pieces": (
            scan.forward_kernel,
            {**walk, "STORE_HT": False, "STORE_H": False, "OUTPUT": False, "SPAN": False, "LEG": 0, "KIND": 2},
            config.scan.num_warps,
        ),
        "adjoint of pieces": (
            scan.adjoint_kernel,
            {**walk, "HAS_DHT": True, "STORE_DH0": True, "REPLAY": True, "SPAN": False, "KIND": 1},
            config.scan.num_warps,
        ),
        "adjoint summary of pieces": (
            scan.adjoint_kernel,
            {**walk, "HAS_DHT": True, "STORE_DH0": False, "REPLAY": False, "SPAN": False, "KIND": 2},
            config.scan.num_warps,
        ),
        "piece table": (piece_kernels.piece_kernel, {**pieces, "L2NORM": True}, 4),
        "piece table by long keys": (piece_kernels.piece_kernel, {**pieces, "L2NORM": False}, 4),
        "fold": (piece_kernels.fold_kernel, {**fold, "ADJOINT": False}, fold_warps(block_width(K))),
        "fold of adjoints": (piece_kernels.fold_kernel, {**fold, "ADJOINT": True}, fold_warps(block_width(K))),
        "gradient": (
            gradients.gradient_kernel,
            {**tiles, **flags, "SPAN": True, "BV": config.gradient.BV, "STAGES": config.gradient.num_stages},
            config.gradient.num_warps,
        ),
    }


def compile_for_hopper(itemsize: int, kernel: object, constants: dict, warps: int, tmp_path: Path) -> tuple[int, int]:
    """(shared memory bytes, stack frame bytes) of one kernel."""
    element = {2: "*bf16", 4: "*fp32"}[itemsize]

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in FP32:
            return "*fp32"
        if name in INDICES:
            return "*i32"
        if name == "table_ptr":
            return "*i64"
        return element if name.endswith("_ptr") else "fp32" if name.endswith(("scale", "threshold")) else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    return compiled.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1])


# Stack frame bytes per thread, 0 meaning no spill: Triton 3.6 gives (328, 0, 0, 16, 584), 3.9 (680, 0, 32, 32, 1856).
# That of prep doubled with the branch that carries rounding errors.
# The forward that keeps start states has 56 under 3.6, the walk for start states alone 72, 64, 64, 56 under 3.6 to 3.9,
# the adjoint of pieces and its summary 40 and 64 under 3.9.
# The gradient kernel's 128-row tiles do not fit 255 registers.
STACK_LIMIT = {"prep": 688, "score": 0, "forward": 64, "tapes": 32, "adjoint": 48, "gradient": 1920}
STACK_LIMIT |= {"adjoint of a span": 32, "start states": 72, "tables": 0}
PIECES = ("forward of pieces", "summary of pieces", "adjoint of pieces", "adjoint summary of pieces")
STACK_LIMIT |= {
    **dict.fromkeys(PIECES, 32),
    "forward of pieces": 96,
    "adjoint of pieces": 48,
    "adjoint summary of pieces": 64,
    "piece table": 0,
    "piece table by long keys": 0,
    "fold": 0,
    "fold of adjoints": 0,
}
QUICK = ("score", "forward", "tables", "piece table", "fold")


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in STACK_LIMIT if n not in QUICK)],
)
def test_the_training_shape_fits_a_hopper_multiprocessor(name: str, tmp_path: Path) -> None:
    shared, stack = compile_for_hopper(2, *specs(2, 128, 128)[name], tmp_path)
    assert shared <= SHARED_LIMIT
    assert stack <= STACK_LIMIT[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACK_LIMIT)
@pytest.mark.parametrize(("itemsize", "width"), [key for key in TABLE if key != (2, 128)])
def test_every_pinned_configuration_compiles_for_hopper(name: str, itemsize: int, width: int, tmp_path: Path) -> None:
    if width == 256 and name in (*PIECES, "fold", "fold of adjoints"):
        pytest.skip("documents are walked whole")
    shared, _ = compile_for_hopper(itemsize, *specs(itemsize, width, width)[name], tmp_path)
    assert shared <= SHARED_LIMIT
