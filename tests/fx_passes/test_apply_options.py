"""Options are written into the op nodes that left them open, and a call's own argument wins."""

from __future__ import annotations

import pytest
import torch

import ple_gdn


def chunk_rule_line(options, **arguments):
    q = torch.randn(1, 8, 2, 16)
    g, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    q.requires_grad_()
    graphs = ple_gdn.capture_graphs(
        lambda q, g, beta: ple_gdn.gated_delta_rule(q, q, q, g, beta, **arguments)[0], q, g, beta, options=options
    )
    return graphs.pre_grad[0]


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({}, {}, ("save_mode='light'", "reuse_recompute_tapes='auto'")),
        ({"save_mode": "full"}, {}, ("save_mode='full'", "reuse_recompute_tapes='auto'")),
        ({"save_mode": "light"}, {"save_mode": "full"}, ("save_mode='full'",)),
        ({"tape_reuse": "replay"}, {}, ("reuse_recompute_tapes='replay'",)),
        ({"tape_reuse": "replay"}, {"reuse_recompute_tapes": True}, ("reuse_recompute_tapes='hand_off'",)),
        ({"tape_reuse": "hand_off"}, {"reuse_recompute_tapes": False}, ("reuse_recompute_tapes='replay'",)),
    ],
    ids=str,
)
def test_an_open_argument_takes_the_option_and_a_given_one_keeps_its_value(options, arguments, expected):
    text = chunk_rule_line(options, **arguments)
    assert all(part in text for part in expected)


def test_inference_keeps_no_tapes_whatever_the_option_says():
    with torch.no_grad():
        assert "save_mode='none'" in chunk_rule_line({"save_mode": "full"})


@pytest.mark.parametrize(("own", "expected"), [(None, 4096), (8192, 8192)])
def test_a_ple_call_takes_the_budget_unless_it_names_its_own(own, expected):
    def fn(h, v, w, conv):
        return ple_gdn.ple_gate_conv(h, h, v, w, w, w, conv, dilation=3, workspace_bytes=own)

    arguments = (torch.randn(1, 3, 8), torch.randn(1, 3, 4), torch.randn(8), torch.randn(8, 1, 4))
    text = ple_gdn.capture_graphs(fn, *arguments, options={"workspace_bytes": 4096}).pre_grad[0]
    assert f"workspace_bytes={expected}" in text
