"""Partition and planner against the job-by-job definitions."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
import torch

import ple_gdn
from ple_gdn.ops.kcp.partition import LAYOUTS, kcp_partition
from ple_gdn.ops.kcp.planner import (
    P_RULES,
    RankJobs,
    kcp_plan,
    kcp_plan_row,
    lpt_makespan,
    segment_lengths,
)

PACK_7 = list(itertools.accumulate([40961, 3000, 65000, 17, 9000, 120000, 24009], initial=0))


def greedy_makespan(jobs: dict[int, int], machines: int) -> int:
    heap = [0] * machines
    for size in sorted(jobs, reverse=True):
        for _ in range(jobs[size]):
            heapq.heapreplace(heap, heap[0] + size)
    return max(heap)


def test_multiset_lpt_equals_job_by_job_greedy_on_1000_random_instances():
    rng = random.Random(0)
    for _ in range(1000):
        machines = rng.randint(1, 160)
        jobs = {rng.randint(1, 300): rng.randint(0, 200) for _ in range(rng.randint(0, 6))}
        assert lpt_makespan(jobs, machines) == greedy_makespan(jobs, machines), (jobs, machines)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 3], [0, 7], [0, 5, 8], [0, 0, 1, 1, 130, 400, 401], PACK_7])
def test_every_token_is_owned_exactly_once(layout, world, bounds):
    part = kcp_partition(bounds, world, layout)
    owned = torch.cat([part.positions(rank) for rank in range(world)])
    assert torch.equal(torch.bincount(owned, minlength=bounds[-1]), torch.ones(bounds[-1], dtype=torch.int64))
    for rank in range(world):
        assert bool((part.positions(rank).diff() > 0).all())
        assert part.local_cu_seqlens(rank)[-1] == part.local_tokens(rank)
        for f in part.by_rank[rank]:
            first, last = bounds[f.document], bounds[f.document + 1]
            assert first <= f.start < f.end <= last
            assert f.num_chunks == -(-(f.end - f.start) // 64)
            assert (f.has_pred, f.has_succ) == (f.start > first, f.end < last)


def test_touching_blocks_of_one_document_merge_on_the_middle_rank():
    part = kcp_partition([0, 800], 4, "zigzag")
    assert [(f.start, f.end) for f in part.by_rank[3]] == [(300, 500)]
    assert [(f.start, f.end) for f in part.by_rank[0]] == [(0, 100), (700, 800)]


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([1, 3], ValueError, "start at 0"),
        ([], ValueError, "start at 0"),
        ([0, 5, 3], ValueError, "non-decreasing boundaries, got 5 then 3"),
        (None, TypeError, "sequence of integers, got NoneType"),
        ([0, 2**70], ValueError, "cu_seqlens: expected an int of 64 bits"),
        ([0, 1.5], TypeError, "integers, got 1.5"),
        (torch.tensor([0.0, 3.0]), TypeError, "expected dtype int32"),
        (torch.tensor([[0, 3]]), ValueError, r"expected 1 dimensions \[N \+ 1\], got shape \(1, 2\)"),
    ],
)
def test_bad_boundaries_are_named(bounds, error, message):
    with pytest.raises(error, match=message):
        kcp_partition(bounds, 2)


def test_bad_world_layout_and_rules_are_named():
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        kcp_partition([0, 4], 0)
    with pytest.raises(ValueError, match="layout: expected one of contiguous"):
        kcp_partition([0, 4], 2, "zig")
    part = kcp_partition([0, 4], 2)
    with pytest.raises(ValueError, match="compares all ranks"):
        kcp_plan(part, 0, 6, p_rule="row_cost")
    with pytest.raises(ValueError, match="p_rule: expected one of"):
        kcp_plan_row(part, 6, sm_count=132, p_rule="best")
    with pytest.raises(ValueError, match="rank: expected"):
        kcp_plan(part, 2, 6)
    with pytest.raises(TypeError, match="part: expected the result of kcp_partition, got list"):
        kcp_plan_row([0, 4], 6, sm_count=132)


@pytest.mark.parametrize("chunks", [0, 1, 5, 64, 4096])
@pytest.mark.parametrize("P", [1, 2, 3, 22, 100])
def test_segments_cover_the_fragment_in_nearly_equal_parts(chunks, P):
    lengths = segment_lengths(chunks, P)
    assert sum(lengths) == chunks
    assert max(lengths) - min(lengths) <= 1


def test_walk_equals_the_job_list_written_out():
    rng = random.Random(3)
    for _ in range(200):
        bounds = list(
            itertools.accumulate((rng.choice([1, 64, 3000, 40961]) for _ in range(rng.randint(1, 6))), initial=0)
        )
        rank = rng.choice(kcp_partition(bounds, rng.choice([1, 2, 4]), rng.choice(LAYOUTS)).by_rank)
        P, tape, summary = rng.randint(1, 24), {}, {}
        for f in rank:
            lengths = segment_lengths(f.num_chunks, P)
            for i, length in enumerate(lengths):
                tape[length] = tape.get(length, 0) + 6
                if f.has_pred or f.has_succ or i < len(lengths) - 1:
                    summary[length] = summary.get(length, 0) + 6
        expected = 5 * greedy_makespan(summary, 132) + 3 * greedy_makespan(tape, 132)
        assert RankJobs(rank).walk(P, 6, 132) == expected


def test_the_design_cases_of_one_document_on_one_device():
    # GDN.md §5: (2,6) at 262k -> 22 with walk 12288 -> 1496; (16,32) -> 4 with walk 8192; more heads stay at 1.
    part = kcp_partition([0, 262144], 1)
    jobs = RankJobs(part.by_rank[0])
    assert kcp_plan_row(part, 6, sm_count=132, p_rule="row_cost_lpt") == [22]
    assert (jobs.walk(1, 6, 132), jobs.walk(22, 6, 132)) == (12288, 1496)
    assert kcp_plan_row(part, 32, sm_count=132, p_rule="row_cost_lpt") == [4]
    assert jobs.walk(4, 32, 132) == 8192
    assert kcp_plan_row(part, 48, sm_count=132, p_rule="row_cost_lpt") == [1]
    assert kcp_plan_row(part, 64, sm_count=132, p_rule="row_cost_lpt") == [1]


def test_a_packing_is_partitioned_as_its_boundaries():
    packing = ple_gdn.prepare_varlen(torch.tensor(PACK_7))
    for layout in LAYOUTS:
        assert kcp_partition(packing, 3, layout) == kcp_partition(PACK_7, 3, layout)


@pytest.mark.parametrize("rule", P_RULES)
def test_plans_are_a_function_of_the_values_alone(rule):
    for layout in LAYOUTS:
        first = kcp_plan_row(kcp_partition(PACK_7, 4, layout), 6, sm_count=132, p_rule=rule)
        again = kcp_plan_row(kcp_partition(torch.tensor(PACK_7), 4, layout), 6, sm_count=132, p_rule=rule)
        assert first == again
        assert len(first) == 4
        assert all(1 <= P <= 24 for P in first)
