"""The Hopper gradient kernel in the emulator: every broken synchronisation is found; its registers for sm_90.

That it is right is for `test_gdn_hopper.py`, whose emulated backward runs it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from oracles import gluon_language
from oracles.gluon_emulator import Descriptor, Hazard
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from ple_gdn.ops.gated_delta_rule import gradient_sides_hopper, gradients_hopper
from ple_gdn.ops.gated_delta_rule.hopper_gradients import REGISTERS

PACKAGE = "ple_gdn.ops.gated_delta_rule"


def loaded(name: str, source: str, folder: Path) -> object:
    """A module of this source; Gluon reads it back from its file."""
    path = folder / f"{name}.py"
    path.write_text(source.replace("from .device", f"from {PACKAGE}.device"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def rebuilt(folder: Path, *changes: str) -> object:
    """The kernel's module with passages of its source or of its sides' replaced: old, new, old, new, each once."""
    sources = [Path(module.__file__).read_text() for module in (gradient_sides_hopper, gradients_hopper)]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        which = next(i for i, source in enumerate(sources) if old in source)
        sources[which] = sources[which].replace(old, new, 1)
    loaded("mutant_sides", sources[0], folder)
    return loaded("mutant", sources[1].replace("from .gradient_sides_hopper", "from mutant_sides"), folder)


def run_once(module: object, seed: int, group: int = 2) -> dict[str, torch.Tensor]:
    """Every chunk of two q/k heads, taken by three CTAs."""
    torch.manual_seed(0)
    lengths = (130, 65)
    boundaries = torch.tensor((0, *lengths)).cumsum(0)
    offsets = torch.tensor((0, *(-(-n // 64) for n in lengths))).cumsum(0)
    tokens, chunks, H = int(boundaries[-1]), int(offsets[-1]), 2
    HV = H * group
    draw = lambda *shape: (torch.randn(shape) / 8).half()  # noqa: E731
    tile = lambda t, rows=64: Descriptor(t.view(-1, t.shape[-1]), [rows, 128])  # noqa: E731
    q, k, do, delta, dv = (draw(tokens, n * 128) for n in (H, H, HV, HV, HV))
    h, dh = draw(chunks * HV * 128, 128), draw(chunks * HV * 128, 128)
    out = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": dv}
    out |= {name: torch.zeros(tokens, HV) for name in ("dg", "dbeta")}
    arguments = {
        "do_desc": tile(do), "dr_desc": tile(dv), "delta_desc": tile(delta), "h_desc": tile(h, 128),
        "dh_desc": tile(dh, 128), "q_desc": tile(q), "k_desc": tile(k),
        "rows_desc": Descriptor(torch.rand(chunks * HV * 320) - 1, [64]),
        "k_rstd_ptr": torch.rand(tokens, H), "qscale_ptr": torch.rand(tokens, H),
        "cu_ptr": boundaries, "offsets_ptr": offsets, **{f"{n}_ptr": t for n, t in out.items()},
        "inverse_scale": 2.0, "documents": len(lengths), "T": tokens, "chunks": chunks, "chunks_per_row": chunks,
        "H": H, "HV": HV, "VARLEN": True, "SPAN": False, "L2NORM": True, "SIDE_REGISTERS": 0,
    }  # fmt: skip
    gluon_language.run(module.hopper_gradient_kernel, 3, arguments, seed)
    return out


@pytest.mark.parametrize("group", [1, 2, 3])
def test_the_sides_synchronise_in_every_order_of_copies(group: int) -> None:
    first = run_once(gradients_hopper, 0, group)
    assert all(value.isfinite().all() for value in first.values())
    for seed in (1, 2):
        for name, value in run_once(gradients_hopper, seed, group).items():
            assert torch.equal(value, first[name]), name


def wait(name: str, phase: str) -> str:
    return f"mbarrier.wait(barriers.index({name}), {phase})"


ROWS_WAIT = wait("ROWS_FULL + slot", "step // 2 & 1")
H_WAIT = wait("H_FULL", "step & 1")
DO_WAIT = f"{ROWS_WAIT}\n            {H_WAIT}"
RELEASE_ROWS = "mbarrier.arrive(barriers.index(ROWS_EMPTY + slot), count=1)"
RELEASE_H = "mbarrier.arrive(barriers.index(STATES_EMPTY), count=1)"
FULL_PAIRS = "mbarrier.arrive(barriers.index(PAIRS_FULL + slot), count=1)"
FULL_SHARES = "mbarrier.arrive(barriers.index(SHARES_FULL + slot), count=1)"
RELEASE_QK = "mbarrier.arrive(released, count=1)"
KEYS_LOADED = "normed = tile.load(WIDE)"
TRACE = "part, trace = warpgroup_mma_wait(0, deps=[part, trace])"
STATES = "states = warpgroup_mma_wait(3, deps=[states])"
RELEASE_STATES = f"{STATES}\n            thread_barrier()\n            {RELEASE_H}"
TOTAL = "total = warpgroup_mma_wait(0, deps=[total])\n            total += states"
STORE_D = "pair_tiles.index(slot).store(low)"
START = "start = rows_tiles.index(table + 3)"
QK_WAIT = wait("QK_FULL", "turn & 1") + f"\n            {START}"
DR_WAIT = "part = warpgroup_mma_wait(0,"
DV_WAIT = ROWS_WAIT + "\n            for part"
LOCATED = "location = locations.index(slot)"
LOCATION = "locations.index(slot).store(location)"
EXPECT_ROWS = "mbarrier.expect(full, 3 * 64 * 128 * 2 + 5 * 64 * 4)"
ROWS_THERE = f"{ROWS_WAIT}\n    {LOCATED}"
FACTORS = "factors.index(slot * 2).store(qscale)"
K_RSTD = "factors.index(slot * 2 + 1).store(k_rstd)"
QSCALE = "qscale = factors.index(step % 2 * 2)"
HAND_OVER = "\n                ".join(["if member == 0:", LOCATION, FACTORS, K_RSTD, "thread_barrier()\n            "])
BROKEN = {
    "rows handed over in one slot": (LOCATION, LOCATION.replace("slot", "0"), LOCATED, LOCATED.replace("slot", "0")),
    "rows handed over after the arrival": (HAND_OVER + EXPECT_ROWS, f"{EXPECT_ROWS}\n            {HAND_OVER}"),
    "no wait for rows handed over": (ROWS_THERE, LOCATED),
    "factors read from the other slot": (QSCALE, QSCALE.replace("step", "(step + 1)")),
    "a full barrier's phase ignores the ring": (DO_WAIT, DO_WAIT.replace("step // 2", "step")),
    "no wait for dO": (DO_WAIT, H_WAIT),
    "no wait for dR where it becomes dV": (DV_WAIT, "for part"),
    "no wait for h": (H_WAIT, "pass"),
    "no wait for dh": (wait("DH_FULL", "step & 1"), "pass"),
    "no wait for q and k": (QK_WAIT, START),
    "q's phase by value head": (QK_WAIT, QK_WAIT.replace("turn", "step")),
    "no wait for cleared rows": (wait("QK_CLEARED", "partial & 1"), "pass"),
    "no wait for D": (wait("PAIRS_FULL + slot", "step // 2 & 1"), "pass"),
    "no wait for shares of dG": (wait("SHARES_FULL + slot", "step // 2 & 1"), "pass"),
    "shares announced by one side": (FULL_SHARES, "pass"),
    "shares of one side waited for": (" | 1 << 12 | 1 << 13", ""),
    "D in one slot": (STORE_D, STORE_D.replace("slot", "0")),
    "D announced before it is whole": (FULL_PAIRS, "pass", STORE_D, f"{FULL_PAIRS}; {STORE_D}"),
    "the other ring released": (RELEASE_H, RELEASE_ROWS),
    "one side does not release": (RELEASE_ROWS, "pass"),
    "the finishing warps not counted": ("THIRD = gl.constexpr(1 << 8 | 1 << 9)", "THIRD = gl.constexpr(0)"),
    "dh released while its product is taken": (RELEASE_STATES, f"{RELEASE_H}; {STATES}"),
    "h released while dO h^T and its trace are taken": (RELEASE_H, "pass", TRACE, f"{RELEASE_H}; {TRACE}"),
    "q and k not released": (RELEASE_QK, "pass"),
    "q and k released before they are read": (RELEASE_QK, "pass", KEYS_LOADED, f"{RELEASE_QK}; {KEYS_LOADED}"),
    "part and trace not waited for": (TRACE, TRACE.replace("0", "1")),
    "scores not waited for": ("scores = warpgroup_mma_wait(0,", "scores = warpgroup_mma_wait(1,"),
    "dk's part not waited for": (DR_WAIT, DR_WAIT.replace("0", "1")),
    "products not waited for": ("products = warpgroup_mma_wait(1,", "products = warpgroup_mma_wait(2,"),
    "states not waited for": (STATES, STATES.replace("3", "4")),
    "the sum not waited for": (TOTAL, TOTAL.replace("0", "1")),
    "no wait for a release of dO": (wait("ROWS_EMPTY + slot", "(step // 2 & 1) ^ 1"), "pass"),
    "no wait for a release of h and dh": (wait("STATES_EMPTY", "(step & 1) ^ 1"), "pass"),
    "no wait for a release of q": (wait("QK_EMPTY", "(turn & 1) ^ 1"), "pass"),
    "too few bytes": ("3 * 64 * 128 * 2 + 5", "3 * 64 * 128 * 2 + 4"),
    "too many bytes": ("barriers.index(DH_FULL), 128 * 128 * 2", "barriers.index(DH_FULL), 128 * 128 * 4"),
    "two readers counted as one": ("1 << 5 | ", ""),
    "a shape": ("warpgroup_mma(do, delta.permute((1, 0)), zero", "warpgroup_mma(do, delta.permute((1, 0)), wide"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_emulator_finds_a_broken_side(name: str, tmp_path: Path) -> None:
    mutant = rebuilt(tmp_path, *BROKEN[name])
    for seed, group in ((0, 2), (1, 2), (2, 2), (0, 1), (1, 1)):
        try:
            run_once(mutant, seed, group)
        except Hazard:
            return
    pytest.fail("no hazard found")


def compiled(constants: dict, tmp_path: Path) -> tuple[int, str]:
    """(shared memory, ptxas report) for sm_90."""
    import triton

    kernel = gradients_hopper.hopper_gradient_kernel

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name == "rows_desc":
            return f"tensordesc<fp32[64],{NVMMASharedLayout(0, 32, rank=1)!r}>"
        if name.endswith("_desc"):
            rows = 128 if name in ("h_desc", "dh_desc") else 64
            return f"tensordesc<bf16[{rows}, 128],{NVMMASharedLayout(128, 16, rank=2)!r}>"
        if name.endswith("_ptr"):
            narrow = name in ("dq_ptr", "dk_ptr", "dv_ptr", "dbeta_ptr")
            return "*i32" if name in ("cu_ptr", "offsets_ptr") else "*bf16" if narrow else "*fp32"
        return "fp32" if name == "inverse_scale" else "i32"

    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": REGISTERS["num_warps"], "maxnreg": REGISTERS["maxnreg"]}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(binary.asm["ptx"])
    # The wheel holds an older and a newer assembler; which one takes this PTX depends on the release.
    tools = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    command = ["-v", "-arch=sm_90a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    runs = [subprocess.run([str(tool), *command], capture_output=True, text=True) for tool in tools]
    return binary.metadata.shared, next(run.stderr for run in runs if run.returncode == 0)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradients_fit_a_multiprocessor_and_run_their_products_in_parallel(packed: bool, tmp_path: Path) -> None:
    absent = {} if packed else {"cu_ptr": None, "offsets_ptr": None}
    flags = {"H": 16, "HV": 48, "VARLEN": packed, "SPAN": packed, "L2NORM": True}
    flags |= {"SIDE_REGISTERS": REGISTERS["SIDE_REGISTERS"]}
    size, report = compiled({**flags, **absent}, tmp_path)
    assert size <= 232448
    assert not re.search(r"C75\d\d|serialized", report), report
    # A dozen words that do not change within the loop over heads: accumulators spilled in it come back from L2.
    assert int(re.search(r"(\d+) bytes stack frame", report)[1]) <= 192
