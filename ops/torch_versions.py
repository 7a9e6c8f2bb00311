"""The one place that knows what differs between torch releases, and which releases were tested."""

from __future__ import annotations

import functools
import inspect
import logging

import torch

log = logging.getLogger("ple_gdn")

# Each was run; a release between two of them is warned about too.
TESTED = ((2, 11), (2, 13), (2, 14))


# Releases whose `torch.utils.checkpoint` frame (hook closures, counters, early stop) was read and run, without local
# tags: `ops/gated_delta_rule/checkpoint_frame.py` reads it on these only.
VERIFIED_CHECKPOINTS = ("2.11.0", "2.13.0", "2.14.1")


def checkpoint_is_verified() -> bool:
    """Whether this torch's checkpoint frame may be read; "2.13.0+cpu" counts as "2.13.0"."""
    return str(torch.__version__).split("+")[0] in VERIFIED_CHECKPOINTS


def release() -> tuple[int, int]:
    """(major, minor) of torch, without its local tag ("2.11.0+cu130" -> (2, 11))."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


@functools.cache
def warn_if_untested() -> None:
    """One warning per process when torch is a release this package was not tested with."""
    if release() not in TESTED:
        names = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        log.warning("ple_gdn was tested with torch %s, not with %s: verify gradients first", names, torch.__version__)


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()` in Python and under Dynamo, whose 2.11 took it for True in any trace."""
    return torch.compiler._is_exporting_flag


def casts_are_cached() -> bool:
    """Whether C++ code generation hands readers of a rounded value the unrounded one, asked to round or not (2.11)."""
    return release() < (2, 13)


def compile_arguments_of_a_trace() -> dict[str, bool]:
    """Arguments of `torch.compile` that keep a trace out of the user's recompile limit; 2.11 has no such argument."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}
