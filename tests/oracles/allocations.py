"""Peak of live CPU allocations inside a block, temporaries of ATen's own included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    peak: int = 0
    """Bytes alive at once at the worst moment, allocated since the block was entered."""


@contextmanager
def peak_bytes() -> Iterator[Peak]:
    """Reads the allocator's events through the profiler; `peak` is valid after the block."""
    result = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        result.peak = max(result.peak, live)
