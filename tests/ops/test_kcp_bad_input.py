"""What the context-parallel functions refuse, by name, before anything is computed."""

from __future__ import annotations

import pytest
import torch

import ple_gdn

BOUNDS = [0, 5, 70]
PART = ple_gdn.kcp_partition(BOUNDS, 1)
PART_2 = ple_gdn.kcp_partition(BOUNDS, 2)
FRESH = ple_gdn.build_kcp_context(PART, None, 0, "cpu")
READY = ple_gdn.build_kcp_context(PART, None, 0, "cpu").prepare(2, 4)
X, WEIGHT = torch.zeros(1, 70, 4), torch.zeros(4, 4)


def build(part=PART, group=None, rank=0, device="cpu", **options):
    return ple_gdn.build_kcp_context(part, group, rank, device, **options)


CASES = {
    "meta boundaries": (
        lambda: ple_gdn.kcp_partition(torch.tensor([0, 3], device="meta"), 2),
        ValueError,
        "cu_seqlens: expected a tensor with values, got one on the meta device",
    ),
    "workspace of other heads": (
        lambda: ple_gdn.gdn_workspace_bytes(None, 2, 2, 16, 16, dtype=torch.float32, cp=READY),
        ValueError,
        "cp: expected the .H, HV. = .2, 4. it was prepared for, got .2, 2.",
    ),
    "text boundaries": (
        lambda: ple_gdn.kcp_partition("012", 2),
        TypeError,
        "cu_seqlens: expected a tensor or a sequence of integers, got str",
    ),
    "boolean boundaries": (
        lambda: ple_gdn.kcp_partition([0, True], 2),
        TypeError,
        "cu_seqlens: expected integers, got True",
    ),
    "world of text": (
        lambda: ple_gdn.kcp_partition(BOUNDS, "2"),
        TypeError,
        "world_size: expected an int, got str",
    ),
    "world of a float": (
        lambda: ple_gdn.kcp_partition(BOUNDS, 2.0),
        TypeError,
        "world_size: expected an int, got float",
    ),
    "empty world": (
        lambda: ple_gdn.kcp_partition(BOUNDS, 0),
        ValueError,
        "world_size: expected at least 1, got 0",
    ),
    "layout": (
        lambda: ple_gdn.kcp_partition(BOUNDS, 2, None),
        ValueError,
        "layout: expected one of contiguous, .* got None",
    ),
    "heads of a row": (
        lambda: ple_gdn.kcp_plan_row(PART, 4.0, sm_count=132),
        TypeError,
        "HV: expected an int, got float",
    ),
    "no heads": (
        lambda: ple_gdn.kcp_plan_row(PART, 0, sm_count=132),
        ValueError,
        "HV: expected at least 1, got 0",
    ),
    "processors of a row": (
        lambda: ple_gdn.kcp_plan_row(PART, 4, sm_count="132"),
        TypeError,
        "sm_count: expected an int, got str",
    ),
    "rule of a row": (
        lambda: ple_gdn.kcp_plan_row(PART, 4, sm_count=132, p_rule=3),
        ValueError,
        "p_rule: expected one of one, occ, .* got 3",
    ),
    "part of a row": (
        lambda: ple_gdn.kcp_plan_row(BOUNDS, 4, sm_count=132),
        TypeError,
        "part: expected the result of kcp_partition, got list",
    ),
    "rank of a plan": (
        lambda: ple_gdn.kcp_plan(PART, "0", 4),
        TypeError,
        "rank: expected an int, got str",
    ),
    "rank outside": (
        lambda: ple_gdn.kcp_plan(PART, 1, 4),
        ValueError,
        "rank: expected 0 <= rank < 1, got 1",
    ),
    "row rule of a plan": (
        lambda: ple_gdn.kcp_plan(PART, 0, 4, p_rule="row_cost_lpt"),
        ValueError,
        "p_rule: 'row_cost_lpt' compares all ranks",
    ),
    "part of a context": (
        lambda: build(part=BOUNDS),
        TypeError,
        "part: expected the result of kcp_partition, got list",
    ),
    "group": (
        lambda: build(group="world"),
        TypeError,
        "group: expected a torch.distributed.ProcessGroup or None, got str",
    ),
    "no group": (
        lambda: build(part=PART_2),
        ValueError,
        "group: expected 2 ranks as in the partition, got 1",
    ),
    "rank of text": (
        lambda: build(rank="0"),
        TypeError,
        "rank: expected an int, got str",
    ),
    "negative rank": (
        lambda: build(rank=-1),
        ValueError,
        "rank: expected 0 <= rank < 1, got -1",
    ),
    "device name": (
        lambda: build(device="gpu"),
        ValueError,
        "device: expected a torch.device or its name, got 'gpu'",
    ),
    "no device": (
        lambda: build(device=None),
        TypeError,
        "device: expected a torch.device or its name, got NoneType",
    ),
    "exchange": (
        lambda: build(exchange="tree"),
        ValueError,
        "exchange: expected one of ring, all_to_all, got 'tree'",
    ),
    "rule": (
        lambda: build(p_rule="best"),
        ValueError,
        "p_rule: expected one of .* or a positive number, got 'best'",
    ),
    "no segments": (
        lambda: build(p_rule=0),
        ValueError,
        "p_rule: expected one of .* or a positive number, got 0",
    ),
    "processors": (
        lambda: build(sm_count=1.5),
        TypeError,
        "sm_count: expected an int, got float",
    ),
    "no processors": (
        lambda: build(sm_count=0),
        ValueError,
        "sm_count: expected at least 1, got 0",
    ),
    "key heads of text": (
        lambda: build().prepare("2", 4),
        TypeError,
        "H: expected an int, got str",
    ),
    "value heads of a float": (
        lambda: build().prepare(2, 4.0),
        TypeError,
        "HV: expected an int, got float",
    ),
    "no key heads": (
        lambda: build().prepare(0, 4),
        ValueError,
        "H: expected at least 1, got 0",
    ),
    "odd value heads": (
        lambda: build().prepare(2, 5),
        ValueError,
        "HV: expected a positive multiple of H = 2, got 5",
    ),
    "plan before tables": (
        lambda: FRESH.plan,
        RuntimeError,
        r"call prepare\(H, HV\)",
    ),
    "dimension of text": (
        lambda: ple_gdn.kcp_scatter(X, READY, dim="x"),
        TypeError,
        "dim: expected an int, got str",
    ),
    "dimension outside": (
        lambda: ple_gdn.kcp_gather(X, READY, dim=3),
        ValueError,
        "dim: expected a dimension of x, which has 3, got 3",
    ),
    "rows of a pack": (
        lambda: ple_gdn.kcp_scatter(X[:, 1:], READY),
        ValueError,
        r"x: expected 70 rows \(the pack's tokens\) in dimension 1, got shape \(1, 69, 4\)",
    ),
    "rows of a shard": (
        lambda: ple_gdn.kcp_gather(X, READY, dim=2),
        ValueError,
        r"x: expected 70 rows \(this rank's tokens\) in dimension 2",
    ),
    "list for a tensor": (
        lambda: ple_gdn.kcp_scatter([1.0], READY),
        TypeError,
        "x: expected a torch.Tensor, got list",
    ),
    "context of a shard": (
        lambda: ple_gdn.kcp_scatter(X, PART),
        TypeError,
        "ctx: expected a KcpContext, got Partition",
    ),
    "unprepared context": (
        lambda: ple_gdn.kcp_gather(X, FRESH),
        ValueError,
        "ctx: expected a prepared context",
    ),
    "context of an op": (
        lambda: ple_gdn.causal_conv1d(X, WEIGHT, cp=PART),
        TypeError,
        "cp: expected a KcpContext from build_kcp_context, got Partition",
    ),
    "unprepared context of an op": (
        lambda: ple_gdn.causal_conv1d(X, WEIGHT, cp=FRESH),
        ValueError,
        "cp: expected a prepared context",
    ),
    "boundaries beside a context": (
        lambda: ple_gdn.causal_conv1d(X, WEIGHT, cu_seqlens=torch.tensor(BOUNDS), cp=READY),
        ValueError,
        "cu_seqlens: expected None with cp=",
    ),
    "another shard": (
        lambda: ple_gdn.causal_conv1d(X[:, 1:], WEIGHT, cp=READY),
        ValueError,
        "cp: expected this rank's 70 tokens, got 69",
    ),
    "a batch": (
        lambda: ple_gdn.causal_conv1d(X.expand(2, 70, 4), WEIGHT, cp=READY),
        ValueError,
        "cp: expected inputs with batch size 1 .* got 2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_by_name(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()


def gdn(cp, H: int = 2, HV: int = 4, **options):
    q, v, gates = torch.zeros(1, 70, H, 16), torch.zeros(1, 70, HV, 16), torch.zeros(1, 70, HV)
    return ple_gdn.gated_delta_rule(q, q, v, gates, gates, cp=cp, **options)


def test_gated_delta_rule_refuses_other_heads_states_and_a_workspace():
    with pytest.raises(ValueError, match=r"cp: expected the \(H, HV\) = \(2, 4\) it was prepared for, got \(4, 4\)"):
        gdn(READY, H=4)
    with pytest.raises(ValueError, match=r"initial_state: expected shape \(2, 4, 16, 16\)"):
        gdn(READY, initial_state=torch.zeros(1, 4, 16, 16))
    with pytest.raises(ValueError, match="workspace: expected None with cp="):
        gdn(READY, workspace=torch.zeros(8, dtype=torch.uint8))
    for q, message in (((1, 70, 2, 17), "K to be 16 to 256"), ((70,), "q: expected dimensions")):
        with pytest.raises(ValueError, match=message):
            ple_gdn.gated_delta_rule(
                *(torch.zeros(shape) for shape in (q, q, (1, 70, 4, 16), (1, 70, 4), (1, 70, 4))), cp=READY
            )
    wide = [torch.zeros(shape, dtype=torch.float64) for shape in [(1, 70, 2, 16)] * 2 + [(1, 70, 4, 16)]]
    with pytest.raises(TypeError, match="q: expected dtype float32, bfloat16, float16, got float64"):
        ple_gdn.gated_delta_rule(*wide, torch.zeros(1, 70, 4), torch.zeros(1, 70, 4), cp=READY)
