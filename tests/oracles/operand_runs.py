"""The Hopper operand kernel, and the one that rounds X anew: compiled for sm_90; inputs for the first, and a run of all
its programs in `ptx_machine`."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ple_gdn.ops.gated_delta_rule import rounding_hopper

from .ptx_machine import Machine, Memory

LENGTHS = (70, 0, 1, 64)


def compiled(
    module: object, H: int, HV: int, *, inverse: bool = True, varlen: bool = True, l2norm: bool = True,
    element: str = "bf16",
) -> object:  # fmt: skip
    kernel = module.hopper_operands_kernel
    names = kernel.arg_names
    constants = {"H": H, "HV": HV, "VARLEN": varlen, "L2NORM": l2norm, "INVERSE": inverse}
    constants |= dict.fromkeys(() if varlen else ("cu_ptr", "offsets_ptr"))
    constants |= dict.fromkeys(() if inverse else ("g_ptr", "x_ptr"))
    kinds = dict.fromkeys(("q_ptr", "k_ptr", "x_ptr", "p_ptr"), f"*{element}") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("cu_ptr", "offsets_ptr"), "*i32")
    kind = lambda n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")  # noqa: E731
    signature = {n: "constexpr" if n in constants else kind(n) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 128})


def compiled_rounding(H: int, HV: int, *, items: int = rounding_hopper.MARKS, element: str = "bf16") -> object:
    kernel = rounding_hopper.hopper_rounding_kernel
    names = kernel.arg_names
    constants = {"H": H, "HV": HV, "VARLEN": True, "ITEMS": items}
    kinds = {"k_ptr": f"*{element}", "x_ptr": f"*{element}", "cu_ptr": "*i32", "offsets_ptr": "*i32"}
    kind = lambda n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")  # noqa: E731
    signature = {n: "constexpr" if n in constants else kind(n) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def draw(H: int, HV: int, mode: str = "plain") -> dict[str, torch.Tensor]:
    """Inputs; what lies past the last document is NaN."""
    torch.manual_seed(0)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    T = int(cu[-1]) + 5
    q, k = torch.randn(T, H, 128), torch.randn(T, H, 128)
    g, beta = torch.nn.functional.logsigmoid(torch.randn(T, HV)) / 4, torch.rand(T, HV)
    if mode == "near equal keys":
        k, g, beta = torch.randn(1, H, 128) + 0.05 * k, torch.zeros(T, HV), torch.ones(T, HV)
    if mode == "keys against each other":
        k = torch.where(torch.rand(T, 1, 1) < 0.5, -1.0, 1.0) * (torch.randn(1, H, 128) + 0.05 * k)
    if mode == "strong decay":
        g = -60 * torch.rand(T, HV)
    x = {"q": q.bfloat16(), "k": k.bfloat16(), "g": g, "beta": beta}
    for t in x.values():
        t[int(cu[-1]) :] = float("nan")
    counts = [-(-n // 64) for n in LENGTHS]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return {**x, "cu": cu, "offsets": offsets}


def outputs(T: int, H: int, HV: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    chunks = T // 64 + len(LENGTHS)
    empty = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
    return {
        "gcum": empty(T, HV), "k_rstd": empty(T, H), "qscale": empty(T, H), "x": empty(T, HV, 64, dtype=dtype),
        "table": empty(chunks, HV, 5, 64), "p": empty(chunks, HV, 64, 64, dtype=dtype),
    }  # fmt: skip


def run(binary: object, x: dict[str, torch.Tensor], H: int, HV: int, tapes: dict | None = None) -> dict:
    """Every program; `tapes` of an earlier run for a kernel that reads them."""
    out = outputs(len(x["q"]), H, HV, x["q"].dtype)
    memory, inverse = Memory(), tapes is None
    out |= {} if inverse else {n: tapes[n] for n in ("gcum", "k_rstd", "qscale")}
    g, X = ([x["g"]], [out["x"]]) if inverse else ([], [])
    rows = [out[n] for n in ("gcum", "k_rstd", "qscale")]
    tensors = [x["q"], x["k"], *g, x["beta"], x["cu"], x["offsets"], *rows, *X, out["table"], out["p"]]
    arguments = [memory.place(t) for t in tensors] + [float(128**-0.5), len(LENGTHS), len(x["q"]), 1, 0, 0]
    machine = Machine(binary.asm["ptx"], binary.metadata.shared, memory)
    for program in range(len(out["table"]) * H * -(-HV // H // 4)):
        machine.run(program, arguments)
    return out
