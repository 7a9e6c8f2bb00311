"""The Hopper walks in the emulator: right, and every broken synchronisation is found; their registers for sm_90."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from oracles import gluon_language
from oracles.gluon_emulator import Descriptor, Hazard
from oracles.ptx_machine import Machine, Memory
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from ple_gdn.ops.gated_delta_rule import adjoint_hopper, forward_hopper, map_hopper
from ple_gdn.ops.gated_delta_rule.configs import MAP_TERMS, walks_for_hopper
from ple_gdn.ops.gated_delta_rule.device_hopper import ROWS, split_terms

WORKER = Path(__file__).with_name("gdn_hopper_worker.py")
PACKAGE = "ple_gdn.ops.gated_delta_rule"


@pytest.mark.parametrize(
    ("lengths", "save_mode", "heads", "l2norm"),
    [
        ("66,0,1", "full", (1, 2), True),
        ("70,0", "segments", (1, 1), True),
        ("70,0,65", "spans", (1, 1), True),
        ("66,0,194", "pieces", (1, 1), True),
        ("130,65", "equal_keys", (1, 2), True),
        ("1,266", "windows", (1, 2), True),
        pytest.param("130,0,64,257", "pieces", (1, 2), True, marks=pytest.mark.slow),
        pytest.param("193,0,1,64,128,63", "light", (1, 2), True, marks=pytest.mark.slow),
        pytest.param("3,66", "light", (2, 6), False, marks=pytest.mark.slow),
        pytest.param("0,150", "segments", (1, 1), True, marks=pytest.mark.slow),
    ],
)
def test_the_emulated_kernels_are_as_exact_as_the_plain_ones(
    lengths: str, save_mode: str, heads: tuple[int, int], l2norm: bool
) -> None:
    run = subprocess.run(
        [sys.executable, str(WORKER), lengths, save_mode, "1", *map(str, heads), str(int(l2norm))],
        capture_output=True, text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    for name, (plain, ours) in json.loads(run.stdout.splitlines()[-1]).items():
        # The plain update has two 16-bit terms, the Hopper one folds what the second would hold.
        assert ours <= 1.05 * plain + (1e-4 if name in ("final_state", "h", "delta") else 1e-5), name
        assert ours <= 1e-3, name


def test_the_walks_are_chosen_by_class_device_and_release() -> None:
    hopper = {"itemsize": 2, "K": 128, "V": 128, "table_floats": 320, "capability": (9, 0), "triton": (3, 6)}
    assert walks_for_hopper(**hopper)
    others = {
        "itemsize": (4,), "K": (64, 112), "V": (64, 256), "table_floats": (2**31,),
        "capability": ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)), "triton": ((3, 5), (3, 7), (3, 9), (4, 6)),
    }  # fmt: skip
    for name, values in others.items():
        for value in values:
            assert not walks_for_hopper(**{**hopper, name: value}), (name, value)


def batched(changes: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(changes[::2], changes[1::2], strict=True))


def rebuilt(module: object, folder: Path, *changes: str) -> object:
    """The module with passages of its source replaced: old, new, old, new, each once."""
    source = Path(module.__file__).read_text()
    for old, new in batched(changes):
        assert old in source, old
        source = source.replace(old, new, 1)
    path = folder / "mutant.py"
    path.write_text(re.sub(r"from \.(?=device)", f"from {PACKAGE}.", source))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


def walk_once(module: object, seed: int, length: int = 321, stages: int = 2) -> None:
    """One document of six chunks, one head."""
    torch.manual_seed(0)
    chunks = -(-length // 64)
    draw = lambda *shape: (torch.randn(shape) / 8).half()  # noqa: E731
    q, k, v, x, p = draw(length, 128), draw(length, 128), draw(length, 128), draw(length, 64), draw(chunks * 64, 64)
    out, states, rows = torch.empty_like(v), draw(chunks * 128, 128), torch.rand(chunks, 320) - 1
    rows.view(torch.int32)[::2, 319] |= 1  # every other chunk takes a second term
    maps = {
        "q_desc": Descriptor(q, [64, 128]), "k_desc": Descriptor(k, [64, 128]), "p_desc": Descriptor(p, [64, 64]),
        "x_desc": Descriptor(x, [64, 64]), "rows_desc": Descriptor(rows.view(-1), [64]),
    }  # fmt: skip
    shared = {
        **maps, "cu_ptr": None, "offsets_ptr": None, "T": length, "chunks_per_row": chunks,
        "table_ptr": None, "windows_ptr": None, "states_ptr": None, "KIND": 0,
        "H": 1, "HV": 1, "VARLEN": False, "STAGES": max(stages, 2), "OUTPUT_STAGES": stages,
    }  # fmt: skip
    value, state = Descriptor(v, [64, 64]), Descriptor(states, [128, 64])
    if hasattr(module, "hopper_forward_kernel"):
        o_desc, delta = Descriptor(out, [64, 64]), torch.empty_like(v)
        own = {
            "v_desc": value, "o_desc": o_desc, "h_desc": state, "delta_desc": Descriptor(delta, [64, 64]),
            "h0_ptr": None, "ht_ptr": None, "o_ptr": out, "delta_ptr": delta,
            "starts_ptr": None, "source_ptr": None, "end_ptr": None, "SPAN": False, "LEG": 0,
            "HAS_H0": False, "STORE_HT": False, "STORE_H": True, "OUTPUT": True,
        }  # fmt: skip
        kernel = module.hopper_forward_kernel
    else:
        own = {
            "do_desc": value, "dr_desc": Descriptor(out, [64, 64]), "dh_desc": state, "dr_ptr": out,
            "dht_ptr": None, "dh0_ptr": None, "HAS_DHT": False, "STORE_DH0": False, "SPAN": False,
            **dict.fromkeys(("end_ptr", "target_ptr", "carried_ptr", "carry_ptr")),
        }  # fmt: skip
        kernel = module.hopper_adjoint_kernel
    gluon_language.run(kernel, 2, {**shared, **own}, seed)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("module", [forward_hopper, adjoint_hopper], ids=["forward", "adjoint"])
def test_the_walks_synchronise_in_every_order_of_copies(module: object, stages: int) -> None:
    for seed in range(3):
        walk_once(module, seed, stages=stages)


FULL = "mbarrier.wait(state_full.index(slot), i // STAGES & 1)"
EMPTY = "mbarrier.wait(state_empty.index(slot), (i // STAGES & 1) ^ 1)"
BYTES = "2 * 64 * 64 * 2 + 4 * 64 * 4"
OUTPUT_BYTES = "128 * 2 + 64 * 64 * 2 + 64 * 4"
RELEASE = "mbarrier.arrive(state_empty.index(slot), count=1)"
OUTPUT_RELEASE = "mbarrier.arrive(output_empty.index(out_slot), count=1)"
RELEASE_LAST = "mbarrier.arrive(output_empty.index((i + OUTPUT_STAGES - 1) % OUTPUT_STAGES), count=1, pred=i > 0)"
O_WAIT = "O_last = warpgroup_mma_wait(0, deps=[O])"
SECOND = "is_async=True)\n            S = warpgroup_mma_wait(0, deps=[S])"
FORWARD = {
    "a full barrier's phase ignores the ring": (FULL, "mbarrier.wait(state_full.index(slot), i & 1)"),
    "a full barrier a phase early": (FULL, "mbarrier.wait(state_full.index(slot), (i // STAGES & 1) ^ 1)"),
    "an empty barrier's phase": (EMPTY, "mbarrier.wait(state_empty.index(slot), i // STAGES & 1)"),
    "no wait for a copy": ("mbarrier.wait(output_full.index(out_slot), i // OUTPUT_STAGES & 1)", "pass"),
    "no wait for a release": (EMPTY, "pass"),
    "no release": (RELEASE, "pass"),
    "released before the last product": (
        RELEASE_LAST,
        "pass",
        "two_terms = alike",
        f"{OUTPUT_RELEASE}; two_terms = alike",
    ),
    "O read while its product is taken": (O_WAIT, O_WAIT.replace("0", "1")),
    "released while a product reads": (RELEASE, "pass", "S = S * chunk", f"{RELEASE}; S = S * chunk"),
    "too few bytes": (BYTES, BYTES.replace("+ 4", "+ 3")),
    "too many bytes": (OUTPUT_BYTES, OUTPUT_BYTES.replace("+ 64 * 4", "+ 128 * 4")),
    "a product not waited for": ("mma_wait(1 if OUTPUT", "mma_wait(2 if OUTPUT"),
    "staging overwritten": ("start_staging()", "pass"),
    "it ends with a store in flight": ("tma.store_wait(0)", "pass"),
    "two arrivals": (
        "mbarrier.init(output_full.index(slot), count=1)",
        "mbarrier.init(output_full.index(slot), count=2)",
    ),
    "a type": ("store(O_last.to(dtype))", "store(O_last)"),
    "a second term not waited for": (SECOND, SECOND.replace("(0", "(2")),
    "a shape": ("WIDE_LEFT), k, S", "WIDE_LEFT), k.permute((1, 0)), S"),
}
DR_WAIT = "dS, dR = warpgroup_mma_wait(0, deps=[dS, dR])"
ADJOINT = {
    "k released before its last product": (RELEASE, "pass", DR_WAIT, f"{RELEASE}; {DR_WAIT}"),
    "dO released while q is read": (OUTPUT_RELEASE, "pass", "beta = rows", f"{OUTPUT_RELEASE}; beta = rows"),
    "no wait for dO": ("mbarrier.wait(output_full.index(out_slot), j // OUTPUT_STAGES & 1)", "pass"),
    "the other ring released": (OUTPUT_RELEASE, RELEASE),
    "dR read too early": (DR_WAIT, DR_WAIT.replace("0", "1")),
}
BROKEN = [*((forward_hopper, n) for n in FORWARD), *((adjoint_hopper, n) for n in ADJOINT)]


@pytest.mark.parametrize(("module", "name"), BROKEN, ids=[name for _, name in BROKEN])
def test_the_emulator_finds_a_broken_walk(module: object, name: str, tmp_path: Path) -> None:
    mutant = rebuilt(module, tmp_path, *({**FORWARD, **ADJOINT}[name]))
    found = []
    for seed in range(3):
        try:
            walk_once(mutant, seed, length=321 - seed % 2)
        except Hazard as hazard:
            found.append(str(hazard))
    assert found


def compiled(kernel: object, constants: dict, maxnreg: int, tmp_path: Path) -> tuple[int, str]:
    """(shared memory, ptxas report) for sm_90."""
    import triton

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name == "rows_desc":
            return f"tensordesc<fp32[64],{NVMMASharedLayout(0, 32, rank=1)!r}>"
        if name.endswith("_desc"):
            block = {"q": [64, 128], "k": [64, 128], "h": [128, 64], "dh": [128, 64]}.get(name[:-5], [64, 64])
            return f"tensordesc<bf16{block},{NVMMASharedLayout(128, 16, rank=2)!r}>"
        wide = name in ("h0_ptr", "ht_ptr", "dht_ptr", "dh0_ptr", "starts_ptr", "carried_ptr", "carry_ptr")
        wide |= name in ("states_ptr", "maps_ptr")
        lists = ("cu_ptr", "offsets_ptr", "source_ptr", "end_ptr", "target_ptr")
        lists = (*lists, "windows_ptr")
        kinds = {**dict.fromkeys(lists, "*i32"), "table_ptr": "*i64", "T": "i32", "chunks_per_row": "i32"}
        return kinds.get(name, "*fp32" if wide else "*bf16")

    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": maxnreg})
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(binary.asm["ptx"])
    # The wheel holds an older and a newer assembler; which one takes this PTX depends on the release.
    tools = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    command = ["-v", "-arch=sm_90a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    runs = [subprocess.run([str(tool), *command], capture_output=True, text=True) for tool in tools]
    report = next(run.stderr for run in runs if run.returncode == 0)
    return binary.metadata.shared, report


OUT = {"HAS_H0": True, "STORE_HT": True, "STORE_H": False, "OUTPUT": True, "SPAN": False, "LEG": 0, "KIND": 0}
REPLAY = {**OUT, "STORE_HT": False, "STORE_H": True, "OUTPUT": False}
END = {"HAS_DHT": True, "STORE_DH0": True, "SPAN": False, "KIND": 0}


@gluon.jit
def split_kernel(x_ptr, high_ptr, rest_ptr):
    at = gl.arange(0, 64, gl.SliceLayout(1, ROWS))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, ROWS))[None, :]
    high, rest = split_terms(gl.load(x_ptr + at), high_ptr.dtype.element_ty)
    gl.store(high_ptr + at, high)
    gl.store(rest_ptr + at, rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_terms_are_what_rounding_leaves_and_takes_away(dtype: torch.dtype) -> None:
    import triton

    element = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    signature = {"x_ptr": "*fp32", "high_ptr": f"*{element}", "rest_ptr": "*fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = GluonASTSource(split_kernel, signature, {}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    torch.manual_seed(0)
    x, high, rest = torch.randn(64, 64), torch.zeros(64, 64, dtype=dtype), torch.zeros(64, 64)
    memory = Memory()
    arguments = [memory.place(t) for t in (x, high, rest)]
    Machine(binary.asm["ptx"], max(binary.metadata.shared, 4), memory).run(0, [*arguments, 0, 0])
    assert torch.equal(high, x.to(dtype))
    assert torch.equal(rest, x - high.float())


FORMS = {
    "forward": (forward_hopper, {**OUT, "LEG": 32}),
    "forward of a short call": (forward_hopper, OUT),
    "full": (forward_hopper, {**OUT, "STORE_H": True}),
    "replay": (forward_hopper, REPLAY),
    "replay of a span": (forward_hopper, {**REPLAY, "SPAN": True}),
    "start states": (forward_hopper, {**REPLAY, "STORE_H": False, "SPAN": True, "LEG": 32}),
    "summary": (forward_hopper, {**OUT, "OUTPUT": False}),
    "adjoint": (adjoint_hopper, END),
    "adjoint of a span": (adjoint_hopper, {**END, "SPAN": True}),
    "forward of pieces": (forward_hopper, {**OUT, "LEG": 32, "KIND": 1}),
    "replay of pieces": (forward_hopper, {**REPLAY, "KIND": 1}),
    "summary of pieces": (forward_hopper, {**REPLAY, "STORE_H": False, "KIND": 2}),
    "adjoint of pieces": (adjoint_hopper, {**END, "KIND": 1}),
    "adjoint summary of pieces": (adjoint_hopper, {**END, "STORE_DH0": False, "KIND": 2}),
}
QUICK = (("forward", False), ("forward of pieces", False), ("replay of a span", True))


SHARED = [(form, True) for form, (_, flags) in FORMS.items() if not flags.get("OUTPUT", True)]


@pytest.mark.parametrize(
    ("form", "shared"),
    [
        pytest.param(form, shared, marks=() if (form, shared) in QUICK else pytest.mark.slow)
        for form, shared in [*((form, False) for form in FORMS), *SHARED]
    ],
)
def test_the_walks_fit_a_multiprocessor_and_run_their_products_in_parallel(
    form: str, shared: bool, tmp_path: Path
) -> None:
    """`shared`: two CTAs on one."""
    module, flags = FORMS[form]
    kernel = module.hopper_forward_kernel if module is forward_hopper else module.hopper_adjoint_kernel
    heads = {"H": 16, "HV": 48, "VARLEN": True, "STAGES": 2 if shared else 3, "OUTPUT_STAGES": 1 if shared else 3}
    absent = [] if flags.get("STORE_H", True) else ["h_desc", "delta_desc", "delta_ptr"]
    absent += [] if flags.get("OUTPUT", True) else ["q_desc", "p_desc", "o_desc", "o_ptr"]
    absent += ["dh_desc", "dr_desc"] if module is adjoint_hopper and flags["KIND"] == 2 else []
    constants = {**heads, **flags, **dict.fromkeys(absent)}
    size, report = compiled(kernel, constants, 128 if shared else 152, tmp_path)
    assert size <= (115712 if shared else 232448)
    assert not re.search(r"C75\d\d|serialized", report), report
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 96


def test_the_map_kernel_fits_twice_on_a_multiprocessor_without_spills(tmp_path: Path) -> None:
    constants = {"H": 2, "HV": 6, "STAGES": 3, "TERMS": MAP_TERMS}
    size, report = compiled(map_hopper.hopper_map_kernel, constants, 128, tmp_path)
    assert size <= 115712
    assert not re.search(r"C75\d\d|serialized", report), report
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 8


def map_once(module: object, seed: int) -> float:
    """Relative error of the map of the second of four pieces of four chunks, of which the third has a window."""
    torch.manual_seed(0)
    chunks, slots = 13, 4
    k = torch.nn.functional.normalize(torch.randn(chunks * 64, 128), dim=-1).half()
    x = (torch.randn(chunks * 64, 64) / 16).half()
    rows, maps = torch.rand(chunks, 320) - 1, torch.zeros(slots, 128, 128)
    table = torch.tensor([[64 * 4 * i, 256 if i < 3 else 64, 4 * i, 0, i, 3 - i, 0, 0] for i in range(slots)])
    windows = torch.tensor([[[w, w]] for w in (-1, -1, 2, -1)])
    arguments = {
        "k_desc": Descriptor(k, [64, 128]), "x_desc": Descriptor(x, [64, 64]),
        "rows_desc": Descriptor(rows.view(-1), [64]), "table_ptr": table, "windows_ptr": windows, "maps_ptr": maps,
    }  # fmt: skip
    gluon_language.run(
        module.hopper_map_kernel, 2 * slots, {**arguments, "H": 1, "HV": 1, "STAGES": 3, "TERMS": 2}, seed
    )
    M = torch.eye(128, dtype=torch.float64)
    for i in range(4, 8):
        part, tile = k[i * 64 : i * 64 + 64].double(), x[i * 64 : i * 64 + 64].double()
        beta, start, end = (rows[i, at : at + 64].double()[:, None] for at in (0, 64, 128))
        E = -start * (part @ M)
        M = M * rows[i, 319].double().exp() + part.T @ (beta * end * (E + tile @ (beta * E)))
    assert not maps[0].any()
    assert not maps[2:].any()
    return ((maps[1] - M).norm() / M.norm()).item()


@pytest.mark.parametrize("seed", range(3))
def test_the_map_of_a_piece_is_right_to_sixteen_bits_in_every_order_of_copies(seed: int) -> None:
    assert map_once(map_hopper, seed) < 2e-5


MAP = {
    "released before the last product": (
        "mbarrier.arrive(empty.index(slot), count=1)", "pass",
        "fence_async_shared()\n        delta", "mbarrier.arrive(empty.index(slot), count=1)\n        delta",
    ),
    "no wait for a copy": ("mbarrier.wait(full.index(slot), i // STAGES & 1)", "pass"),
    "no wait for a release": ("mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)", "pass"),
    "a product not waited for": ("KM = warpgroup_mma_wait(0, deps=[KM])", "KM = warpgroup_mma_wait(2, deps=[KM])"),
    "too few bytes": ("64 * 64 * 2 + 4 * 64 * 4", "64 * 64 * 2 + 3 * 64 * 4"),
    "one term": ("sums = warpgroup_mma(middle, right, sums, is_async=True)", "pass"),
    "the last piece too": ("(before > 0) & (after > 0)", "(before > 0)"),
    "a piece with a window too": ("(after > 0) & whole", "(after > 0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MAP)
def test_the_emulator_finds_a_broken_map(name: str, tmp_path: Path) -> None:
    mutant, found = rebuilt(map_hopper, tmp_path, *MAP[name]), []
    for seed in range(3):
        try:
            assert map_once(mutant, seed) < 2e-5
        except (Hazard, AssertionError) as error:
            found.append(str(error))
    assert found
