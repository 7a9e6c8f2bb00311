"""Tapes of an eager call in a checkpoint region: handed to its backward, or replayed there.

Whatever is decided, the region's forward and its rerun save the same tensors, the call's inputs and no tape, since
checkpoint compares them. The tapes travel beside them:

    backward of the call            opens a Request naming the call's place in its region, then unpacks its inputs
      rerun of the region           runs up to the call at that place, the last saver: tapes go into the Request, and
                                    saving the inputs ends the rerun before any output is computed
    backward of the call            closes the Request and reads its tapes

So the open requests of a thread are the whole registry: each lives in the stack frame of its backward, and nothing is
left after it, with `retain_graph=True` (the next backward reruns the region) and when it raises too. A rerun that
another node's backward asked for finds no request of its own, and one with later savers hands nothing over: the
backward then finds neither tapes nor a request answered, and rebuilds them ("replay").
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from ..torch_versions import checkpoint_is_verified
from .checkpoint_frame import Region, inside_a_backward, of_checkpoint, pack_hooks, region_of, selective
from .checks import check_inputs
from .tape_decisions import make_decision, remember, replay_flops
from .tapes import KEPT, Tapes, new_tapes
from .workspace import check_workspace_bytes, needed_phases, sizes_of

_CALLS = "ple_gdn_calls"  # attribute of a checkpoint frame: position -> _Call


class Place(NamedTuple):
    """A call's position in its region: how many tensors were saved before it."""

    frame: weakref.ref
    position: int

    def of(self, region: Region) -> bool:
        return self.frame() is region.frame and self.position == region.position


@dataclass
class Request:
    """A backward that waits for its saved tensors, and the tapes the region's rerun made for it."""

    place: Place | None
    tapes: Tapes | None = None


@dataclass
class _Call:
    """What the region's forward found out about the call at a position."""

    save_mode: str
    open: bool  # the rerun decides
    saved: int = 0  # tensors


class _Thread(threading.local):
    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.place: Place | None = None


_thread = _Thread()


def current_place() -> Place | None:
    """Place of the call that runs now, for the context of its autograd node."""
    return _thread.place


@contextmanager
def requesting(place: Place | None) -> Iterator[Request]:
    """Open while the node at `place` unpacks its saved tensors."""
    request = Request(place)
    _thread.requests.append(request)
    try:
        yield request
    finally:
        _thread.requests.pop()


def handed_bytes() -> int:
    """Bytes of tapes in the calling thread's open requests: zero outside a backward."""
    return sum(t.nbytes for request in _thread.requests if request.tapes is not None for t in request.tapes)


class _SaveOnly(torch.autograd.Function):
    """Saves what the op would save, and nothing else."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)


class _Front(NamedTuple):
    """One call of the public front: the raw op's arguments, and how it is called."""

    op: Callable[..., tuple[torch.Tensor, ...]]
    tensors: tuple[torch.Tensor | None, ...]
    options: dict[str, Any]

    def run(self, save_mode: str) -> tuple[torch.Tensor, ...]:
        if save_mode == "none" and self.tensors[-1] is not None:
            # The op sees a forward without a backward; here is the last chance to refuse before anything is computed.
            check_inputs(*self.tensors)
            q, _, v, _, _, _, cu_seqlens, _, workspace = self.tensors
            phases = needed_phases(self.options["save_mode"], hand_off=False)
            check_workspace_bytes(workspace, sizes_of(q, v, cu_seqlens), phases)
        return self.op(*self.tensors, **{**self.options, "save_mode": save_mode})

    def record(self, region: str, verdict: str, reason: str) -> None:
        q, _, v, _, _, _, cu_seqlens, *_ = self.tensors
        _record(region, verdict, reason, q, v, cu_seqlens, self.options["save_mode"])


def _record(
    region: str,
    verdict: str,
    reason: str,
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    save_mode: str,
) -> None:
    sizes = sizes_of(q, v, cu_seqlens)
    at_stake = sum(sizes.bytes_of(name) for name in KEPT[save_mode])
    remember(make_decision(region, verdict, reason, at_stake, replay_flops(q, v)))


def _settled(asked: str, hooks: list[Callable]) -> tuple[str, str] | None:
    """(verdict, reason) where no look into the region is needed or possible."""
    if asked == "hand_off":
        return "hand-off", "asked for: the rerun makes the tapes, which live until they are read"
    if asked == "replay":
        return "replay", "asked for"
    if not any(map(of_checkpoint, hooks)):
        return "replay", "a forward inside a backward (reentrant checkpoint): the order of savers is not known"
    if not checkpoint_is_verified():
        return "replay", f"the checkpoint frame of torch {torch.__version__} was not verified"
    if not of_checkpoint(hooks[0]):
        return "replay", "saved-tensor hooks of the caller are active inside the region"
    return None


def region_save_mode(q: torch.Tensor, v: torch.Tensor, save_mode: str, asked: str, *, why_replay: str) -> str:
    """Save mode of an op whose tapes an eager region never hands over on its own: `why_replay` says why."""
    hooks = pack_hooks()
    inside, backward = any(map(of_checkpoint, hooks)), inside_a_backward()
    if not inside and not backward:
        return save_mode
    verdict, reason = _settled(asked, hooks) or ("replay", why_replay)
    if not (inside and backward):
        _record("checkpoint region", verdict, reason, q, v, None, save_mode)
    return save_mode if verdict == "hand-off" else "none"


def call_in_region(
    op: Callable[..., tuple[torch.Tensor, ...]], tensors: tuple[torch.Tensor | None, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """`op(*tensors, **options)` for an eager call that wants gradients, as its checkpoint region needs it."""
    front = _Front(op, tensors, options)
    hooks = pack_hooks()
    inside, backward = any(map(of_checkpoint, hooks)), inside_a_backward()
    if not inside and not backward:
        return front.run(options["save_mode"])
    settled = _settled(options["reuse_recompute_tapes"], hooks)
    if settled is None:
        region = region_of(hooks[0])
        return _rerun(front, region) if region.rerun else _forward(front, region, hooks)
    if not (inside and backward):  # a rerun repeats what its forward recorded
        front.record("checkpoint region" if inside else "backward", *settled)
    return front.run(options["save_mode"] if settled[0] == "hand-off" else "none")


def _forward(front: _Front, region: Region, hooks: list[Callable]) -> tuple[torch.Tensor, ...]:
    """The region's first pass: settles what can be settled, and notes how many tensors the call saves."""
    settled = None
    if not all(map(of_checkpoint, hooks)):
        settled = "replay", "saved-tensor hooks of the caller are active around the region"
    elif selective():
        settled = "saved", "selective checkpointing decides what it keeps"
    elif not region.early_stop:
        settled = "replay", "early stop is off: the rerun goes on to the region's end"
    if settled is not None:
        front.record(region.name, *settled)
    save_mode = front.options["save_mode"] if settled is not None and settled[0] == "saved" else "none"
    call = _Call(save_mode, open=settled is None)
    vars(region.frame).setdefault(_CALLS, {})[region.position] = call
    _thread.place = Place(weakref.ref(region.frame), region.position)
    before = region.position
    try:
        outputs = front.run(save_mode)
    finally:
        _thread.place = None
    call.saved = region.position - before
    return outputs


def _rerun(front: _Front, region: Region) -> tuple[torch.Tensor, ...]:
    call = vars(region.frame).get(_CALLS, {}).get(region.position)
    if call is None or not call.open:
        return front.run("none" if call is None else call.save_mode)
    behind = region.total - region.position - call.saved
    if behind:
        front.record(region.name, "replay", f"{behind} tensors are saved behind it in the region")
        return front.run("none")
    request = _thread.requests[-1] if _thread.requests else None
    if request is not None and request.place is not None and request.place.of(region):
        front.record(region.name, "hand-off", f"the region's last saver, tensor {region.total} of {region.total}")
        request.tapes = _tapes(front)
    else:
        front.record(region.name, "replay", "the region's last saver, but another node's backward had it rerun")
    _end_rerun(front)


def _tapes(front: _Front) -> Tapes:
    options = {name: front.options[name] for name in ("scale", "use_qk_l2norm")}
    with torch.no_grad():
        return Tapes(*torch.ops.ple_gdn.gated_delta_rule_tapes(*front.tensors, **options))


def _end_rerun(front: _Front) -> NoReturn:
    """Saves the call's inputs without making its output, which nobody reads: early stop ends the rerun there."""
    q, _, v, _, _, _, cu_seqlens, *_ = front.tensors
    _SaveOnly.apply(*front.tensors[:-1], *new_tapes(q, v, cu_seqlens, ()))  # all but the workspace
    raise RuntimeError(f"torch {torch.__version__}: the rerun of a checkpoint region went past its last saved tensor")
