"""Bytes announced for the gated delta rule against bytes bound and saved, tolerance 0."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import Case, make_case

import ple_gdn
from ple_gdn.ops.gated_delta_rule import arena, workspace
from ple_gdn.ops.gated_delta_rule.tapes import FULL, KEPT, tape_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

PACKS = ((64,), (70, 0, 1, 64, 65), (0,), (1, 1, 1), (200, 55))
PHASES = {"backward_replay": "none", "backward_kept": "light", "full": "full"}
GEOMETRY = {"heads": 1, "value_heads": 3, "key_width": 16, "value_width": 48}
SIZES = (1, 3, 16, 48)


def announced(case: Case, device: str, **options: str) -> workspace.WorkspaceLayout:
    boundaries = torch.tensor(case.boundaries)
    return ple_gdn.gdn_workspace_layout(boundaries, *SIZES, dtype=case.q.dtype, device=device, **options)


def bound_by_a_run(case: Case, save_mode: str) -> tuple[int, int]:
    """Peak bytes of the arenas of a forward and of a backward that gets the tapes of `save_mode`."""
    boundaries = torch.tensor(case.boundaries)
    with arena.recording() as forward:
        tapes = torch.ops.ple_gdn.gated_delta_rule(*case[:6], boundaries, save_mode=save_mode)[2:]
    with arena.recording() as backward:
        torch.ops.ple_gdn.gated_delta_rule_backward(
            case.do, case.dfinal_state, *case[:6], boundaries, None, None, *tapes
        )
    return sum(a.peak for a in forward), sum(a.peak for a in backward)


def bound_by_the_kernels(case: Case, phase: str) -> int:
    """What the CUDA launchers bind: missing tapes, row table and scores of each chunk, adjoint states shaped as h."""
    boundaries = torch.tensor(case.boundaries)
    missing = tuple(name for name in FULL if name not in KEPT[PHASES[phase]])
    recorded = arena.Arena(torch.device("cpu"))
    arena.bind_tapes(recorded, case.q, case.v, boundaries, missing)
    chunks, heads = tape_shapes(case.q, case.v, boundaries)["h"][:2]
    recorded.bind("row_table", (chunks, heads, 5 * 64), torch.float32)
    recorded.bind("scores", (chunks, heads, 64, 64), case.q.dtype)
    recorded.bind("dh", tape_shapes(case.q, case.v, boundaries)["h"], case.q.dtype)
    return recorded.peak


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_evaluated_formulas_are_the_bytes_that_are_bound(
    lengths: tuple[int, ...], dtype: torch.dtype, phase: str
) -> None:
    case = make_case(lengths, dtype=dtype, **GEOMETRY)
    forward, backward = bound_by_a_run(case, PHASES[phase])
    assert announced(case, "cpu").bytes("forward") == forward
    assert announced(case, "cpu").bytes(phase) == backward
    assert announced(case, "cuda").bytes(phase) == bound_by_the_kernels(case, phase)


@pytest.mark.parametrize("buffer", FULL)
def test_a_formula_that_forgets_a_tape_does_not_match(buffer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = {
        device: {phase: tuple(name for name in names if name != buffer) for phase, names in phases.items()}
        for device, phases in workspace.BOUND.items()
    }
    case = make_case((70, 0, 1), **GEOMETRY)
    monkeypatch.setattr(workspace, "BOUND", bound)
    assert announced(case, "cpu").bytes("backward_replay") != bound_by_a_run(case, "none")[1]
    assert announced(case, "cuda").bytes("backward_replay") != bound_by_the_kernels(case, "backward_replay")


def test_every_phase_is_symbolic_and_equals_its_integer_form() -> None:
    layout = announced(make_case((70, 0, 65), **GEOMETRY), "cuda")
    assert tuple(layout) == workspace.PHASES
    assert {str(symbol) for symbol in layout["backward_replay"].free_symbols} == {"T", "N", "H", "HV", "K", "V", "e"}
    sizes = workspace.Sizes(135, 135 // 64 + 3, *SIZES, 4)
    for phase in workspace.PHASES:
        assert layout.bytes(phase) == sizes.arena_bytes(phase)


@pytest.mark.parametrize("reuse", [True, False, "auto"])
@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_a_workspace_of_the_announced_size_is_accepted_and_one_byte_less_is_not(
    save_mode: str, reuse: bool | str
) -> None:
    case = make_case((70, 0, 65), **GEOMETRY)
    options = {"save_mode": save_mode, "reuse_recompute_tapes": reuse}
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    needed = ple_gdn.gdn_workspace_bytes(packing, *SIZES, dtype=torch.float32, **options)
    leaves = [x.clone().requires_grad_() for x in case[:5]]
    o, _ = ple_gdn.gated_delta_rule(
        *leaves, cu_seqlens=packing, workspace=torch.full((needed,), 255, dtype=torch.uint8), **options
    )
    o.sum().backward()
    plain = [x.clone().requires_grad_() for x in case[:5]]
    ple_gdn.gated_delta_rule(*plain, cu_seqlens=packing, **options)[0].sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, plain, strict=True))
    short = torch.empty(needed - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"workspace: expected at least {needed} bytes"):
        ple_gdn.gated_delta_rule(*leaves, cu_seqlens=packing, workspace=short, **options)


def test_the_arena_hands_out_disjoint_aligned_slices_and_refuses_more() -> None:
    given = torch.empty(1024, dtype=torch.uint8)
    slices = arena.Arena(torch.device("cpu"), given)
    first, second = slices.bind("first", (3,), torch.float32), slices.bind("second", (5, 10), torch.bfloat16)
    assert first.data_ptr() == given.data_ptr()
    assert second.data_ptr() == given.data_ptr() + 256
    assert slices.peak == 512
    with pytest.raises(ValueError, match="expected at least 1280 bytes, got 1024"):
        slices.bind("third", (700,), torch.uint8)


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_saved_bytes_are_those_of_the_tapes(lengths: tuple[int, ...], save_mode: str) -> None:
    case = make_case(lengths, dtype=torch.bfloat16, **GEOMETRY)
    leaves = [x.clone().requires_grad_() for x in case[:5]]
    known = {x.untyped_storage()._cdata for x in leaves}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    boundaries = torch.tensor(case.boundaries)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ple_gdn.gated_delta_rule(*leaves, cu_seqlens=boundaries, save_mode=save_mode)
    expected = ple_gdn.gdn_saved_bytes(boundaries, *SIZES, dtype=torch.bfloat16, save_mode=save_mode)
    assert sum(saved.values()) == expected


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_saved_bytes_of_a_shard_count_its_segments(save_mode: str) -> None:
    case = make_case((200, 70), **GEOMETRY)
    context = ple_gdn.build_kcp_context(
        ple_gdn.kcp_partition(torch.tensor(case.boundaries), 1), None, 0, "cpu", p_rule=3
    ).prepare(1, 3)
    outputs = torch.ops.ple_gdn.kcp_gated_delta_rule(
        *(*case[:6], context.pack, context.table, context.segments, context.chunk_offsets, context.map_rows),
        save_mode=save_mode,
    )
    saved = sum(tensor.nbytes for tensor in outputs[2:])
    options = {"dtype": torch.float32, "save_mode": save_mode, "cp": context}
    assert ple_gdn.gdn_saved_bytes(torch.tensor(case.boundaries), *SIZES, **options) == saved


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"H": 2}, ValueError, "HV: expected a positive multiple of H = 2, got 3"),
        ({"H": 1.0}, TypeError, "H: expected an int, got float"),
        ({"K": 24}, ValueError, "K: expected a head width"),
        ({"dtype": torch.int8}, TypeError, "dtype: expected"),
        ({"save_mode": "none"}, ValueError, "save_mode: expected 'light' or 'full'"),
        ({"reuse_recompute_tapes": "yes"}, ValueError, "reuse_recompute_tapes: expected"),
        ({"cu_seqlens": torch.tensor([1, 5])}, ValueError, "cu_seqlens: expected the first entry to be 0"),
        ({"cp": 3}, TypeError, "cp: expected a KcpContext from build_kcp_context, got int"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: expected a torch.Tensor"),
    ],
)
def test_bad_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    arguments = dict(zip(("H", "HV", "K", "V"), SIZES, strict=True))
    arguments |= {"cu_seqlens": torch.tensor([0, 5]), "dtype": torch.float32} | change
    for function in (ple_gdn.gdn_workspace_bytes, ple_gdn.gdn_workspace_layout, ple_gdn.gdn_saved_bytes):
        with pytest.raises(error, match=message):
            function(**arguments)
