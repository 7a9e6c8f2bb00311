"""Host time of a gated delta rule call on a GPU, 20 s: made anew each time, and repeated from a record (`repeats.py`).

    python benchmarks/time_host.py [1024 4096 8192]

Milliseconds until the last kernel is enqueued, forward, and forward with backward, (16, 48) heads of 128, bf16: the
least of 20 means of three calls, few enough for the queue never to be full.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from time_spans import inputs  # (beside this script)

import ple_gdn
from ple_gdn.ops.gated_delta_rule import repeats

H, HV = 16, 48
ROUNDS, CALLS = 20, 3


def host_ms(call: Callable[[], object]) -> float:
    for _ in range(10):
        call()
    least = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter() - began) / CALLS)
    torch.cuda.synchronize()
    return least * 1e3


def calls(tokens: int) -> dict[str, Callable[[], object]]:
    leaves, do, _ = inputs(((1, tokens), H, HV), "cuda")
    forward = lambda: ple_gdn.gated_delta_rule(*leaves)[0]  # noqa: E731
    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), leaves, do)}


def main() -> None:
    devices = repeats.DEVICES
    for tokens in [int(argument) for argument in sys.argv[1:]] or [1024, 4096, 8192]:
        for name, call in calls(tokens).items():
            found = []
            for repeats.DEVICES in ((), devices):
                found.append(host_ms(call))
            print(f"{tokens:6d} {name:8s} anew {found[0]:.3f}  repeated {found[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
