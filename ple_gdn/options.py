"""The backend's options: one frozen dataclass, the only place that reads and checks `torch.compile(options=...)`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_origin

ROUNDING = ("eager", "eager_all", "fast")
TAPE_REUSE = ("auto", "hand_off", "replay")
SAVE_MODES = ("light", "full")


@dataclass(frozen=True)
class Options:
    """What one compile does. Raises ValueError or TypeError on construction when a value is out of range.

    rounding: "eager" rounds where eager rounds inside the fused regions (and in their gradients), "eager_all" in every
        BF16/FP16 elementwise op of the graph, "fast" is plain Inductor.
    workspace_bytes: bound on the temporaries of a PLE call, forward and backward, unless the call names its own.
    tape_reuse: what a GDN backward inside a checkpoint region does with the tapes of the recomputed forward.
    save_mode: which tapes a GDN forward keeps for its backward.
    memory_budget: bytes of GDN tapes that may be kept in one graph; None leaves `save_mode` alone.
    fuse: False leaves every subgraph as Dynamo traced it (ops called by name are still ours).
    """

    rounding: str = "eager"
    workspace_bytes: int = 64 << 20
    tape_reuse: str = "auto"
    save_mode: str = "light"
    memory_budget: int | None = None
    fuse: bool = True

    def __post_init__(self) -> None:
        _check_choice("rounding", self.rounding, ROUNDING)
        _check_choice("tape_reuse", self.tape_reuse, TAPE_REUSE)
        _check_choice("save_mode", self.save_mode, SAVE_MODES)
        _check_bytes("workspace_bytes", self.workspace_bytes, 1)
        if self.memory_budget is not None:
            _check_bytes("memory_budget", self.memory_budget, 0)
        if not isinstance(self.fuse, bool):
            raise TypeError(f"option 'fuse': expected True or False, got {self.fuse!r}")


OPTION_NAMES = tuple(f.name for f in fields(Options))


def parse_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Splits `torch.compile`'s options into ours and Inductor's, both checked.

    Raises ValueError for a key that is neither ours nor an Inductor config key, naming the nearest valid ones, and
    TypeError for a value whose type Inductor would refuse and for options that are no mapping.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options: expected a dict of option names and values, got {options!r}")
    given = dict(options or {})
    ours = {name: given.pop(name) for name in OPTION_NAMES if name in given}
    return Options(**ours), _check_inductor_options(given)


def _check_inductor_options(given: dict[str, Any]) -> dict[str, Any]:
    if not given:
        return {}
    from torch._inductor import config

    known = config.get_config_copy()
    checked = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(_unknown_option(str(key), known))
        expected = config.get_type(name)
        # As Inductor's own front: generic types such as list[str] cannot be checked with isinstance.
        if get_origin(expected) is None and not isinstance(value, expected):
            raise TypeError(f"option {key!r}: expected {getattr(expected, '__name__', expected)}, got {value!r}")
        checked[name] = value
    return checked


def _unknown_option(key: str, inductor_keys: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, [*OPTION_NAMES, *inductor_keys], n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"unknown option {key!r}.{hint} Valid names are {', '.join(OPTION_NAMES)}, and every key that "
        "torch._inductor.list_options() lists."
    )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"option {name!r}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"option {name!r}: expected one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


def _check_bytes(name: str, value: Any, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"option {name!r}: expected a number of bytes (int), got {value!r}")
    if value < at_least:
        raise ValueError(f"option {name!r}: expected at least {at_least} bytes, got {value}")
    if value >= 2**63:
        raise ValueError(f"option {name!r}: expected at most 2**63 - 1 bytes, got {value}")
