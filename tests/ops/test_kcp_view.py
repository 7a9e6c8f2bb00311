"""The drawn schedule is the one the planner reckons with."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

import ple_gdn
from ple_gdn.ops.kcp.planner import RankJobs, segment_lengths

PACK = list(itertools.accumulate([40961, 3000, 65000, 17, 9000, 120000, 24009], initial=0))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("HV", [6, 48])
def test_every_rank_ends_at_its_modelled_walk(layout, HV):
    part = ple_gdn.kcp_partition(PACK, 4, layout)
    view = ple_gdn.kcp_plan_view(part, HV)
    assert list(view.row) == ple_gdn.kcp_plan_row(part, HV, sm_count=132, p_rule="row_cost_lpt")
    for rank in view.ranks:
        assert rank.makespan == RankJobs(part.by_rank[rank.rank]).walk(rank.P, HV, 132)
    assert view.makespan == max(rank.makespan for rank in view.ranks)


def test_lanes_hold_every_job_once_without_overlap():
    part = ple_gdn.kcp_partition(PACK, 2, "zigzag")
    (rank,) = ple_gdn.kcp_plan_view(part, 6, rank=1, sm_count=20, p_rule="occ").ranks
    seen = Counter()
    for lane in rank.lanes:
        for before, after in itertools.pairwise(lane):
            assert before.end <= after.start
        for bar in lane:
            seen[bar.phase, bar.fragment, bar.segment, bar.head] += 1
            chunks = segment_lengths(rank.fragments[bar.fragment].num_chunks, rank.P)[bar.segment]
            assert bar.end - bar.start == chunks * (5 if bar.phase == "summary" else 3)
            assert bar.end <= rank.summary_end if bar.phase == "summary" else bar.start >= rank.summary_end
    expected = Counter()
    for index, f in enumerate(rank.fragments):
        pieces = min(rank.P, f.num_chunks)
        for segment, head in itertools.product(range(pieces), range(6)):
            expected["tape", index, segment, head] = 1
            if f.has_pred or f.has_succ or segment < pieces - 1:
                expected["summary", index, segment, head] = 1
    assert seen == expected


def test_text_of_a_small_plan():
    part = ple_gdn.kcp_partition([0, 256, 384], 2)
    text = ple_gdn.kcp_plan_view(part, 2, sm_count=3, p_rule="one").text(width=48)
    assert text.splitlines()[:6] == [
        "384 tokens, 2 documents, 2 ranks, contiguous; HV 2, 3 multiprocessors, one: P [1, 1]",
        "modelled makespan 24 steps; one column is 0.5 steps; summaries in lower case and walks in upper case of the "
        "fragment's letter, '|' opens a segment, '.' idle",
        "rank 0: P 1, 1 fragments, summaries until 15, walks until 24, busy 67%",
        "           0-1 |aaaaaaaaaaaaaaaaaaaaaaaaaaaaa|AAAAAAAAAAAAAAAAA",
        "             2 " + "." * 48,
        "  A: document 0 [0, 192), 3 chunks, leaves to another rank",
    ]
    assert text.splitlines()[6:] == [
        "rank 1: P 1, 2 fragments, summaries until 5, walks until 11, busy 85%",
        "           0-1 |aaaaaaaaa|BBBBBBBBBBB..........................",
        "             2 ..........|AAAAA|AAAAA..........................",
        "  A: document 0 [192, 256), 1 chunks, enters from another rank",
        "  B: document 1 [256, 384), 2 chunks",
    ]


def test_image_of_a_plan(tmp_path):
    pytest.importorskip("matplotlib")
    part = ple_gdn.kcp_partition(PACK, 2)
    path = tmp_path / "plan.png"
    ple_gdn.kcp_plan_view(part, 6, rank=0, sm_count=16).save(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000


def test_an_empty_rank_and_an_empty_pack_draw_nothing():
    view = ple_gdn.kcp_plan_view(ple_gdn.kcp_partition([0], 2), 6)
    assert view.makespan == 0
    assert "0 tokens, 0 documents" in str(view)


def test_bad_input_is_named():
    part = ple_gdn.kcp_partition(PACK, 2)
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < 2, got 2"):
        ple_gdn.kcp_plan_view(part, 6, rank=2)
    with pytest.raises(TypeError, match="HV: expected an int, got str"):
        ple_gdn.kcp_plan_view(part, "6")
    with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
        ple_gdn.kcp_plan_view(part, 6).text(width=0)
