"""Run with TRITON_INTERPRET=1: the Hopper walks in the emulator, inside the CUDA launchers, on CPU tensors.

Prints, as JSON, relative RMS errors against the float64 recurrence of the plain walks and of the Hopper walks; with
"segments" for the save mode, of one call and of a context of one rank that cuts its documents in P = 1 and 2; with
"spans", of a backward in one span that keeps h and delta and of one in many that was given nothing, after bits; with
"pieces", of documents walked whole and in pieces of one chunk, with "windows" in pieces of two, of which those of one
head have windows of one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles import gluon_language
from oracles.gdn import NAMES, make_case, oracle, relative_rms, run_front
from oracles.gluon_emulator import Descriptor

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs, hopper_gradients, hopper_walks, launch, walks
from ple_gdn.ops.kcp import gated_delta_rule as ranks
from ple_gdn.ops.kcp import launch as rank_launch
from ple_gdn.ops.triton_launch import TensorMap

TOKENS = ("q", "k", "v", "g", "beta", "do")


class Emulated:
    """Stands for a compiled kernel: `kernel[grid](...)` runs every program in the emulator."""

    def __init__(self, kernel: object, seed: int) -> None:
        self.kernel, self.seed = kernel, seed

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def call(*arguments: object, num_warps: int, maxnreg: int, **constants: object) -> None:
            named = dict(zip(self.kernel.arg_names, arguments, strict=False))
            gluon_language.run(self.kernel, grid[0], {**named, **constants}, self.seed)

        return call


def emulate(seed: int) -> None:
    TensorMap.descriptor = lambda self: Descriptor(self.tensor.view(self.shape), self.box.block)
    for name in ("hopper_forward_kernel", "hopper_adjoint_kernel", "hopper_map_kernel"):
        setattr(hopper_walks, name, Emulated(getattr(hopper_walks, name), seed))
    kernel = hopper_gradients.hopper_gradient_kernel
    hopper_gradients.hopper_gradient_kernel = Emulated(kernel, seed)
    # Fewer CTAs than chunks: each takes several in turn.
    hopper_gradients.SM_COUNT = 2


def run(case: object, hopper: bool, save_mode: str, l2norm: bool = True) -> dict[str, torch.Tensor]:
    walks.uses_hopper = rank_launch.uses_hopper = lambda p: hopper
    boundaries = torch.tensor(case.boundaries)
    shared = (*case[:6], boundaries, None, None)
    scale = case.q.shape[-1] ** -0.5
    o, final_state, *tapes = launch.launch_forward(*shared, scale, True, l2norm, save_mode)
    chunks = int(((boundaries.diff() + 63) // 64).sum())
    tapes[4] = tapes[4][:chunks] if save_mode == "full" else tapes[4]
    out = dict(zip(("o", "final_state"), (o, final_state), strict=True))
    if save_mode == "full":
        out |= {"h": tapes[4], "delta": tapes[5]}
    gradients = launch.launch_backward(case.do, case.dfinal_state, *shared, *tapes, scale, l2norm)
    return out | dict(zip(NAMES[2:], gradients, strict=True))


def measure(
    lengths: tuple[int, ...], save_mode: str, seed: int, heads: int, value_heads: int, l2norm: bool
) -> dict[str, list[float]]:
    sizes = {"heads": heads, "value_heads": value_heads, "key_width": 128, "value_width": 128}
    case = make_case(lengths, trailing=5, dtype=torch.float16, **sizes)
    if not l2norm:
        case = case._replace(k=torch.nn.functional.normalize(case.k.float(), dim=-1).half())
    emulate(seed)
    expected = oracle(case, 128**-0.5, l2norm)
    # What lies past the last document may be anything: the boxes of the last chunk reach into it.
    for t in (*case[:5], case.do):
        t[:, case.boundaries[-1] :] = float("nan")
    plain, ours = run(case, False, save_mode, l2norm), run(case, True, save_mode, l2norm)
    errors = {n: [relative_rms(r[n], expected[n]) for r in (plain, ours)] for n in NAMES}
    return errors | {n: [0.0, relative_rms(ours[n], plain[n].double())] for n in plain if n not in NAMES}


def measure_equal_keys(lengths: tuple[int, ...], seed: int, heads: int, value_heads: int) -> dict[str, list[float]]:
    """All rows of an update cancel but the last. One 16-bit term leaves 2.1e-3 of dbeta, where float16 holds 5e-4."""
    sizes = {"heads": heads, "value_heads": value_heads, "key_width": 128, "value_width": 128}
    case = make_case(lengths, dtype=torch.float16, mode="equal_keys", **sizes)
    emulate(seed)
    expected = oracle(case, 128**-0.5, True)
    walk = hopper_walks.forward_walk

    def marked(p: object, chunks: object, *arguments: object, **options: object) -> None:
        chunks.table.view(torch.int32)[..., 319] |= 1  # as the operand kernel does
        walk(p, chunks, *arguments, **options)

    hopper_walks.forward_walk = marked
    plain, ours = run(case, False, "light"), run(case, True, "light")
    assert relative_rms(plain["dbeta"], expected["dbeta"]) < 8e-4
    return {n: [1e-3, relative_rms(ours[n], expected[n])] for n in NAMES}


def over_one_rank(case: object, P: int) -> dict[str, torch.Tensor]:
    bounds = list(case.boundaries)
    ctx = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(bounds, 1), None, 0, "cpu", p_rule=P)
    ctx.prepare(case.q.shape[2], case.v.shape[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_runs_of", lambda _: (rank_launch.DeviceForwardRun, rank_launch.DeviceBackwardRun))
        return run_front(case, cp=ctx, packed=False)


def measure_segments(lengths: tuple[int, ...], seed: int) -> dict[str, list[float]]:
    """Relative RMS of one call and of P = 2; P = 1 has the bits of the call."""
    sizes = {"heads": 1, "value_heads": 1, "key_width": 128, "value_width": 128}
    case = make_case(lengths, dtype=torch.float16, **sizes)
    emulate(seed)
    single, expected = run(case, True, "light"), oracle(case, 128**-0.5, True)
    whole, cut = over_one_rank(case, 1), over_one_rank(case, 2)
    for name in NAMES:
        assert torch.equal(whole[name], single[name]), name
    return {n: [relative_rms(r[n], expected[n]) for r in (single, cut)] for n in NAMES}


def measure_spans(lengths: tuple[int, ...], seed: int) -> dict[str, list[float]]:
    """A backward in spans of one chunk, in legs of one, has the bits of one that kept everything."""
    case = make_case(lengths, dtype=torch.float16, heads=1, value_heads=1, key_width=128, value_width=128)
    emulate(seed)
    kept, expected = run(case, True, "full"), oracle(case, 128**-0.5, True)
    configs.SPANS = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)
    light, replayed = run(case, True, "light"), run(case, True, "none")
    for name in NAMES:
        assert torch.equal(light[name], kept[name]), name
        assert torch.equal(replayed[name], kept[name]), name
    return {n: [relative_rms(r[n], expected[n]) for r in (kept, light)] for n in NAMES}


def measure_windows(lengths: tuple[int, ...], seed: int, heads: int, value_heads: int) -> dict[str, list[float]]:
    """Relative RMS of documents walked whole and in pieces of two chunks, the last head decaying by e^-128 a chunk.
    Spans change no bit."""
    sizes = {"heads": heads, "value_heads": value_heads, "key_width": 128, "value_width": 128}
    case = make_case(lengths, dtype=torch.float16, **sizes)
    case.g[..., -1] = -2.0
    emulate(seed)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    expected, whole = oracle(case, 128**-0.5, True), run(case, True, "light")
    configs.CUTS = ((1 << 30, 2),)
    cut = run(case, True, "light")
    configs.SPANS = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)
    for name, again in run(case, True, "light").items():
        assert torch.equal(again, cut[name]), name
    return {n: [relative_rms(r[n], expected[n]) for r in (whole, cut)] for n in NAMES}


def measure_pieces(lengths: tuple[int, ...], seed: int, heads: int, value_heads: int) -> dict[str, list[float]]:
    """Relative RMS of documents walked whole and in pieces; packed and alone, whole and in spans, pieces have the same
    bits."""
    sizes = {"heads": heads, "value_heads": value_heads, "key_width": 128, "value_width": 128}
    case = make_case(lengths, trailing=5, dtype=torch.float16, **sizes)
    emulate(seed)
    expected = oracle(case, 128**-0.5, True)
    for t in (*case[:5], case.do):
        t[:, case.boundaries[-1] :] = float("nan")
    whole = run(case, True, "light")
    configs.CUTS = ((1 << 30, 1),)
    cut = run(case, True, "light")
    configs.SPANS = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)
    last = case._replace(**{name: getattr(case, name)[:, case.boundaries[-2] : case.boundaries[-1]] for name in TOKENS})
    states = {name: getattr(case, name)[-1:] for name in ("initial_state", "dfinal_state")}
    alone = run(last._replace(**states, boundaries=(0, lengths[-1])), True, "light")
    for name in NAMES:
        ours = cut[name][-1:] if "state" in name else cut[name][:, case.boundaries[-2] : case.boundaries[-1]]
        assert torch.equal(alone[name], ours), name
    return {n: [relative_rms(r[n], expected[n]) for r in (whole, cut)] for n in NAMES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    lengths = tuple(map(int, sys.argv[1].split(",")))
    mode, seed, heads, value_heads, l2norm = sys.argv[2], *map(int, sys.argv[3:])
    if mode == "pieces":
        print(json.dumps(measure_pieces(lengths, seed, heads, value_heads)))
    elif mode == "equal_keys":
        print(json.dumps(measure_equal_keys(lengths, seed, heads, value_heads)))
    elif mode == "windows":
        print(json.dumps(measure_windows(lengths, seed, heads, value_heads)))
    elif mode == "spans":
        print(json.dumps(measure_spans(lengths, seed)))
    elif mode == "segments":
        print(json.dumps(measure_segments(lengths, seed)))
    else:
        print(json.dumps(measure(lengths, mode, seed, heads, value_heads, bool(l2norm))))
