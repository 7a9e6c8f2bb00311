"""The short way of a launch: what it passes, and everything that sends a call back to Triton's own way."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ple_gdn.ops import triton_launch

CPU = torch.device("cpu")


class Kernel:
    """Stands for a kernel: compiles at every call that reaches it, and notes calls of what it compiled."""

    arg_names = ("x_ptr", "y_ptr", "n", "WIDTH", "FLAG")
    __name__ = "kernel"

    def __init__(self, specialized: tuple[str, ...] = ()) -> None:
        self.params = [
            types.SimpleNamespace(name=n, do_not_specialize=n == "n" and n not in specialized) for n in self.arg_names
        ]
        self.compiled = 0
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(*arguments: Any, **constants: Any) -> Any:
            self.compiled += 1
            run = lambda *rest: self.calls.append(rest)  # noqa: E731
            return types.SimpleNamespace(run=run, function=7, packed_metadata="packed", name="kernel")

        return first


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = types.SimpleNamespace(get_current_stream=lambda device: 5)
    monkeypatch.setattr(triton_launch, "driver", types.SimpleNamespace(active=driver))
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(triton_launch, "RELEASE", (3, 9))


def go(kernel: Kernel, x: Any, y: Any, n: Any = 3, grid: int = 11, **constants: Any) -> None:
    triton_launch.launch(kernel, grid, (x, y, n), CPU, **{"FLAG": True, "WIDTH": 64, "num_warps": 4, **constants})


def test_the_second_launch_passes_addresses_and_the_constants_in_the_kernels_order() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    go(kernel, x, None)
    assert kernel.calls == []
    other = torch.zeros(8)
    go(kernel, other, None, n=2**20, grid=12)
    assert kernel.compiled == 1
    assert kernel.calls == [(12, 1, 1, 5, 7, "packed", None, None, None, other.data_ptr(), None, 2**20, 64, True)]


def test_what_a_kernel_is_compiled_for_is_compiled_again() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    go(kernel, x, x)
    others = (
        (x.bfloat16(), x), (x, x.long()), (x[1:], x), (x, x[1:]), (x, None), (None, x), (x, x, 1.5), (x, x, True),
        (x, x, 2**31), (x, x, 2**63),
    )  # fmt: skip
    for arguments in others:
        go(kernel, *arguments)
    different = ({"WIDTH": 128}, {"FLAG": False}, {"FLAG": 1}, {"num_warps": 8}, {"maxnreg": 128})
    for constants in different:
        go(kernel, x, x, **constants)
    go(Kernel(), x, x)
    assert kernel.compiled == 1 + len(others) + len(different)
    assert kernel.calls == []
    go(kernel, torch.nn.Parameter(x), x[4:])
    go(kernel, x[:0], x, 2**31 - 1)
    go(kernel, x, x, -(2**31))
    go(kernel, x, x, 2**40)
    assert kernel.compiled == 1 + len(others) + len(different)


def test_a_profilers_hooks_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(8)
    hooks = types.SimpleNamespace(launch_enter_hook=types.SimpleNamespace(calls=[print]), launch_exit_hook=None)
    monkeypatch.setattr(triton_launch, "_hooks", hooks)
    for _ in range(3):
        go(kernel, x, x)
    assert (kernel.compiled, kernel.calls) == (3, [])


def test_what_the_key_cannot_tell_apart_is_refused() -> None:
    class Sub(torch.Tensor):
        pass

    x = torch.zeros(8)
    with pytest.raises(TypeError, match="kernel: expected n to be named in do_not_specialize"):
        go(Kernel(specialized=("n",)), x, x)
    with pytest.raises(TypeError, match="kernel: expected a plain tensor for y_ptr, got Sub"):
        go(Kernel(), x, x.as_subclass(Sub))
    with pytest.raises(TypeError, match="kernel: expected WIDTH to be an argument, not a constant, as it is a float"):
        go(Kernel(), x, x, WIDTH=0.0)


def test_a_kernel_that_compiles_nothing_is_called_every_time() -> None:
    seen = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append((grid, arguments, constants))

    for _ in range(2):
        triton_launch.launch(Interpreted(), 4, (None, 1), CPU, WIDTH=2)
    assert seen == [((4,), (None, 1), {"WIDTH": 2})] * 2


def test_a_tensor_map_is_found_again_by_address_geometry_and_what_it_is_encoded_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []

    def encode(a: triton_launch.TensorMap, how: Any) -> list[Any]:
        made.append((a.tensor.data_ptr(), a.tensor.dtype, a.shape, how["box"]))
        return [len(made), *a.shape]

    monkeypatch.setattr(triton_launch, "_maps", {})
    monkeypatch.setattr(triton_launch, "_encode", encode)
    monkeypatch.setattr(triton_launch, "RELEASE", (3, 6))
    monkeypatch.setattr(triton_launch, "_direct", lambda compiled: (compiled.run, ()))

    class Mapped(Kernel):
        """Compiled for a box: what says how to encode is new with everything that is compiled."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def first(x: Any, *arguments: Any, **constants: Any) -> Any:
                compiled = Kernel.__getitem__(self, grid)(x, *arguments, **constants)
                compiled.metadata = types.SimpleNamespace(tensordesc_meta=[{"box": x}])
                return compiled

            return first

    monkeypatch.setattr(triton_launch.TensorMap, "descriptor", lambda a: a.box.block)
    kernel, small, large = Mapped(), triton_launch.Box((8,), None), triton_launch.Box((16,), None)
    memory = torch.zeros(64)
    address = memory.data_ptr()

    def mapped(tensor: torch.Tensor, shape: tuple[int, ...], box: triton_launch.Box = small) -> None:
        go(kernel, triton_launch.TensorMap(tensor, shape, box), None)

    again = memory.view(torch.int32)  # the same memory as another tensor, of another type
    for _ in range(3):
        mapped(memory, (64,))
        mapped(memory.view(8, 8), (64,))
        mapped(memory, (8, 8))
        mapped(again, (64,))
        mapped(memory[4:], (60,))
        mapped(memory, (64,), large)
    assert made == [
        (address, torch.float32, (64,), (8,)),
        (address, torch.float32, (8, 8), (8,)),
        (address + 16, torch.float32, (60,), (8,)),
        (address, torch.int32, (64,), (8,)),
        (address, torch.float32, (64,), (16,)),
    ]
    assert kernel.compiled == 3
    assert {call[4] for call in kernel.calls} == {1, 2, 3, 4, 5}

    monkeypatch.setattr(triton_launch, "MOST_MAPS", 6)
    for rows in range(1, 20):
        mapped(memory, (rows,))
        assert len(triton_launch._maps) <= 6
    owner = weakref.ref(memory)
    del memory, again
    assert owner() is None
