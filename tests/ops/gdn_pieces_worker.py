"""Run with TRITON_INTERPRET=1: windows of pieces against the host's, and calls that walk them against float64.

Prints, as JSON, relative RMS errors by case. Uninitialised memory is NaN.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.gdn import NAMES, Case, make_case, oracle, relative_rms

from ple_gdn.ops.gated_delta_rule import configs
from ple_gdn.ops.gated_delta_rule.launch import launch_backward, launch_forward
from ple_gdn.ops.gated_delta_rule.piece_kernels import piece_kernel

L = 3


def expected_rows(lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """Table rows by slot: first token, tokens, first chunk, document, pieces before and after."""
    found, token, chunk = {}, 0, 0
    for document, n in enumerate(lengths):
        pieces = max(-(-n // (64 * L)), 1)
        for i in range(pieces):
            at = 64 * L * i
            row = [token + at, min(n - at, 64 * L), chunk + L * i, document, i, pieces - 1 - i]
            found[chunk // L + document + i] = row
        token, chunk = token + n, chunk - (-n // 64)
    return found


def windows_of(bounds: list[float]) -> list[int]:
    """First chunk of the forward's window, chunks of the adjoint's."""
    n, faint = len(bounds), -configs.FAINT
    first = [c for c in range(n) if all(sum(bounds[j:]) <= faint for j in range(c + 1))]
    count = [w for w in range(1, n + 1) if all(sum(bounds[:j]) <= faint for j in range(w, n + 1))]
    return [max(first, default=-1), min(count, default=-1)]


def check_windows(lengths: tuple[int, ...], l2norm: bool, seed: int) -> int:
    """Every kind of chunk: returns how many pieces have a window."""
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    T, H, HV, K = sum(lengths), 2, 4, 24
    chunks = sum(-(-n // 64) for n in lengths)
    k = (uniform(T, H, K) - 0.5).float()
    k_rstd = torch.ones(T, H) if not l2norm else 0.5 + uniform(T, H).float()
    G = -160.0 * uniform(chunks, HV) ** 3
    G[uniform(chunks, HV) < 0.1] = -88.0 * 64
    beta = torch.where(uniform(chunks, HV, 1) < 0.2, 3.0, 2.0) * uniform(chunks, HV, 64)
    for values in (G, beta.view(chunks, -1), k_rstd if l2norm else k.view(T, -1)):
        values[uniform(*values.shape) < 0.5 / values.numel() ** 0.7] = (math.nan, math.inf)[seed % 2]
    if l2norm:
        k_rstd[k_rstd == math.inf] = 0.0  # what an infinite key has
    rows = torch.full((chunks, HV, 320), math.nan)
    slots = chunks // L + len(lengths)
    table, windows = torch.full((slots, 8), -9), torch.full((slots, HV, 2), -9, dtype=torch.int32)
    expected, found = torch.full((slots, HV, 2), -1, dtype=torch.int32), expected_rows(lengths)
    for slot, (token, n, first, *_) in found.items():
        for head in range(HV):
            bounds = []
            for i in range(-(-n // 64)):
                last = min(n - 64 * i, 64)
                beta[first + i, head, last:] = 0.0
                part, key = slice(token + 64 * i, token + 64 * i + last), head // (HV // H)
                size = torch.ones(last) if l2norm else k[part, key].double().square().sum(-1)
                factor = (1 - beta[first + i, head, :last].float().double() * size).abs()
                bound = torch.where(factor <= 1, 0.0, factor.log()).sum() + G[first + i, head].float()
                known = bool((k_rstd[part, key] > 0).all())
                bounds.append(bound.item() if known else math.nan)
            if n < lengths[found[slot][3]]:
                expected[slot, head] = torch.tensor(windows_of(bounds))
    rows[..., :64], rows[..., 319] = beta.float(), G.float()
    offsets = torch.tensor((0, *(-(-n // 64) for n in lengths))).cumsum(0)
    piece_kernel[(slots * HV,)](
        k, k_rstd, rows, torch.tensor((0, *lengths)).cumsum(0), offsets, table, windows, -configs.FAINT, len(lengths),
        len(lengths).bit_length(), T, 0, H=H, HV=HV, K=K, BK=32, LENGTH=L, BLOCK=16, VARLEN=True, L2NORM=l2norm,
    )  # fmt: skip
    for slot in range(slots):
        if slot in found:
            assert table[slot, :6].tolist() == found[slot], slot
        else:
            assert table[slot, [1, 4, 5]].tolist() == [0, -1, -1], slot
    assert torch.equal(windows, expected), (windows - expected).nonzero()
    return int((windows[..., 0] >= 0).sum())


def call(case: Case, l2norm: bool, save_mode: str) -> dict[str, torch.Tensor]:
    shared = (*case[:6], torch.tensor(case.boundaries), None, None)
    o, final_state, *tapes = launch_forward(*shared, None, True, l2norm, save_mode)
    gradients = launch_backward(case.do, case.dfinal_state, *shared, *tapes, None, l2norm)
    return dict(zip(NAMES, (o, final_state, *gradients), strict=True))


def mixed(l2norm: bool) -> Case:
    """A document of four pieces of two chunks and a short one. Heads, normed: slow decay, and a reset of two tokens (a
    gate ends at -88) in the third piece; strong decay and beta = 2; no decay, and a reset in the second. Keys of norm
    3: decay that growth wins over, and decay that wins over growth, in two chunks alone."""
    case = make_case((64 * 6 + 9, 5), heads=1, value_heads=3 if l2norm else 2, key_width=16, value_width=16)
    g, beta = case.g, case.beta
    if l2norm:
        g[..., 0], g[..., 1], g[..., 2] = -0.01, -1.7, 0.0
        g[:, 64 * 4 + 3 : 64 * 4 + 5, 0] = -1e4
        g[:, 64 * 2 + 40 : 64 * 2 + 42, 2] = -1e4
        beta[..., 1] = 2.0
        return case
    g[..., 0], g[..., 1] = -0.1, -1.7
    beta[:] = 0.3  # |1 - .3 * 9| = 1.7: 34 a chunk
    beta[..., 0] = torch.where(torch.arange(beta.shape[1]) % 8 == 0, 0.3, 0.1)
    return case._replace(k=3 * torch.nn.functional.normalize(case.k, dim=-1))


def measure(l2norm: bool) -> dict[str, float]:
    """Errors by name, and by head where it has one."""
    case = mixed(l2norm)
    expected, found = oracle(case, 0.25, l2norm), call(case, l2norm, "light")
    errors = {n: relative_rms(found[n], expected[n]) for n in ("dq", "dk")}
    for name in set(NAMES) - set(errors):
        for head in range(case.g.shape[2]):
            index = (slice(None), head) if "state" in name else (slice(None), slice(None), head)
            errors[f"{name} {head}"] = relative_rms(found[name][index], expected[name][index])
    return errors


def check_bits(l2norm: bool) -> None:
    """Of save modes, of spans, and of a document in the pack and alone."""
    case = mixed(l2norm)
    found, first = call(case, l2norm, "full"), case.boundaries[1]
    rows = [x[:, :first] for x in (*case[:5], case.do)]
    alone = Case(*rows[:5], case.initial_state[:1], (0, first), rows[5], case.dfinal_state[:1])
    configs.SPANS = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)
    again, alone = call(case, l2norm, "none"), call(alone, l2norm, "light")
    for name in NAMES:
        assert torch.equal(found[name], again[name]), name
        assert torch.equal(found[name][:1] if "state" in name else found[name][:, :first], alone[name]), name


def check_nan() -> None:
    """A key that is not a number: its piece has no window and hands it on to the next, and no other document has it."""
    case = mixed(True)
    case.k[0, 5, 0, 3] = math.nan
    o = launch_forward(*case[:6], torch.tensor(case.boundaries), None, None, None, True, True, "none")[0]
    assert o[:, 5:256].isnan().all()
    assert not o[:, case.boundaries[1] :].isnan().any()


def quick() -> dict[str, dict[str, float]]:
    for seed, lengths in enumerate(((700, 0, 5, 200), (650,))):
        assert sum(check_windows(lengths, l2norm, seed) for l2norm in (True, False)) > 3
    configs.CUTS = ((1 << 30, 2),)
    check_nan()
    results = {"normed": measure(True)}
    configs.FAINT = 1.0  # what is left out then shows
    return results | {"e^-1": measure(True)}


def slow() -> dict[str, dict[str, float]]:
    configs.CUTS = ((1 << 30, 2),)
    results = {"long keys": measure(False)}
    check_bits(False)
    check_bits(True)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    print(json.dumps({"quick": quick, "slow": slow}[sys.argv[1]]()))
