"""Every option of the backend: accepted values, refused values, and how the refusal reads."""

from __future__ import annotations

import pytest
import torch

from ple_gdn.options import OPTION_NAMES, Options, parse_options


def test_defaults_are_the_documented_ones():
    assert Options() == Options(
        rounding="eager",
        workspace_bytes=67108864,
        tape_reuse="auto",
        save_mode="light",
        memory_budget=None,
        fuse=True,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "eager"},
        {"rounding": "eager_all"},
        {"rounding": "fast"},
        {"workspace_bytes": 1},
        {"tape_reuse": "auto"},
        {"tape_reuse": "hand_off"},
        {"tape_reuse": "replay"},
        {"save_mode": "light"},
        {"save_mode": "full"},
        {"memory_budget": None},
        {"memory_budget": 0},
        {"fuse": False},
    ],
    ids=str,
)
def test_valid_values_are_taken(options):
    ours, inductor = parse_options(options)
    assert {name: getattr(ours, name) for name in options} == options
    assert inductor == {}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"rounding": "eagr"},
            ValueError,
            r"'rounding'.*'eager', 'eager_all', 'fast', got 'eagr'. Did you mean 'eager'",
        ),
        ({"rounding": True}, TypeError, r"'rounding'.*got True"),
        ({"rounding": None}, TypeError, r"'rounding'.*got None"),
        ({"workspace_bytes": 0}, ValueError, r"'workspace_bytes'.*at least 1 bytes, got 0"),
        ({"workspace_bytes": 2**70}, ValueError, r"'workspace_bytes'.*at most 2\*\*63 - 1 bytes"),
        ({"workspace_bytes": 6.4e7}, TypeError, r"'workspace_bytes'.*int.*got 64000000.0"),
        ({"workspace_bytes": True}, TypeError, r"'workspace_bytes'.*got True"),
        ({"workspace_bytes": "64MB"}, TypeError, r"'workspace_bytes'.*got '64MB'"),
        ({"tape_reuse": "handoff"}, ValueError, r"'tape_reuse'.*got 'handoff'. Did you mean 'hand_off'"),
        ({"tape_reuse": True}, TypeError, r"'tape_reuse'.*got True"),
        ({"save_mode": "none"}, ValueError, r"'save_mode'.*'light', 'full', got 'none'"),
        ({"memory_budget": -1}, ValueError, r"'memory_budget'.*at least 0 bytes, got -1"),
        ({"memory_budget": 0.5}, TypeError, r"'memory_budget'.*got 0.5"),
        ({"fuse": "no"}, TypeError, r"'fuse'.*True or False, got 'no'"),
        ({"fuse": 1}, TypeError, r"'fuse'.*True or False, got 1"),
        (
            {"roundin": "fast"},
            ValueError,
            r"unknown option 'roundin'. Did you mean 'rounding'.*Valid names are rounding",
        ),
        ({"ple_gdn.rounding": "fast"}, ValueError, r"unknown option 'ple_gdn.rounding'"),
        ({"max_autotun": True}, ValueError, r"unknown option 'max_autotun'. Did you mean 'max_autotune'"),
        ({"max_autotune": 3}, TypeError, r"'max_autotune': expected bool, got 3"),
        ({3: "x"}, ValueError, r"unknown option '3'"),
    ],
    ids=str,
)
def test_bad_values_and_unknown_keys_raise_and_name_the_valid_ones(options, error, says):
    with pytest.raises(error, match=says):
        parse_options(options)


def test_unknown_key_message_lists_every_option():
    with pytest.raises(ValueError, match="unknown option") as raised:
        parse_options({"zzz": 1})
    assert all(name in str(raised.value) for name in OPTION_NAMES)


def test_inductor_keys_pass_through_beside_ours_in_either_spelling():
    ours, inductor = parse_options({"rounding": "fast", "max-autotune": True, "triton.cudagraphs": False})
    assert ours == Options(rounding="fast")
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False}


@pytest.mark.parametrize(("options", "error"), [({"roundin": "fast"}, ValueError), ({"fuse": 1}, TypeError)], ids=str)
def test_a_bad_option_leaves_torch_compile_as_the_promised_error(options, error):
    compiled = torch.compile(lambda x: x + 1, backend="ple_gdn", options=options)
    with pytest.raises(error, match=next(iter(options))):
        compiled(torch.ones(2))
