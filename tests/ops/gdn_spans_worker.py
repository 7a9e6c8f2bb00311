"""Run with TRITON_INTERPRET=1: the tables of spans against the host's, and the bits of a backward in spans."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles.gdn import NAMES, make_case

from ple_gdn.ops.gated_delta_rule import configs
from ple_gdn.ops.gated_delta_rule.launch import Problem, launch_backward, launch_forward
from ple_gdn.ops.gated_delta_rule.span_tables import span_tables_kernel
from ple_gdn.ops.gated_delta_rule.spans import start_count


def expected_tables(lengths: list[int], length: int, leg: int, count: int, cut: int) -> list[tuple[list, list]]:
    """Chains (token, chunk in the span, source, end, target) and legs (the first three) of each span; chains are pieces
    of `cut` chunks unless it is 0, and then chunks are counted from a multiple of `length`."""
    grid, token = [], 0  # of every chunk: document, its number there, first token, slot of a start state
    for document, n in enumerate(lengths):
        grid += [(document, i, token + 64 * i, token // (64 * leg)) for i in range(-(-n // 64))]
        token += n
    starts, step = [], cut or leg
    for span in range(count + 1):
        behind = range(span * length, len(grid))
        starts.append(next((c for c in behind if grid[c][1] % step == 0), len(grid)))
    spans = []
    for begin, stop in pairwise(starts):
        chains, legs, origin = [], [], len(spans) * length if cut else begin
        for c in range(begin, stop):
            document, i, first, slot = grid[c]
            source = slot + i // leg - 1 if i else -1 - document
            inside = all(grid[other][0] != document for other in range(stop, len(grid)))
            last = i + cut >= sum(other[0] == document for other in grid)
            if cut and i % cut == 0:
                end = document if last else -3 - ((c - i) // cut + document + i // cut)
                chains.append((first, c - origin, source, end, -2 if i else document))
            elif not cut and (i == 0 or c == begin):
                chains.append((first, c - origin, source, document if inside else -3, -1 if i else document))
            if i % leg == 0:
                legs.append((first, c - origin, source))
        spans.append((chains, legs))
    return spans


def check_tables(lengths: list[int], leg: int, span_bytes: int, rows: int = 0, pieces: int = 0) -> None:
    """Of a pack, or of `rows` batch rows of one length; documents in pieces of so many legs, if they are longer."""
    configs.SPANS = configs.SpanConfig(leg, span_bytes if pieces else 0, span_bytes)
    configs.CUTS = ((1 << 30, pieces * leg),) if pieces else ()
    boundaries = torch.tensor((0, *lengths)).cumsum(0)
    T = lengths[0] if rows else int(boundaries[-1]) + 7
    q = torch.empty(max(rows, 1), T, 1, 16)
    p = Problem.of(q, q, None if rows else boundaries)
    plan = p.spans
    out = torch.full((plan.count, sum(plan.widths)), -99, dtype=torch.int32)
    offsets = torch.tensor((0, *(-(-n // 64) for n in lengths))).cumsum(0)
    span_tables_kernel[(plan.count,)](
        None if rows else boundaries, None if rows else offsets, out, p.documents, p.T, p.chunks_per_row, plan.length,
        plan.chains, plan.legs, LEG=leg, CUT=plan.cut or 0, VARLEN=not rows,
        BLOCK=16,
    )  # fmt: skip
    used = set()
    expected = expected_tables(lengths, plan.length, leg, plan.count, plan.cut or 0)
    for row, (chains, legs) in zip(out, expected, strict=True):
        tokens, chunks, source, end, target, leg_tokens, leg_chunks, leg_source = row.split(plan.widths)
        n = len(chains)
        assert n <= plan.chains
        assert len(legs) <= plan.legs
        assert list(zip(*(t[:n].tolist() for t in (tokens, chunks, source, end, target)), strict=True)) == chains
        assert list(zip(*(t[: len(legs)].tolist() for t in (leg_tokens, leg_chunks, leg_source)), strict=True)) == legs
        for firsts, ends, count, bound in (
            (tokens, chunks, n, plan.chains),
            (leg_tokens, leg_chunks, len(legs), plan.legs),
        ):
            assert len(set(firsts[count : bound + 1].tolist())) == len(set(ends[count : bound + 1].tolist())) == 1
            assert int(ends[bound]) <= plan.rows
        assert all(x == -2 for x in (*end[n : plan.chains].tolist(), *target[n : plan.chains].tolist()))
        slots = [s for *_, s in legs if s >= 0]
        assert used.isdisjoint(slots)
        used.update(slots)
    assert all(s < start_count(p.B * p.T) for s in used)


def check_bits(lengths: tuple[int, ...], packed: bool, **sizes: int) -> None:
    """Kept, replayed and rebuilt, in one span and in many."""
    case = make_case(lengths, trailing=5 if packed else 0, **sizes)
    if not packed:  # two batch rows
        case = case._replace(**{n: torch.cat([getattr(case, n)] * 2) for n in ("q", "k", "v", "g", "beta", "do")})
        states = {n: torch.cat([getattr(case, n)] * 2) for n in ("initial_state", "dfinal_state")}
        case = case._replace(**states)
    boundaries = torch.tensor(case.boundaries) if packed else None
    shared, scale = (*case[:6], boundaries, None, None), sizes["key_width"] ** -0.5

    def backward(mode: str, config: configs.SpanConfig) -> tuple[torch.Tensor, ...]:
        configs.SPANS = config
        outputs = launch_forward(*shared, scale, True, True, mode)
        gradients = launch_backward(case.do, case.dfinal_state, *shared, *outputs[2:], scale, True)
        return (*outputs[:2], *gradients)

    alone = configs.SpanConfig(1, 1 << 40, 1)
    expected = backward("full", alone)
    cut = configs.SpanConfig(2, 0, 0)
    for mode, config in (("light", alone), ("light", cut), ("none", cut)):
        for name, ours, theirs in zip(NAMES, backward(mode, config), expected, strict=True):
            assert torch.equal(ours, theirs), (mode, config, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for turn in range(12):
        picked = torch.randint(0, 400, (1 + turn % 5,), generator=generator).tolist()
        lengths = [n if i % 3 else n % 70 for i, n in enumerate(picked)] + [0, 130, 0]
        check_tables(lengths, 1 + turn % 4, 20_000 * turn)
        if turn % 2:
            check_tables(lengths, 1 + turn % 4, 10_000 * turn, pieces=1 + turn % 3)
    check_tables([700] * 2, 1, 60_000, rows=2, pieces=3)
    configs.CUTS = ()
    check_tables([1] * 40, 2, 60_000)
    check_tables([2000], 3, 60_000)
    check_tables([200] * 3, 2, 60_000, rows=3)
    check_bits((130, 0, 1, 65), True, heads=1, value_heads=1, key_width=16, value_width=16)
    check_bits((150,), False, heads=1, value_heads=1, key_width=16, value_width=16)
    print("right")
