"""Fuzzes `ple_gdn.gated_delta_rule`, forward and backward, against the float64 token recurrence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fuzz_runs import main
from harness import STRUCTURES, Failure, Source, Tally, rms, same_bits
from oracles.gdn_dense import gated_delta_rule_dense
from oracles.gdn_terms import gate_gradient_terms
from torch import Tensor

import ple_gdn

INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
# Allowed root mean square of the error, relative: of gates (dg, dbeta) and of everything else. Two to
# three times that of tests/ops, as some of these tensors have a single row to take the mean over.
BUDGETS = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (24e-3, 21e-3),
    torch.float16: (6e-3, 6e-3),
}
# A quantity smaller than this share of its usual size is held to the budget of that size: what is left of a sum of
# terms that cancel carries their rounding.
FLOOR = 0.2
# Keys that are all alike with beta above 1 write and erase the same row again and again: rounding is not damped.
UNDAMPED = 6.0
# dg and dbeta are inner products (`oracles.gdn_terms`) of vectors that the op keeps in q's dtype: how many of its
# roundings are in their two sides. dg = <S', dS'>: S and dS; dbeta = <delta, dR>: S, delta, dS and dR.
ROUNDINGS = {"dg": 2, "dbeta": 4}
# What an error in float32 may be beside that of the recurrence in float32, token by token, where it is past its budget.
# A GPU multiplies by three products of 10-bit parts, cut off and not rounded: five times the error (see test_fuzz.py).
BESIDE_FLOAT32 = {"cpu": 2.0, "cuda": 10.0}
GROUP = 16
GATES = ("plain", "none", "strong", "mixed", "reset")
BETAS = ("sigmoid", "zero", "one", "two", "uniform")
WIDTHS = (16, 32, 48, 64, 80, 128, 192, 256)
HEADS = tuple((heads, ratio) for heads in (1, 2, 3) for ratio in (1, 2, 3, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Structure(NamedTuple):
    """What selects kernels, besides the states and tapes that a call has: on a GPU all groups of a structure share it.

    With packing, use_qk_l2norm and the dtypes of beta and boundaries left to the case, 2,000 cases compile 1,847
    kernels, not 385 (seed 1).
    """

    dtype: torch.dtype
    key_width: int
    value_width: int
    packed: bool
    use_qk_l2norm: bool
    narrow_beta: bool
    heads: int
    ratio: int
    index_dtype: torch.dtype
    prepared: bool  # int64 boundaries as a Packing, whose chunk offsets are int64 too
    aligned: bool  # cu_seqlens; launchers align all else


# (packed, use_qk_l2norm, beta in q's dtype) of eight structures. In this order for the widths of models, so that the
# bfloat16 ones have every pair of the first two.
SHARED = ((1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0))


def structures(seed: int) -> list[Structure]:
    """Those of a GPU: each value of each choice in at least one; which meet, and their order, follow the seed."""
    pick = random.Random(f"gdn/{seed}/structures")

    def mixed(values: Sequence) -> list:
        return pick.sample(values, len(values))

    fp32, bf16, fp16 = DTYPES[:3]
    dtypes = [*[bf16] * 4, *[fp16] * 2, *[fp32] * 2, *mixed([fp32] * 4 + [bf16] * 2 + [fp16] * 2)]
    # 128 is the width of models, and of kernels of its own.
    keys = [128] * 8 + mixed([16, 32, 48, 64, 80, 192, 256, pick.choice((16, 32, 64))])
    shared = [*SHARED, *mixed(SHARED)]
    heads = mixed([*HEADS, *pick.sample(HEADS, STRUCTURES - len(HEADS))])
    packed = mixed([at for at, (is_packed, *_) in enumerate(shared) if is_packed])
    int32, prepared = packed[::2], packed[3::4]
    # Twice the kernels: not of the widest heads, where one takes half a minute to compile.
    unaligned = [next(at for at in half if keys[at] <= 128) for half in (packed[::2], packed[1::2])]
    made = []
    for at, value_width in enumerate([128] * 8 + mixed(WIDTHS)):
        index = (torch.int32 if at in int32 else torch.int64, at in prepared, at not in unaligned)
        made.append(Structure(dtypes[at], keys[at], value_width, *map(bool, shared[at]), *heads[at], *index))
    return mixed(made)


@dataclass
class Case:
    """One call: the tensors given to the op, the float64 leaves of the oracle, what is asked of both."""

    source: Source
    name: str
    given: dict[str, Tensor | None]
    leaves: dict[str, Tensor]
    options: dict[str, object]
    packing: object
    boundaries: tuple[int, ...] | None
    wanted: list[str]
    use_o: bool
    use_state: bool


def _gates(source: Source, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, str]:
    decay, strength = source.choice(GATES, (5, 1, 1, 1, 1)), source.choice(BETAS, (5, 1, 1, 1, 2))
    g = torch.nn.functional.logsigmoid(source.normal(*shape)) / 4
    if decay == "none":
        g = torch.zeros_like(g)
    elif decay == "strong":
        g = g * 0 - source.choice((2.0, 60.0, 87.0))
    elif decay == "mixed":
        g = torch.where(source.uniform(*shape) < 0.4, -80.0, g)
    elif decay == "reset":
        g = torch.where(source.uniform(*shape) < 0.1, -1e4, g)
    beta = {
        "sigmoid": torch.sigmoid(source.normal(*shape)),
        "zero": torch.where(source.uniform(*shape) < 0.5, 0.0, 0.7),
        "one": torch.ones(*shape, dtype=torch.float64),
        "two": torch.full(shape, 2.0, dtype=torch.float64),
        "uniform": 2 * source.uniform(*shape),
    }[strength]
    return g, beta, f"{decay}/{strength}"


def _keys(source: Source, shape: tuple[int, ...], use_qk_l2norm: bool, alike: bool) -> Tensor:
    k = source.normal(*shape)
    if alike:
        k = k[:, :1] + source.choice((0.0, 0.3)) * k
    if source.chance(0.1):
        k = torch.where(source.uniform(*shape[:-1], 1) < 0.3, 0.0, k)
    if not use_qk_l2norm:
        k = torch.nn.functional.normalize(k, dim=-1) * source.choice((1.0, 0.9, 0.3))
    return k


def _workspace(source: Source, sizes: dict[str, int], dtype: torch.dtype, documents: int, **mode: object) -> Tensor:
    """Scratch of exactly the announced size, between guards."""
    # The size follows from T and N alone: T may be more than the last boundary.
    pack = torch.tensor([0] * documents + [sizes["tokens"]])
    widths = (sizes[n] for n in ("H", "HV", "K", "V"))
    return source.scratch("workspace", ple_gdn.gdn_workspace_bytes(pack, *widths, dtype=dtype, **mode))


def _packing(source: Source, boundaries: tuple[int, ...] | None, structure: Structure | None) -> object:
    if boundaries is None:
        return None
    index_dtype = structure.index_dtype if structure else source.choice((torch.int32, torch.int64))
    values = torch.tensor(boundaries, dtype=index_dtype)
    source.aligned = bool(structure) and structure.aligned
    cu_seqlens = source.guarded("cu_seqlens", values)
    if source.chance(0.2):
        cu_seqlens = cu_seqlens.cpu()
    prepared = structure.prepared if structure and index_dtype == torch.int64 else source.chance(0.3)
    return ple_gdn.prepare_varlen(cu_seqlens) if prepared else cu_seqlens


def _make(source: Source, name: str, sizes: dict[str, int], structure: Structure | None) -> Case:
    pick = source.pick
    source.aligned = bool(structure) and source.chance(0.7)
    dtype = structure.dtype if structure else source.choice(DTYPES, (4, 3, 2, 1))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = source.choice((pick.randint(0, 12), pick.randint(13, 90), pick.randint(91, sizes["longest"])), (3, 5, 2))
    packed = structure.packed if structure else source.chance(0.6)
    boundaries = source.boundaries(tokens) if packed else None
    batch = 1 if packed else pick.randint(1, 3)
    documents = batch if boundaries is None else len(boundaries) - 1
    use_qk_l2norm = structure.use_qk_l2norm if structure else source.chance(0.7)
    rows, heads, value_heads = (batch, tokens), sizes["H"], sizes["HV"]
    g, beta, kind = _gates(source, (*rows, value_heads))
    alike = source.chance(0.1)
    kind += "/alike" if alike else ""
    if structure:
        beta_dtype = dtype if structure.narrow_beta else torch.float32
    else:
        beta_dtype = dtype if dtype == torch.float64 else source.choice((torch.float32, dtype))
    state_shape = (documents, value_heads, sizes["K"], sizes["V"])
    values = {
        "q": (source.normal(*rows, heads, sizes["K"]), dtype),
        "k": (_keys(source, (*rows, heads, sizes["K"]), use_qk_l2norm, alike), dtype),
        "v": (source.normal(*rows, value_heads, sizes["V"]), dtype),
        "g": (g, wide),
        "beta": (beta, beta_dtype),
        "initial_state": (source.normal(*state_shape) * source.choice((1.0, 1.0, 30.0)), wide),
    }
    has_state = source.chance(0.5)
    given = {n: source.guarded(n, x.to(d)) for n, (x, d) in values.items() if n != "initial_state" or has_state}
    use_state = source.chance(0.5)
    use_o = not use_state or source.chance(0.8)
    wanted = [n for n in given if source.chance(0.8)] or ["v"]
    options = {
        "scale": source.choice((None, 1.0, -0.3, 0.05)),
        "output_final_state": use_state,
        "use_qk_l2norm": use_qk_l2norm,
        "save_mode": source.choice(("light", "full")),
        "reuse_recompute_tapes": source.choice((True, False, "auto")),
    }
    if packed and documents and dtype != torch.float64 and source.chance(0.2):
        mode = {n: options[n] for n in ("save_mode", "reuse_recompute_tapes")}
        options["workspace"] = _workspace(source, sizes | {"tokens": tokens}, dtype, documents, **mode)
    leaves = {n: given[n].detach().cpu().double() if n in given else torch.zeros(state_shape).double() for n in INPUTS}
    for n in wanted:
        given[n].requires_grad_()
        leaves[n].requires_grad_()
    packing = _packing(source, boundaries, structure)
    name = f"{name} {str(dtype)[6:]} {kind}"
    return Case(source, name, given, leaves, options, packing, boundaries, wanted, use_o, use_state)


def _outputs(case: Case, o: Tensor, final_state: Tensor | None) -> list[Tensor]:
    return [x for x, used in ((o, case.use_o), (final_state, case.use_state)) if used]


def _call(case: Case, tensors: dict[str, Tensor], upstream: list[Tensor] | None) -> tuple[dict, list[Tensor]]:
    """Outputs and gradients by name, and the upstream gradients (made after the first call)."""
    state = {"initial_state": tensors.get("initial_state")}
    five = (tensors[n] for n in INPUTS[:5])
    o, final_state = ple_gdn.gated_delta_rule(*five, **state, cu_seqlens=case.packing, **case.options)
    outputs = _outputs(case, o, final_state)
    if upstream is None:
        names = [n for n, used in (("do", case.use_o), ("dfinal_state", case.use_state)) if used]
        upstream = [case.source.gradient(n, x) for n, x in zip(names, outputs, strict=True)]
    wanted = [tensors[n] for n in case.wanted]
    grads = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    found = dict(zip((f"d{n}" for n in case.wanted), grads, strict=True))
    return {"o": o.detach(), "final_state": None if final_state is None else final_state.detach(), **found}, upstream


def _expected(
    case: Case,
    upstream: list[Tensor],
    dtype: torch.dtype = torch.float64,
    inverse_dtype: torch.dtype | None = None,
    decay: float = 1.0,
) -> dict[str, Tensor]:
    """The recurrence evaluated in `dtype`; with `inverse_dtype` by chunks whose inverse is rounded to it; g times
    `decay`."""
    scale = case.options["scale"]
    scale = case.leaves["q"].shape[-1] ** -0.5 if scale is None else scale
    tensors = {n: x.detach().to(dtype).requires_grad_(x.requires_grad) for n, x in case.leaves.items()}
    leaves = [tensors[n] * decay if n == "g" else tensors[n] for n in INPUTS]
    l2norm = case.options["use_qk_l2norm"]
    o, state = gated_delta_rule_dense(*leaves, case.boundaries, scale, l2norm, inverse_dtype)
    flat = [dy.cpu().to(dtype) for dy in upstream]
    pairs = [(x, dy) for x, dy in zip(_outputs(case, o, state), flat, strict=True) if x.requires_grad]
    wanted = [tensors[n] for n in case.wanted]
    grads = [None] * len(wanted)
    if pairs:
        grads = torch.autograd.grad([x for x, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
    return {"o": o.detach(), "final_state": state.detach()} | {
        f"d{n}": d for n, d in zip(case.wanted, grads, strict=True)
    }


def _conditioned(case: Case, upstream: list[Tensor], name: str, want: Tensor, held: Tensor) -> float:
    """Error that this case's terms, which cancel, leave in `name` in q's dtype: that of the recurrence in float32,
    token by token, in units of q's dtype. The op rounds tapes where the recurrence rounds nothing: a quarter of the
    units for 16 bits, and BESIDE_FLOAT32 times the float32 one, is below every budget where nothing cancels (3e-7: 5e-3
    of 24e-3)."""
    units = torch.finfo(case.given["q"].dtype).eps / torch.finfo(torch.float32).eps
    found = _expected(case, upstream, torch.float32)[name]
    least = BESIDE_FLOAT32[case.given["q"].device.type]
    return max(least, units / 4) * rms(torch.where(held, found.double() - want, 0.0)) if found is not None else 0.0


def _rounded_inverse(case: Case, upstream: list[Tensor], name: str, want: Tensor, held: Tensor) -> float:
    """Twice the error that rounding X to q's dtype, as its tape is, leaves in `name` by itself."""
    found = _expected(case, upstream, inverse_dtype=case.given["q"].dtype)[name]
    return 2.0 * rms(torch.where(held, found - want, 0.0)) if found is not None else 0.0


def _rounded_terms(case: Case, upstream: list[Tensor], name: str, held: Tensor) -> float:
    """Error that an inner product's terms leave in dg and dbeta where they cancel: half a unit of q's dtype for each
    rounding, times the root of the sum of squares of the terms."""
    if name not in ROUNDINGS:
        return 0.0
    leaves = [case.leaves[n].detach() for n in INPUTS]
    arriving = dict(zip([n for n, used in (("o", case.use_o), ("s", case.use_state)) if used], upstream, strict=True))
    do = arriving["o"].cpu().double() if case.use_o else torch.zeros_like(leaves[2])
    dfinal_state = arriving["s"].cpu().double() if case.use_state else torch.zeros_like(leaves[5])
    scale = case.options["scale"]
    scale = leaves[0].shape[-1] ** -0.5 if scale is None else scale
    options = (case.boundaries, scale, case.options["use_qk_l2norm"])
    _, roots = gate_gradient_terms(*leaves, *options, do, dfinal_state)
    unit = torch.finfo(case.given["q"].dtype).eps / 2
    return ROUNDINGS[name] * unit * rms(torch.where(held, roots[list(ROUNDINGS).index(name)], 0.0))


def _lost_decays(case: Case, upstream: list[Tensor], name: str) -> float:
    """What float16 leaves out of dinitial_state, which has no size of its own there: a row times its decay since the
    chunk began is 0 below float16's smallest number, 6e-8 of what the row brings without decay."""
    if name != "dinitial_state" or case.given["q"].dtype != torch.float16:
        return 0.0
    least = torch.finfo(torch.float16).tiny * torch.finfo(torch.float16).eps
    return least * rms(_expected(case, upstream, decay=0.0)[name])


def _judge(
    tally: Tally, case: Case, actual: dict, expected: dict[str, Tensor], usual: dict[str, float], upstream: list[Tensor]
) -> None:
    factor = UNDAMPED if case.name.endswith(("two/alike", "uniform/alike")) else 1.0
    gates, wide = (factor * budget for budget in BUDGETS[case.given["q"].dtype])
    for name, got in actual.items():
        want = expected[name]
        if got is None:
            if name != "final_state" and want is not None and rms(want) > 0:
                tally.failures.append(Failure(case.name, name, "no gradient"))
            continue
        want = torch.zeros(got.shape).double() if want is None else want
        like = {"o": case.given["v"], "final_state": got}.get(name, case.given.get(name[1:]))
        if got.shape != want.shape or got.dtype != like.dtype or not got.is_contiguous():
            tally.failures.append(Failure(case.name, name, f"{got.dtype} {tuple(got.shape)} {got.stride()}"))
            continue
        tally.compared += 1
        if not got.numel():
            continue
        # What float16 cannot hold is infinite, and right so.
        held = want.abs() < 0.97 * torch.finfo(got.dtype).max
        got, want = torch.where(held, got.cpu().double(), 0.0), torch.where(held, want, 0.0)
        size = max(rms(want), FLOOR * usual.get(name, 0.0), 1e-30)
        share = rms(got - want) / size / (gates if name in ("dg", "dbeta") else wide)
        if share > 1 and case.given["q"].dtype != torch.float64:
            left = [measure(case, upstream, name, want, held) for measure in (_conditioned, _rounded_inverse)]
            left += [_rounded_terms(case, upstream, name, held), _lost_decays(case, upstream, name), 1e-30]
            share = min(share, rms(got - want) / max(left))
        tally.note(name, share)
        if not share <= 1:
            tally.failures.append(Failure(case.name, name, f"{share:.2f} of the allowed error (size {size:.2e})"))


def _check_layout(tally: Tally, case: Case, actual: dict, upstream: list[Tensor]) -> None:
    """Dense copies of inputs and upstream gradients must give the same bits."""
    dense = {n: x.detach().contiguous().clone().requires_grad_(x.requires_grad) for n, x in case.given.items()}
    again, _ = _call(case, dense, [dy.contiguous().clone() for dy in upstream])
    for name, got in actual.items():
        if got is not None and not same_bits(got, again[name]):
            tally.failures.append(Failure(case.name, name, "other bits than from dense copies"))


def _sizes(source: Source, structure: Structure | None) -> dict[str, int]:
    if structure:
        key_width, value_width, heads, ratio = (
            getattr(structure, n) for n in ("key_width", "value_width", "heads", "ratio")
        )
    else:  # CPU time follows the widths
        key_width, value_width = (source.choice(WIDTHS, (12, 5, 2, 1, 1, 1, 1, 1)) for _ in range(2))
        heads, ratio = source.choice((1, 2, 3)), source.choice((1, 2, 3, 4))
    return {"H": heads, "HV": heads * ratio, "K": key_width, "V": value_width, "longest": source.choice((110, 220))}


def fuzz(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """Adds a group. Where its time ends it is judged by the cases it has: half of them at least, for what is usual."""
    structure = None if device.type == "cpu" else structures(seed)[group % STRUCTURES]
    sizes = _sizes(Source("gdn", seed, group, device=device), structure)
    cases, results, expected, upstreams = [], [], [], []
    for at in range(GROUP):
        if tally.late():
            break
        name = f"seed {seed} group {group} case {at} K={sizes['K']} V={sizes['V']}"
        case = _make(Source("gdn", seed, group, at, device=device), name, sizes, structure)
        actual, upstream = _call(case, case.given, None)
        if case.source.chance(0.2):
            _check_layout(tally, case, actual, upstream)
        for touched in case.source.touched():
            tally.failures.append(Failure(case.name, touched, "written, or its guard was"))
        cases.append(case)
        results.append(actual)
        expected.append(_expected(case, upstream))
        upstreams.append(upstream)
    if len(cases) < GROUP // 2:
        return
    usual, judged = {}, len(tally.failures)
    for name in ("o", "final_state", *(f"d{n}" for n in INPUTS)):
        found = [rms(e[name]) for e in expected if e.get(name) is not None]
        usual[name] = sorted(found)[len(found) // 2] if found else 0.0
    for case, actual, wanted, upstream in zip(cases, results, expected, upstreams, strict=True):
        _judge(tally, case, actual, wanted, usual, upstream)
        tally.guards += case.source.guards
        tally.kinds[str(case.given["q"].dtype)[6:]] += 1
    tally.cases += len(cases)
    if len(cases) < GROUP:
        for failure in tally.failures[judged:]:
            failure.detail += f", judged beside the first {len(cases)} cases of its group alone"


if __name__ == "__main__":
    main(fuzz)
