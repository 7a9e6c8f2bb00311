"""What a compile did: rewrites made, candidates refused, tape decisions, passes that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops.gated_delta_rule.tape_decisions import TapeDecision

# Key in the `meta` of graph modules that a joint pass created: Inductor hands them to the joint passes once more.
MADE_BY_PASS = "ple_gdn_made_by_pass"


@dataclass(frozen=True)
class Rewrite:
    """One fused place: `pass_name` put `op` where `where` (module path, else source line) had a chain."""

    pass_name: str
    op: str
    where: str
    detail: str = ""


@dataclass(frozen=True)
class Refusal:
    """One candidate that looked like a chain and was left alone, with the reason."""

    pass_name: str
    where: str
    reason: str


@dataclass(frozen=True)
class PassFailure:
    """A pass raised: the graph went on without it, and the user is told."""

    pass_name: str
    error: str


@dataclass
class Records:
    """Mutable log of one compile, filled by the passes and read by `explain()`.

    fallbacks: places that run on a slower path than the usual one, an unfused ATen kernel say.
    """

    rewrites: list[Rewrite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    tapes: list[TapeDecision] = field(default_factory=list)
    failures: list[PassFailure] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PassContext:
    """What a pass may use. `options` is the backend's frozen options dataclass."""

    options: Any
    records: Records


@dataclass(frozen=True)
class GraphPass:
    """One rewrite of the list `fx_passes.PASSES`; `run` edits the graph module in place.

    A `required` pass is part of what the graph means: it also runs where rewrites are given up, and its failure is the
    compile's failure. Any other pass that raises is undone.

    stage "dynamo" sees the torch-level graph before autograd (nested graph modules of higher-order operators included:
    the manager calls `run` once for each); stage "joint" sees the functionalised forward and backward.
    """

    name: str
    stage: str
    run: Callable[[torch.fx.GraphModule, PassContext], None]
    required: bool = False
