"""Python's cycle collector, held while a graph is compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """No cycle collection inside, in any thread; overlapping holders release it together.

    A compile makes hundreds of thousands of objects that stay, so each full collection walks a growing heap for
    nothing: 6 % of a cold compile.
    """
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()
