"""The one way host tables reach the device: one pinned buffer and one asynchronous copy per dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

ALIGNMENT = 256  # bytes: every table starts where a vectorised load may


def upload_tables(
    tables: Mapping[str, tuple[torch.dtype, Sequence[int]]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Lays the tables of each dtype out in one buffer at 256-byte boundaries and copies that buffer once.

    The copy from pinned memory does not synchronise the stream; the caching host allocator keeps the pinned buffer
    until the copy has run. On the CPU the buffers are the result: the same tables, bit for bit.
    """
    out: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(dtype for dtype, _ in tables.values()):
        step = ALIGNMENT // dtype.itemsize
        names = [name for name, (d, _) in tables.items() if d == dtype]
        offsets, total = {}, 0
        for name in names:
            offsets[name] = total
            total += -(-len(tables[name][1]) // step) * step
        host = torch.zeros(total, dtype=dtype, pin_memory=device.type == "cuda")
        for name in names:
            values = tables[name][1]
            host[offsets[name] : offsets[name] + len(values)] = torch.tensor(values, dtype=dtype)
        buffer = host.to(device, non_blocking=True) if device.type == "cuda" else host
        for name in names:
            out[name] = buffer[offsets[name] : offsets[name] + len(tables[name][1])]
    return out
