"""What `oracles.racecheck` accepts of racecheck's reports, on code compiled for sm_90 without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from oracles.racecheck import (  # noqa: E402
    ORDERED,
    REFUSED,
    UNDECIDABLE,
    Access,
    Verdict,
    classified,
    judged,
    parsed,
)
from oracles.sass import Code, Unreadable, disassembly, kernels  # noqa: E402
from oracles.scripts import load_script  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402

from ple_gdn.ops.gated_delta_rule import adjoint_hopper, gradients_hopper  # noqa: E402
from ple_gdn.ops.gated_delta_rule.hopper_gradients import REGISTERS  # noqa: E402

script = load_script("tests/cuda/sanitized.py")

# Of a run on an H200, shortened.
LOG = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at hopper_gradient_kernel+0x140 in gradients_hopper.py:76
=========     and Write access at hopper_gradient_kernel+0xdbe0 in gradients_hopper.py:76 [5 hazards]
=========     and Write access at hopper_gradient_kernel+0x18510 in gradients_hopper.py:106 [7 hazards]
=========
========= Error: Race reported between Read access at hopper_forward_kernel+0x1f0 in forward_hopper.py:184
=========     and Write access at hopper_forward_kernel+0x1050 in forward_hopper.py:184 [4 hazards]
=========
gated_delta_rule: 32 results
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_a_report_is_read_to_the_last_line() -> None:
    gradient, forward = (f"hopper_{name}_kernel" for name in ("gradient", "forward"))
    assert parsed(LOG) == (
        [
            [Access("Read", gradient, 0x140), Access("Write", gradient, 0xDBE0), Access("Write", gradient, 0x18510)],
            [Access("Read", forward, 0x1F0), Access("Write", forward, 0x1050)],
        ],
        [],
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 hazards displayed", "3 hazards displayed"),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", ""),
        ("(2 errors, 0 warnings)", "(2 errors, 0 warnings), 7 not displayed"),
        ("    and Write", "    after Write"),
        ("========= COMPUTE-SANITIZER\n", "========= COMPUTE-SANITIZER\n========= Internal error\n"),
    ],
)
def test_nothing_the_tool_says_is_passed_over(old: str, new: str) -> None:
    assert parsed(LOG.replace(old, new, 1)).strange


def compiled(kernel: object, kind: Callable[[str], str], constants: dict, maxnreg: int) -> bytes:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": 4, "maxnreg": maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def kind(name: str, wide: tuple[str, ...], columns: int) -> str:
    if name == "rows_desc":
        return f"tensordesc<fp32[64],{NVMMASharedLayout(0, 32, rank=1)!r}>"
    if name.endswith("_desc"):
        block = [128 if name in ("h_desc", "dh_desc") else 64, 128 if name in ("q_desc", "k_desc") else columns]
        return f"tensordesc<bf16{block},{NVMMASharedLayout(128, 16, rank=2)!r}>"
    if name.endswith("_ptr"):
        return {"cu_ptr": "*i64", "offsets_ptr": "*i32"}.get(name, "*fp32" if name in wide else "*bf16")
    return "fp32" if name == "inverse_scale" else "i32"


def adjoint() -> bytes:
    flags = {"H": 1, "HV": 2, "VARLEN": True, "HAS_DHT": True, "STORE_DH0": True, "STAGES": 2, "OUTPUT_STAGES": 2}
    flags |= {"SPAN": False, "KIND": 0}
    return compiled(
        adjoint_hopper.hopper_adjoint_kernel, lambda name: kind(name, ("dht_ptr", "dh0_ptr"), 64), flags, 152
    )


def gradient() -> bytes:
    flags = {"H": 1, "HV": 2, "VARLEN": True, "SPAN": False, "L2NORM": True}
    kernel, constants = gradients_hopper.hopper_gradient_kernel, dict(REGISTERS)
    del constants["num_warps"]
    maxnreg = constants.pop("maxnreg")
    wide = ("k_rstd_ptr", "qscale_ptr", "dg_ptr", "dbeta_ptr")
    return compiled(kernel, lambda name: kind(name, wide, 128), {**flags, **constants}, maxnreg)


KERNELS = {
    "dispatch_kernel": lambda: compiled(script.dispatch_kernel, lambda _: "*fp32", {}, 64),
    "hand_over_kernel": lambda: compiled(script.hand_over_kernel, lambda _: "*fp32", {"SYNCHRONISE": False}, 64),
    "hand_over_kernel ordered": lambda: compiled(script.hand_over_kernel, lambda _: "*fp32", {"SYNCHRONISE": True}, 64),
    "swap_kernel": lambda: compiled(script.swap_kernel, lambda _: "*fp32", {}, 64),
    "hopper_adjoint_kernel": adjoint,
    "hopper_gradient_kernel": gradient,
}


@pytest.fixture(scope="module")
def text_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Disassembly of a kernel, and the folder where its cubin lies as in Triton's cache."""
    made: dict[str, tuple[str, Path]] = {}

    def get(name: str) -> tuple[str, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            (folder / "hash").mkdir()
            cubin = folder / "hash" / f"{name.split()[0]}.cubin"
            cubin.write_bytes(KERNELS[name]())
            made[name] = disassembly(cubin), folder
        return made[name]

    return get


def code_of(text: str) -> Code:
    (code,) = kernels(text)
    return code


def constant(operands: str) -> int:
    return int((re.search(r"\+(0x[0-9a-f]+)\]", operands) or [0, "0x0"])[1], 16)


def dispatch(code: Code) -> list[tuple[int, int]]:
    """The workers' read of the partition's number against every store to the bytes it may read."""
    (read,) = [x for x in code.instructions if x.name == "LDS.U8"]
    first = constant(read.operands) + 4  # the index is that of the warp, four of which never read
    stores = [x for x in code.instructions if x.name.startswith("STS") and 0 <= constant(x.operands) - first < 12]
    return [(read.offset, x.offset) for x in stores]


def reported(name: str, pairs: list[tuple[int, int]]) -> str:
    lines = ["COMPUTE-SANITIZER"]
    for read, write in pairs:
        lines.append(f"Error: Race reported between Read access at {name}+{read:#x} in x.py:1")
        lines += [f"    and Write access at {name}+{write:#x} in x.py:1 [5 hazards]", ""]
    lines.append(f"RACECHECK SUMMARY: {len(pairs)} hazards displayed ({len(pairs)} errors, 0 warnings)")
    return "\n".join(f"========= {line}" for line in lines)


# Before the swap kernel's addresses stand those of the cells, on one side of the dispatch only.
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "swap_kernel"])
def test_the_dispatch_of_partitions_is_in_order(name: str, text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, folder = text_of(name)
    pairs = dispatch(code_of(text))
    assert len(pairs) >= 2  # to start the workers and to end them
    assert judged(reported(name.split()[0], pairs), folder) == Verdict([], [])
    assert judged(reported("another_kernel", pairs), folder).refused


def test_captures_are_in_order(text_of: Callable[[str], tuple[str, Path]]) -> None:
    code = code_of(text_of("dispatch_kernel")[0])
    (read,) = [x for x in code.instructions if x.name == "LDS"]
    writes = [x for x in code.instructions if x.name == "STS" and x.operands.startswith(read.operands[4:].strip())]
    assert len(writes) == 1
    assert code.apart(read.offset, writes[0].offset)


@pytest.mark.parametrize("name", ["hand_over_kernel", "hand_over_kernel ordered"])
def test_races_between_partitions_are_set_aside(name: str, text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, folder = text_of(name)
    code = code_of(text)
    reads = [x.offset for x in code.instructions if x.name == "LDS.128"]
    (write,) = [x.offset for x in code.instructions if x.name == "STS.64"]
    races = [(read, write) for read in reads]
    verdict = judged(reported("hand_over_kernel", [*dispatch(code), *races]), folder)
    assert len(verdict.undecidable) == len(races) == 2
    assert verdict.refused == []


def test_a_race_within_a_partition_is_refused(text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, folder = text_of("swap_kernel")
    code = code_of(text)
    own = [x for x in code.instructions if re.match(r"(LDS|STS)$", x.name) and "UR" not in x.operands]
    write, read = own
    assert (write.name, read.name) == ("STS", "LDS")
    assert [code.partitions(x.offset) for x in own] == [{0}, {0}]
    verdict = judged(reported("swap_kernel", [(read.offset, write.offset)]), folder)
    assert len(verdict.refused) == 1
    assert verdict.undecidable == []


def test_partitions_that_cannot_be_told_excuse_nothing(text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, _ = text_of("hand_over_kernel")

    def kinds(changed: str) -> set[str]:
        code = code_of(changed)
        reads = [x.offset for x in code.instructions if x.name == "LDS.128"]
        (write,) = [x.offset for x in code.instructions if x.name == "STS.64"]
        races = [[Access("Read", code.name, read), Access("Write", code.name, write)] for read in reads]
        return {classified(race, [code]) for race in races}

    assert kinds(text) == {UNDECIDABLE}
    assert kinds(text.replace("USETMAXREG", "NOP")) == {REFUSED}
    assert kinds(text.replace("LDS.U8", "LDS.U16")) == {REFUSED}
    # Code that a second partition reaches, too: what follows the worker's loads goes on to the default one's store.
    store = re.search(r"(?m)^.*STS\.64.*$", text)
    meeting = text[: store.start()] + ".L_x_999:\n" + text[store.start() :]
    assert kinds(re.sub(r"(?m)^(.*\*/ +)STG\.E\.128.*$", r"\1BRA `(.L_x_999) ;", meeting)) == {REFUSED}


def test_the_roles_of_the_gradient_kernel_are_told_apart(text_of: Callable[[str], tuple[str, Path]]) -> None:
    code = code_of(text_of("hopper_gradient_kernel")[0])
    shared = [x for x in code.instructions if x.name.startswith(("LDS", "STS"))]
    roles: dict[frozenset[int], list[Access]] = {}
    for x in shared:
        kind = "Read" if x.name.startswith("LDS") else "Write"
        roles.setdefault(frozenset(code.partitions(x.offset)), []).append(Access(kind, code.name, x.offset))
    alone = [accesses for role, accesses in roles.items() if len(role) == 1 and len(accesses) > 1]
    assert len(alone) >= 4
    for one in alone:
        for other in alone:
            reads, writes = ([x for x in role if x.kind == k] for role, k in ((one, "Read"), (other, "Write")))
            kinds = {classified([read, write], [code]) for read in reads[:9] for write in writes[:9]}
            assert kinds <= ({REFUSED, ORDERED} if one is other else {UNDECIDABLE, ORDERED})


# Of a run on an H200: between the copying and computing roles, and of the hand-over that an mbarrier orders.
REPORTED = [
    ("hopper_gradient_kernel", [("Read", 0xD710), ("Write", 0x15F00)]),
    ("hopper_gradient_kernel", [("Read", 0xD900), ("Write", 0x11C60), ("Write", 0x11C70)]),
    ("hand_over_kernel ordered", [("Write", 0x620), ("Read", 0x240), ("Read", 0x250)]),
]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="offsets of Triton 3.6's code")
@pytest.mark.parametrize(("name", "offsets"), REPORTED)
def test_reports_of_a_run_are_between_partitions(
    name: str, offsets: list[tuple[str, int]], text_of: Callable[[str], tuple[str, Path]]
) -> None:
    code = code_of(text_of(name)[0])
    assert classified([Access(kind, code.name, offset) for kind, offset in offsets], [code]) == UNDECIDABLE


WHOLE = re.compile(r"BAR\.SYNC\S* 0x1 ;")


def without(text: str, *barriers: re.Match, instead: str = "NOP ;") -> str:
    for match in sorted(barriers, key=lambda m: -m.start()):
        text = text[: match.start()] + instead + text[match.end() :]
    return text


def test_the_barriers_of_the_dispatch_are_what_counts(text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, _ = text_of("dispatch_kernel")
    pairs = dispatch(code_of(text))
    found = list(WHOLE.finditer(text))

    def in_order(changed: str) -> bool:
        code = code_of(changed)
        return all(code.apart(*pair) for pair in pairs)

    assert in_order(text)
    spare = [match for match in found if in_order(without(text, match))]
    # Of the default warps' four one may go: they then end early, and a thread that ends is waited for no more.
    assert len(spare) == 4
    assert len(found) - len(spare) >= 7
    assert not in_order(without(text, *spare[:2]))
    assert not in_order(without(text, found[0], instead="BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;"))
    with pytest.raises(Unreadable, match="run time"):
        code_of(without(text, found[0], instead="BAR.SYNC.DEFER_BLOCKING R4 ;"))


def test_every_variant_of_a_kernel_has_to_be_in_order(text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, _ = text_of("dispatch_kernel")
    last = [match for match in WHOLE.finditer(text) if match.end() < text.index("LDS.U8")][-1]
    whole, broken = code_of(text), code_of(without(text, last))
    read, write = dispatch(whole)[0]
    race = [Access("Read", whole.name, read), Access("Write", whole.name, write)]
    assert classified(race, [whole]) == ORDERED
    assert classified(race, [whole, broken]) == REFUSED
    assert classified(race, []) == REFUSED
    assert classified([race[0], race[0]._replace(kind="Write")], [whole]) == REFUSED  # a load does not write


def test_a_barrier_does_not_wait_for_copies_and_products(text_of: Callable[[str], tuple[str, Path]]) -> None:
    text, _ = text_of("hopper_adjoint_kernel")
    code = code_of(text)
    read, _ = dispatch(code)[0]
    others = [x for x in code.instructions if x.name.startswith(("UTMALDG", "HGMMA", "SYNCS"))]
    assert len(others) >= 20
    assert not any(code.apart(read, x.offset) for x in others)
    assert all(x.may("Write") for x in others)
