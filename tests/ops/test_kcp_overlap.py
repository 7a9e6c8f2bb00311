"""What a rank does not compute, and what it computes while states are on their way, counted; ranks are threads."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import ple_gdn
from ple_gdn.ops.kcp import local
from ple_gdn.ops.kcp.exchange import Exchange

sys.path.insert(0, str(Path(__file__).parent))
import kcp_threads
import kcp_worker

Log = dict[int, list[tuple]]


@pytest.fixture
def log(monkeypatch) -> Log:
    """Per rank, in order: what was computed on which segments, and when its collectives were issued and waited for."""
    events: Log = defaultdict(list)

    def note(owner, name, record):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            plan, event = record(*args)
            events[plan.rank].append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    for kind in (local.ForwardRun, local.BackwardRun):
        where = kind.__name__
        note(kind, "values", lambda run, chosen, _, w=where: (run.plan, ("values", w, tuple(chosen))))
        note(kind, "walk", lambda run, part, _, w=where: (run.plan, ("walk", w, part.first, part.last)))
    note(local.ForwardRun, "maps", lambda run, chosen: (run.plan, ("maps", "", tuple(chosen))))
    note(Exchange, "_issue", lambda exchange, *_: (exchange.plan, ("issue", "")))
    waiting = kcp_threads._Flight.wait
    monkeypatch.setattr(
        kcp_threads._Flight, "wait", lambda flight: (events[flight.plan.rank].append(("wait", "")), waiting(flight))[1]
    )
    return events


def run(monkeypatch, bounds: list[int], world: int, layout: str, **options) -> list[ple_gdn.KcpContext]:
    x = kcp_worker.case(bounds=bounds)
    part = ple_gdn.kcp_partition(bounds, world, layout)

    def work(ctx):
        kcp_worker.run_gdn(kcp_worker.shard(x, ctx), cp=ctx)
        return ctx

    return kcp_threads.run_ranks(monkeypatch, part, (kcp_worker.H, kcp_worker.HV), work, **options)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_first_segments_have_no_map_and_last_ones_no_summary(layout, P, exchange, monkeypatch, log, one_thread):
    contexts = run(monkeypatch, kcp_worker.BOUNDS, 3, layout, p_rule=P, exchange=exchange)
    bounds, skipped = kcp_worker.BOUNDS, 0
    for ctx in contexts:
        opens, closes, alone = [], [], []
        pieces = Counter(segment.fragment for segment in ctx.plan.segments)
        for segment in ctx.plan.segments:
            positions = ctx.positions[segment.start : segment.end]
            opens.append(int(positions[0]) in bounds)
            closes.append(int(positions[-1]) + 1 in bounds)
            alone.append(pieces[segment.fragment] == 1)
        count = len(opens)
        # A fragment of one segment that opens the flow is walked instead of summarised.
        forward = (i for i in range(count) if not closes[i] and not (opens[i] and alone[i]))
        backward = (i for i in range(count) if not opens[i] and not (closes[i] and alone[i]))
        expected = {
            ("values", "ForwardRun", tuple(forward)),
            ("values", "BackwardRun", tuple(backward)),
            ("maps", "", tuple(i for i in range(count) if not opens[i] and not closes[i])),
        }
        assert {event for event in log[ctx.rank] if event[0] in ("values", "maps")} == expected
        walked = [i for e in log[ctx.rank] if e[:2] == ("walk", "ForwardRun") for i in range(*e[2:])]
        assert sorted(walked) == list(range(count))
        skipped += sum(opens) + sum(closes)
    assert skipped >= 6


def forward_events(log: Log, rank: int) -> list[tuple]:
    """Issues, waits and walks up to the last forward walk."""
    events = [e for e in log[rank] if e[0] in ("issue", "wait", "walk")]
    last = max(i for i, e in enumerate(events) if e[:2] == ("walk", "ForwardRun"))
    return events[: last + 1]


def test_what_needs_no_state_is_walked_while_states_are_on_their_way(monkeypatch, log, one_thread):
    # Contiguous halves of three documents: the second crosses. Rank 1 has its end and the third document.
    run(monkeypatch, [0, 70, 300, 400], 2, "contiguous", p_rule=1)
    # Rank 0 walks the second document's start, sends the state it ends in, then walks the first document.
    assert forward_events(log, 0) == [("walk", "ForwardRun", 1, 2), ("issue", ""), ("walk", "ForwardRun", 0, 1)]
    assert forward_events(log, 1) == [
        ("issue", ""),
        ("walk", "ForwardRun", 1, 2),
        ("wait", ""),
        ("walk", "ForwardRun", 0, 1),
    ]
    # The adjoint flows the other way: rank 1 walks and sends first, rank 0 walks its first document meanwhile.
    backward = [[e for e in log[r] if e[0] in ("issue", "wait") or e[:2] == ("walk", "BackwardRun")] for r in (0, 1)]
    assert backward[0][-4:] == [
        ("issue", ""),
        ("walk", "BackwardRun", 0, 1),
        ("wait", ""),
        ("walk", "BackwardRun", 1, 2),
    ]
    assert backward[1][-4:-1] == [("walk", "BackwardRun", 0, 1), ("issue", ""), ("walk", "BackwardRun", 1, 2)]


def test_a_rank_that_passes_states_on_does_so_before_its_walks(monkeypatch, log, one_thread):
    # One document over three ranks: the middle rank sends what it received and folded, then walks.
    run(monkeypatch, [0, 400], 3, "contiguous", p_rule=1)
    assert forward_events(log, 1) == [("issue", ""), ("wait", ""), ("issue", ""), ("walk", "ForwardRun", 0, 1)]
    assert forward_events(log, 2) == [
        ("issue", ""),
        ("issue", ""),
        ("wait", ""),
        ("walk", "ForwardRun", 0, 1),
    ]


def test_a_state_to_send_is_summarised_where_walks_are_too_many_or_segments_several(one_thread):
    """The seven-document pack over two ranks in zigzag: rank 0 opens document 2 and closes 5, rank 1 the other way."""
    seven = [0, 40961, 43961, 108961, 108978, 117978, 237978, 261987]

    def walks(bounds, layout, P, rank):
        part = ple_gdn.kcp_partition(bounds, 2, layout)
        plan = ple_gdn.build_kcp_context(part, kcp_threads.Group(2), rank, "cpu", p_rule=P).prepare(16, 48).plan
        return [
            tuple([(run.first, run.last) for run in kind] for kind in direction)
            for direction in (plan.forward_walks, plan.adjoint_walks)
        ]

    assert walks(seven, "zigzag", 1, 0) == [
        ([(2, 3)], [(0, 2), (4, 5)], [(3, 4)]),
        ([(3, 4)], [(0, 2), (4, 5)], [(2, 3)]),
    ]
    assert walks(seven, "zigzag", 1, 1) == [([(3, 4)], [(1, 3)], [(0, 1)]), ([(0, 1)], [(1, 3)], [(3, 4)])]
    assert [sending for sending, _, _ in walks(seven, "zigzag", 2, 1)] == [[], []]
    many = list(range(0, 410, 40))
    assert walks(many, "zigzag_per_document", 1, 0) == [([], [], [(0, 20)])] * 2


def test_runs_of_many_parts_are_walked_as_one(monkeypatch, log, one_thread):
    bounds = torch.arange(0, 410, 40).tolist()
    contexts = run(monkeypatch, bounds, 2, "zigzag_per_document", p_rule=1)
    for ctx in contexts:
        walks = [e for e in log[ctx.rank] if e[:2] == ("walk", "ForwardRun")]
        assert walks in ([("walk", "ForwardRun", 0, len(ctx.plan.segments))],), walks
