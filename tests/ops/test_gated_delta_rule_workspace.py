"""Bytes announced for the gated delta rule against bytes bound and saved, tolerance 0."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from oracles.gdn import Case, make_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ple_gdn
from ple_gdn.ops.gated_delta_rule import arena, configs, reference, workspace
from ple_gdn.ops.gated_delta_rule.tapes import FULL, KEPT, Tapes, new_tapes

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


# A leg for every chunk, one or two chunks a span.
SHORT = configs.SpanConfig(leg=1, alone_bytes=0, span_bytes=0)


@pytest.fixture(params=[configs.SPANS, SHORT], ids=["whole", "in spans"])
def spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(configs, "SPANS", request.param)
    return request.param is SHORT


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are walked in pieces of one chunk."""
    monkeypatch.setattr(configs, "CUTS", ((1 << 30, 1),))


class Silent:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The CUDA launchers on CPU tensors: their own allocations and arena, no kernel."""
    pytest.importorskip("triton")
    names = ("launch", "walks", "hopper_walks", "chunk_gradients", "hopper_gradients", "backward_spans", "pieces")
    modules = [importlib.import_module(f"ple_gdn.ops.gated_delta_rule.{name}") for name in names]
    modules.append(importlib.import_module("ple_gdn.ops.kcp.map_kernel"))
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Silent())
    return modules[0]


def launched(launch: ModuleType, case: Case, phase: str, given: torch.Tensor | None = None) -> tuple[arena.Arena, int]:
    """The arena of a launch, and the bytes it allocated besides its outputs."""
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    shared = (*case[:6], *packing, given)
    with arena.recording() as arenas, NewBytes() as new:
        if phase in PHASES:
            kept = KEPT[PHASES[phase]]
            tapes = new_tapes(case.q, case.v, packing.cu_seqlens, kept)
            new.total = 0
            outputs = launch.launch_backward(case.do, case.dfinal_state, *shared, *tapes, None, True)
        elif phase == "tapes":
            outputs = launch.launch_forward(*shared, None, False, True, "full", False)
            assert outputs[0].numel() == 0
        else:
            mode = {"inference": "none", "forward": "light", "forward full": "full"}[phase]
            outputs = launch.launch_forward(*shared, None, True, True, mode)
    (made,) = arenas or [arena.Arena(case.q.device)]  # no token, no temporaries
    return made, new.total - sum(output.nbytes for output in outputs)


class NewBytes(TorchDispatchMode):
    """Counts the bytes of every storage that is made inside."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_leaves(out)
                    if isinstance(x, torch.Tensor)}  # fmt: skip
        self.total += sum(size for storage, size in storages.items() if storage not in given)
        return out


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_evaluated_formulas_are_the_bytes_that_a_run_on_the_cpu_binds(
    lengths: tuple[int, ...], dtype: torch.dtype, phase: str
) -> None:
    case = make_case(lengths, dtype=dtype, **GEOMETRY)
    forward, backward = bound_by_a_run(case, PHASES[phase])
    assert announced(case, "cpu").bytes("forward") == forward
    assert announced(case, "cpu").bytes(phase) == backward


LAUNCHES = {**{name: name for name in workspace.PHASES}, "forward full": "forward", "tapes": "forward"}


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("phase", LAUNCHES)
def test_the_evaluated_formulas_are_the_bytes_that_the_cuda_launchers_bind(
    lengths: tuple[int, ...], dtype: torch.dtype, phase: str, launch: ModuleType, spans: bool
) -> None:
    case = make_case(lengths, dtype=dtype, **GEOMETRY)
    bound, _ = launched(launch, case, phase)
    assert bound.peak == (announced(case, "cuda").bytes(LAUNCHES[phase]) if sum(lengths) else 0)
    several = sum(-(-n // 64) for n in lengths) > 1
    cut = {"backward_replay": several, "backward_kept": several}
    assert ("carry" in bound.bound) == (spans and cut.get(phase, False))


@pytest.mark.parametrize("hopper", [False, True], ids=["plain walks", "Hopper walks"])
@pytest.mark.parametrize("phase", LAUNCHES)
def test_the_cuda_launchers_allocate_outputs_and_the_arena_and_nothing_else(
    phase: str, hopper: bool, launch: ModuleType, monkeypatch: pytest.MonkeyPatch, spans: bool
) -> None:
    from ple_gdn.ops.gated_delta_rule import walks

    monkeypatch.setattr(walks, "uses_hopper", lambda p: hopper)
    width = {"key_width": 128, "value_width": 128, "dtype": torch.bfloat16} if hopper else {}
    case = make_case((70, 0, 1, 64, 65), **{**GEOMETRY, **width})
    bound, beside = launched(launch, case, phase)
    sizes = workspace.Sizes(200, 200 // 64 + 5, 1, 3, case.q.shape[3], case.v.shape[3], case.q.itemsize)
    plan = sizes.spans(LAUNCHES[phase], "cuda")
    assert (plan is not None) == (spans and phase.startswith("backward"))
    assert beside == sum(sizes.buffers(LAUNCHES[phase], "cuda", plan, plan and plan.rows).values())
    given = torch.empty(bound.peak, dtype=torch.uint8)
    assert launched(launch, case, phase, given)[1] == 0
    with pytest.raises(ValueError, match=f"workspace: expected at least {bound.peak} bytes"):
        launched(launch, case, phase, given[:-1])


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("lengths", [(64,), (70, 0, 1, 64, 65), (1, 1, 1), (200, 55)])
@pytest.mark.parametrize("phase", LAUNCHES)
def test_pieces_are_in_the_formulas(lengths: tuple[int, ...], phase: str, launch: ModuleType, spans: bool) -> None:
    case = make_case(lengths, dtype=torch.bfloat16, **GEOMETRY)
    bound, _ = launched(launch, case, phase)
    assert announced(case, "cuda").bytes(LAUNCHES[phase]) == bound.peak
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    sizes = workspace.sizes_of(case.q, case.v, packing.cu_seqlens)
    assert sizes.arena_bytes(LAUNCHES[phase]) == bound.peak
    assert ("piece_maps" in bound.bound) == (sum(lengths) > 64)
    assert announced(case, "cpu").bytes(LAUNCHES[phase]) == sizes.arena_bytes(LAUNCHES[phase], "cpu")


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("phase", LAUNCHES)
def test_launchers_of_pieces_allocate_outputs_and_the_arena_and_nothing_else(
    phase: str, launch: ModuleType, monkeypatch: pytest.MonkeyPatch, spans: bool
) -> None:
    from ple_gdn.ops.gated_delta_rule import walks

    monkeypatch.setattr(walks, "uses_hopper", lambda p: True)
    case = make_case((70, 0, 1, 64, 65), **{**GEOMETRY, "key_width": 128, "value_width": 128}, dtype=torch.bfloat16)
    bound, _ = launched(launch, case, phase)
    given = torch.empty(bound.peak, dtype=torch.uint8)
    assert launched(launch, case, phase, given)[1] == 0


@pytest.mark.parametrize(
    ("HV", "K", "V", "rows", "expected"),
    [
        (6, 128, 128, 261987, 64),  # 12 chains
        (8, 128, 128, 4097, 64),
        (8, 128, 128, 4096, None),  # one piece
        (16, 128, 128, 131072, 256),
        (17, 128, 128, 131072, 256),
        (18, 128, 128, 131072, None),  # 36 chains
        (48, 128, 128, 261987, None),
        (6, 256, 128, 261987, None),
    ],
)
def test_few_heads_and_long_documents_are_cut(HV: int, K: int, V: int, rows: int, expected: int | None) -> None:
    assert configs.piece_length(rows, 2, HV, K, V) == expected
    assert expected is None or expected % configs.SPANS.leg == 0


def bytes_of_phases(case: Case, launch: ModuleType) -> dict[str, dict[str, int]]:
    """What is bound in every phase, by device."""
    cpu = {phase: bound_by_a_run(case, mode)[1] for phase, mode in PHASES.items()}
    cpu |= {"forward": bound_by_a_run(case, "light")[0], "inference": bound_by_a_run(case, "none")[0]}
    return {"cpu": cpu, "cuda": {phase: launched(launch, case, phase)[0].peak for phase in workspace.PHASES}}


def test_a_formula_that_forgets_a_buffer_or_keeps_one_too_long_does_not_match(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case((70, 0, 1), **GEOMETRY)
    bound = bytes_of_phases(case, launch)
    original = workspace.BOUND
    every = set(original["cuda"]["backward_replay"])
    for device, phases in original.items():
        for phase, names in phases.items():
            assert announced(case, device).bytes(phase) == bound[device][phase]
            mutants = [tuple(n for n in names if n != dropped) for dropped in names]
            mutants += [(*names, kept) for kept in every - set(names)]
            for mutant in mutants:
                with monkeypatch.context() as patch:
                    patch.setattr(workspace, "BOUND", {**original, device: {**phases, phase: mutant}})
                    assert announced(case, device).bytes(phase) != bound[device][phase], (device, phase, mutant)


def test_a_run_that_rebuilds_a_tape_it_was_given_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case((70, 0, 1), **GEOMETRY)
    original = reference.complete_tapes

    def wasteful(owner: arena.Arena, tapes: Tapes, *rest: torch.Tensor) -> Tapes:
        arena.bind_tapes(owner, *rest, ("x",))
        return original(owner, tapes, *rest)

    monkeypatch.setattr(reference, "complete_tapes", wasteful)
    assert announced(case, "cpu").bytes("backward_kept") != bound_by_a_run(case, "light")[1]


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


@pytest.mark.parametrize(("save_mode", "buffers"), [("none", FULL), ("light", ("h", "delta")), ("full", ())])
def test_the_scratch_of_a_backward_on_the_cpu_is_in_the_workspace_of_the_caller(
    save_mode: str, buffers: tuple[str, ...]
) -> None:
    case = make_case((70, 0, 65), **GEOMETRY)
    boundaries = torch.tensor(case.boundaries)
    phase = next(phase for phase, mode in PHASES.items() if mode == save_mode)
    tapes = torch.ops.ple_gdn.gated_delta_rule(*case[:6], boundaries, save_mode=save_mode)[2:]
    backward = torch.ops.ple_gdn.gated_delta_rule_backward
    shared = (case.do, case.dfinal_state, *case[:6], boundaries, None)
    plain = backward(*shared, None, *tapes)
    needed = announced(case, "cpu").bytes(phase)
    given = torch.full((announced(case, "cuda").bytes(phase),), 255, dtype=torch.uint8)
    given_twice = backward(*shared, given, *tapes), backward(*shared, given, *tapes)
    assert all(torch.equal(a, b) for other in given_twice for a, b in zip(other, plain, strict=True))
    assert bool((given[needed:] == 255).all())
    rebuilt = torch.ops.ple_gdn.gated_delta_rule_tapes(*case[:6], boundaries)
    start = 0
    for name in buffers:
        tape = rebuilt[FULL.index(name)]
        assert torch.equal(given[start : start + tape.nbytes].view(tape.dtype).view(tape.shape), tape), name
        start += -(-tape.nbytes // 256) * 256
    assert start == needed


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reuse", [True, False, "auto"])
def test_a_workspace_that_is_overwritten_between_the_passes_changes_nothing(
    reuse: bool | str, checkpointed: bool
) -> None:
    case = make_case((70, 0, 65), **GEOMETRY)
    packing = ple_gdn.prepare_varlen(torch.tensor(case.boundaries))
    needed = ple_gdn.gdn_workspace_bytes(packing, *SIZES, dtype=torch.float32, reuse_recompute_tapes=reuse)
    given = torch.empty(needed, dtype=torch.uint8)
    results = []
    for scratch in (None, given):
        leaves = [x.clone().requires_grad_() for x in case[:5]]

        def rule(*tensors: torch.Tensor, scratch: torch.Tensor | None = scratch) -> torch.Tensor:
            options = {"workspace": scratch, "reuse_recompute_tapes": reuse, "cu_seqlens": packing}
            return ple_gdn.gated_delta_rule(*tensors, **options)[0]

        o = checkpoint(rule, *leaves, use_reentrant=False) if checkpointed else rule(*leaves)
        given.fill_(255)
        results.append(torch.autograd.grad(o.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # Handed all tapes, the CPU implementation has nothing to rebuild.
    assert bool((given == 255).all()) == (checkpointed and reuse == "auto")


def test_a_region_refuses_a_short_workspace_before_it_computes() -> None:
    case = make_case((70,), **GEOMETRY)
    leaves = [x.clone().requires_grad_() for x in case[:5]]
    short = torch.empty(announced(case, "cuda").bytes("inference"), dtype=torch.uint8)
    with pytest.raises(ValueError, match="phase backward_replay"):
        checkpoint(lambda *x: ple_gdn.gated_delta_rule(*x, workspace=short)[0], *leaves, use_reentrant=False)


def test_a_workspace_that_starts_off_the_alignment_is_refused() -> None:
    case = make_case((70,), **GEOMETRY)
    given = torch.empty(1 << 22, dtype=torch.uint8)
    ple_gdn.gated_delta_rule(*case[:5], workspace=given[512:])
    with pytest.raises(ValueError, match="workspace: expected a start at a multiple of 256 bytes of its storage, got"):
        ple_gdn.gated_delta_rule(*case[:5], workspace=given[4:])


def test_the_arena_hands_out_disjoint_aligned_slices_and_refuses_more() -> None:
    given = torch.empty(1024, dtype=torch.uint8)
    slices = arena.Arena(torch.device("cpu"), given)
    first, second = slices.bind("first", (3,), torch.float32), slices.bind("second", (5, 10), torch.bfloat16)
    assert first.data_ptr() == given.data_ptr()
    assert second.data_ptr() == given.data_ptr() + 256
    assert slices.peak == 512
    with pytest.raises(ValueError, match="expected at least 1280 bytes, got 1024"):
        slices.bind("third", (700,), torch.uint8)
