"""A call repeated from a record gives every kernel what it would get without one, and is recorded only if it may be."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.gdn import Case, make_case

import ple_gdn
from ple_gdn.ops.gated_delta_rule import configs

pytest.importorskip("triton")
from ple_gdn.ops import triton_launch
from ple_gdn.ops.gated_delta_rule import launch, repeats, walks

MODULES = ("launch", "walks", "hopper_walks", "chunk_gradients", "hopper_gradients", "hopper_operands",
           "backward_spans", "pieces")  # fmt: skip
LENGTHS = (70, 0, 1, 64, 65)
MAPS = tuple(object() for _ in range(16))
MODES = ("none", "light", "full")


class Kernel:
    """Compiles at once; `calls` of all kernels are what the GPU would have been given."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.__name__, self.calls = name, calls

    def compile(self) -> triton_launch._Compiled:
        call = lambda *given: self.calls.append((self.__name__, *given))  # noqa: E731
        return triton_launch._Compiled(call, (), (), MAPS, self)


class Memory:
    """Hands the same tensors out again to every call of a step, as an allocator does step by step."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self.next = 0

    def empty(self, shape: Any, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        if self.next == len(self.blocks):
            self.blocks.append(torch.empty(1 << 24, dtype=torch.uint8))
        block = self.blocks[self.next]
        self.next += 1
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return block[:size].view(dtype).view(shape)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Launchers on CPU tensors with kernels that note what they are given, and nothing remembered."""
    calls: list[tuple[Any, ...]] = []
    for name in MODULES:
        module = importlib.import_module(f"ple_gdn.ops.gated_delta_rule.{name}")
        for kernel in [kernel for kernel in vars(module) if kernel.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Kernel(kernel, calls))
    module = importlib.import_module("ple_gdn.ops.kcp.map_kernel")
    monkeypatch.setattr(module, "map_kernel", Kernel("map_kernel", calls))
    active = types.SimpleNamespace(get_current_stream=lambda device: state.stream, get_current_device=lambda: None)
    state = types.SimpleNamespace(calls=calls, memory=Memory(), stream=5, by_triton=0)

    def by_triton(kernel: Kernel, grid: int, arguments: Any, constants: Any, key: Any) -> None:
        state.by_triton += 1
        triton_launch._compiled[key] = kernel.compile()

    monkeypatch.setattr(triton_launch, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launch, "_by_triton", by_triton)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(triton_launch, "_maps", {})
    monkeypatch.setattr(triton_launch, "_encode", lambda a, how: [a.tensor.data_ptr(), *a.shape, a.box.block])
    monkeypatch.setattr(repeats, "_shapes", {})
    monkeypatch.setattr(repeats, "_records", {})
    monkeypatch.setattr(repeats, "DEVICES", ("cpu",))
    monkeypatch.setattr(
        launch.Problem, "new", lambda p, *shape, dtype=None: state.memory.empty(shape, dtype=dtype or p.dtype)
    )
    fake = types.SimpleNamespace(empty=state.memory.empty, uint8=torch.uint8, Tensor=torch.Tensor)
    monkeypatch.setattr(repeats, "torch", fake)
    return state


def step(gpu: types.SimpleNamespace, work: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """What a step passes to its kernels; its memory is that of the step before."""
    gpu.memory.next = 0
    gpu.calls.clear()
    work()
    return list(gpu.calls)


def forward(case: Case, mode: str = "light", workspace: torch.Tensor | None = None, **changed: Any) -> tuple:
    case = case._replace(**changed)
    packing = (None, None) if case.boundaries is None else PACKING
    return launch.launch_forward(*case[:6], *packing, workspace, 0.25, True, True, mode)


def backward(case: Case, tapes: tuple, workspace: torch.Tensor | None = None) -> tuple:
    packing = (None, None) if case.boundaries is None else PACKING
    return launch.launch_backward(case.do, case.dfinal_state, *case[:6], *packing, workspace, *tapes, 0.25, True)


PACKING = ple_gdn.prepare_varlen(torch.tensor([0, 70, 70, 71, 135, 200]))


def example(**options: Any) -> Case:
    return make_case(LENGTHS, heads=1, value_heads=3, **{"key_width": 16, "value_width": 48, **options})


@pytest.mark.parametrize("cut", ["whole", "spans", "pieces", "pieces in spans"])
@pytest.mark.parametrize("hopper", [False, True], ids=["plain walks", "Hopper walks"])
@pytest.mark.parametrize("given", [False, True], ids=["", "workspace"])
def test_a_repeated_step_passes_what_it_would_pass_without_a_record(
    cut: str, hopper: bool, given: bool, gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "spans" in cut:
        monkeypatch.setattr(configs, "SPANS", configs.SpanConfig(1, 0, 1 << 18))
    if "pieces" in cut:
        monkeypatch.setattr(configs, "CUTS", ((1 << 30, 1),))
    monkeypatch.setattr(walks, "uses_hopper", lambda p: hopper)
    monkeypatch.setattr(launch, "uses_hopper_operands", lambda p: hopper)
    widths = {"key_width": 128, "value_width": 128, "dtype": torch.bfloat16} if hopper else {}
    case, space = example(**widths), torch.empty(1 << 24, dtype=torch.uint8) if given else None
    for mode in MODES:

        def work(mode: str = mode) -> None:
            tapes = forward(case, mode, space)[2:]
            backward(case, tapes, space)

        step(gpu, work)  # compiles, and finds out how much memory the temporaries take
        with monkeypatch.context() as patch:
            patch.setattr(repeats, "DEVICES", ())
            alone = step(gpu, work)
        second, recorded, compiled = step(gpu, work), step(gpu, work), gpu.by_triton
        assert len(second) > 3
        assert second == recorded
        if given:
            assert second == alone
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_forward", None)
            patch.setattr(launch, "_backward", None)
            gpu.stream = 6
            again = step(gpu, work)
        assert gpu.by_triton == compiled
        assert again == [(*call[:4], 6, *call[5:]) for call in second]
        gpu.stream = 5


def test_only_addresses_and_shapes_that_were_recorded_are_repeated(gpu: types.SimpleNamespace) -> None:
    case = example()
    work = lambda **changed: step(gpu, lambda: forward(case, **changed))  # noqa: E731
    plain = [work() for _ in range(4)][-1]
    other = case.q.clone()
    moved = work(q=other)
    assert moved != plain
    assert [tuple(other.data_ptr() if a == case.q.data_ptr() else a for a in call) for call in plain] == moved
    for changed in ({"beta": case.beta.bfloat16()}, {"initial_state": None}, {"mode": "none"}):
        assert work(**changed) != plain
    assert work() == plain


def test_a_call_that_copies_an_argument_or_allocates_is_never_recorded(gpu: types.SimpleNamespace) -> None:
    case, runs = example(), []
    for spoil in (lambda: case.q.clone(), lambda: torch.empty(3), lambda: case.q.zero_()):

        def body(arena: Any, spoil: Callable[[], Any] = spoil) -> None:
            runs.append(arena.bind("x", (4,), torch.float32))
            spoil()

        for _ in range(6):
            gpu.memory.next = 0
            repeats.run((spoil,), (case.q,), (), None, case.q.device, body)
    assert len(runs) == 18


def test_a_call_by_tritons_own_path_is_not_recorded(
    gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seen = example(), []
    for _ in range(4):
        step(gpu, lambda: forward(case))
    monkeypatch.setattr(triton_launch, "_watched", lambda: True)  # a profiler's hooks
    before = gpu.by_triton
    seen = [step(gpu, lambda: forward(case)) for _ in range(3)]
    assert gpu.by_triton > before
    assert seen == [[], [], []]
    monkeypatch.setattr(triton_launch, "_watched", lambda: False)
    assert [len(step(gpu, lambda: forward(case))) > 2 for _ in range(3)] == [True] * 3


def test_what_is_remembered_is_bounded(gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_SHAPES", 3)
    monkeypatch.setattr(repeats, "MOST_RECORDS", 2)
    case = example()
    kept = [case.q.clone() for _ in range(8)]
    for q in (*kept, *kept):
        step(gpu, lambda q=q: forward(case, q=q))
    for scale in range(8):
        repeats.run((scale,), (case.q,), (), None, case.q.device, lambda arena: None)
    assert len(repeats._shapes) <= 3
    assert len(repeats._records) <= 2


def test_a_scale_of_minus_zero_is_another_call(gpu: types.SimpleNamespace) -> None:
    case, seen = example(), []
    for scale in (0.0, -0.0) * 5:
        gpu.memory.next = 0
        repeats.run(("x", scale), (case.q,), (), None, case.q.device, lambda arena, scale=scale: seen.append(scale))
    assert len(repeats._shapes) == 2


def test_a_record_that_missed_a_launch_is_not_repeated(
    gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = example()
    work = lambda: step(gpu, lambda: forward(case))  # noqa: E731
    work()
    expected = work()
    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "_watched", lambda: True)  # in the call that would be recorded
        assert work() == []
    assert [work() for _ in range(3)] == [expected] * 3


def test_another_dtype_at_the_same_addresses_is_another_call(gpu: types.SimpleNamespace) -> None:
    half = example(dtype=torch.float16)
    other = half._replace(**{name: getattr(half, name).view(torch.bfloat16) for name in ("q", "k", "v")})
    for _ in range(4):
        step(gpu, lambda: forward(half))
    compiled = gpu.by_triton
    step(gpu, lambda: forward(other))
    assert gpu.by_triton > compiled
