"""Ops of a block in order, and which of the storages they made are still alive."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FIRST_TAPE = {"gated_delta_rule": 2, "gated_delta_rule_tapes": 0, "kcp_gated_delta_rule": 4}


class OpLog(TorchDispatchMode):
    """`calls`: names of the package's ops. `alive_at`: (name, tape bytes alive when it began) of every op.
    `peak_bytes`: most bytes alive after an op, of everything made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.alive_at: list[tuple[str, int]] = []
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def _alive(self) -> list[tuple[int, bool]]:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return [(size, tape) for _, size, tape in self._made.values()]

    @property
    def tape_bytes(self) -> int:
        """Bytes of tapes that are alive now."""
        return sum(size for size, tape in self._alive() if tape)

    @property
    def alive_bytes(self) -> int:
        """Bytes of everything made inside the block that is alive now."""
        return sum(size for size, _ in self._alive())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func.name().split(".")[0].rpartition("::")
        self.alive_at.append((name, self.tape_bytes))
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for i, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                tape = namespace == "ple_gdn" and i >= _FIRST_TAPE.get(name, 99)
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), tape))
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        if namespace == "ple_gdn":
            self.calls.append(name)
        return out
