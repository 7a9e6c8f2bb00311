"""Input checks of the gated delta rule ops: metadata only, so the implementations and the fakes share them."""

from __future__ import annotations

import torch

from ..validation import FLOATS, check_device, check_dtype, check_rank, check_shape
from ..varlen import check_packing
from .arena import ALIGNMENT
from .tapes import SAVE_MODES, Tapes, document_count, state_dtype, tape_dtype, tape_shapes

REUSE_MODES = ("hand_off", "replay", "auto")
WIDTHS = tuple(range(16, 257, 16))


_passed: set[tuple[object, ...]] = set()
_MOST_PASSED = 4096


def passed_before(*arguments: object) -> bool:
    """Whether `remember_passed` got arguments of the same metadata: every check of this file looks at nothing else.

    Saves 30 us of host time a call. A workspace is looked at closer, so a call that has one is checked every time.
    """
    return _metadata(arguments) in _passed


def remember_passed(*arguments: object) -> None:
    if len(_passed) >= _MOST_PASSED:
        _passed.clear()
    _passed.add(_metadata(arguments))


def _metadata(arguments: tuple[object, ...]) -> tuple[object, ...]:
    return tuple((a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in arguments)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError naming the argument, what was expected and what arrived."""
    check_rank("q", q, 4, "[B, T, H, K]")
    check_rank("v", v, 4, "[B, T, HV, V]")
    check_shape("k", k, tuple(q.shape), "[B, T, H, K] (that of q)")
    batch, tokens, heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    check_shape("v", v, (batch, tokens, value_heads, value_width), "[B, T, HV, V] with B and T of q")
    for name, gate in (("g", g), ("beta", beta)):
        check_shape(name, gate, (batch, tokens, value_heads), "[B, T, HV]")
    if heads < 1 or value_heads < heads or value_heads % heads:
        raise ValueError(f"v: expected HV to be a positive multiple of H = {heads}, got HV = {value_heads}")
    for name, letter, width in (("q", "K", key_width), ("v", "V", value_width)):
        if width not in WIDTHS:
            raise ValueError(f"{name}: expected head width {letter} to be 16 to 256 in steps of 16, got {width}")
    _check_dtypes(q, k, v, g, beta)
    for name, tensor in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_device(name, tensor, q.device, "q")
    check_packing(batch, q.device, cu_seqlens, chunk_offsets)
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, v, cu_seqlens)
    if workspace is not None:
        _check_workspace(workspace, q.device)


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
    """float64 is for reference runs on the CPU; everywhere else g is fp32, as the gates are accumulated in fp32."""
    wide = (torch.float64,) if q.device.type != "cuda" else ()
    check_dtype("q", q, (*FLOATS, *wide))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} (that of q), got {tensor.dtype}")
    exact = wide if q.dtype == torch.float64 else ()
    check_dtype("g", g, (torch.float32, *exact))
    check_dtype("beta", beta, (*FLOATS, *exact))


def _check_state(
    name: str, state: torch.Tensor, q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> None:
    shape = (document_count(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    check_shape(name, state, shape, "[N, HV, K, V], N documents (batch rows without cu_seqlens)")
    check_dtype(name, state, (state_dtype(q),))
    check_device(name, state, q.device, "q")


def _check_workspace(workspace: torch.Tensor, device: torch.device) -> None:
    check_rank("workspace", workspace, 1, "[bytes]")
    check_dtype("workspace", workspace, (torch.uint8,))
    check_device("workspace", workspace, device, "q")
    if not workspace.is_contiguous():
        raise ValueError(f"workspace: expected a contiguous tensor, got stride {tuple(workspace.stride())}")
    if workspace.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"workspace: expected a start at a multiple of {ALIGNMENT} bytes of its storage, got byte "
            f"{workspace.storage_offset()}"
        )


def check_modes(save_mode: str, reuse_recompute_tapes: str) -> None:
    if save_mode not in SAVE_MODES:
        raise ValueError(f"save_mode: expected one of {', '.join(map(repr, SAVE_MODES))}, got {save_mode!r}")
    if reuse_recompute_tapes not in REUSE_MODES:
        names = ", ".join(map(repr, REUSE_MODES))
        raise ValueError(f"reuse_recompute_tapes: expected one of {names}, got {reuse_recompute_tapes!r}")


def check_backward_inputs(
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    tapes: Tapes,
) -> None:
    """What the backward receives on top of the forward's inputs."""
    check_shape("do", do, tuple(v.shape), "[B, T, HV, V] (that of v)")
    check_dtype("do", do, (q.dtype,))
    check_device("do", do, q.device, "q")
    if dfinal_state is not None:
        _check_state("dfinal_state", dfinal_state, q, v, cu_seqlens)
    shapes = tape_shapes(q, v, cu_seqlens)
    for name, tape in tapes._asdict().items():
        if tape.dim() == 1 and isinstance(tape.shape[0], int) and tape.shape[0] == 0:
            continue
        kind = "starts" if name == "h" and tape.dim() == 1 else name
        check_shape(name, tape, shapes[kind], "as the forward made it, or (0,)")
        check_dtype(name, tape, (tape_dtype(kind, q),))
