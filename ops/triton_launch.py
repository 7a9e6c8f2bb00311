"""Launches of Triton and Gluon kernels: by Triton's own path the first time, after that at the cost of the driver call.

Triton's path binds arguments by name, asks the type and alignment of each, builds a string of it all, compares the
globals of the kernel and encodes every tensor map: 50 us for 30 arguments, 14 us more for each map. `launch` keeps the
compiled kernel by what that binding depends on: the kernel, the constants, dtype and alignment of each tensor, and
whether a number fits 32 bits.
Tensor maps are kept by address and geometry: a map is a value, so one that is found again is right, whoever owns the
memory now.

`record` notes the launches of a whole call, so that `Launches.again` can make them at once (`repeats.py`).

Everything that reaches below Triton's public functions is in this file: releases 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver

from .triton_support import on_device

Tensor = torch.Tensor
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Releases whose C launchers `_direct` knows; under others Python stands before them, and maps are encoded every time.
DIRECT = ((3, 6),)
MOST_MAPS = 4096
_PLAIN = (Tensor, torch.nn.Parameter)
_hooks = triton.knobs.runtime


class Box:
    """What the copy engine moves at a time: [*block] elements, laid out in shared memory as `layout` says.

    Boxes are told apart by identity, so make each once.
    """

    def __init__(self, block: tuple[int, ...], layout: Any) -> None:
        self.block, self.layout = block, layout


class TensorMap(NamedTuple):
    """A tensor, taken as row-major [*shape], that the copy engine reads or writes in boxes."""

    tensor: Tensor
    shape: tuple[int, ...]
    box: Box

    def descriptor(self) -> Any:
        """Triton's argument for it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        strides = [1]
        for extent in self.shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        return TensorDescriptor(self.tensor, list(self.shape), strides, list(self.box.block), self.box.layout)


class _Compiled(NamedTuple):
    """How a compiled kernel is called: `call(x, y, z, stream, *before, *arguments, *after)`."""

    call: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    maps: Sequence[Any]  # how each tensor map is encoded
    kernel: Any  # keeps alive what the key knows by its id


class Launches:
    """What was launched, in order, while it was recorded.

    Attributes:
        made: the compiled kernel, the grid, and all that its call was given behind the stream, of each launch.
        complete: False once one of them took Triton's own path, which notes nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.complete = device, True
        self.made: list[tuple[_Compiled, int, tuple[Any, ...]]] = []

    def again(self) -> bool:
        """Launches all of it on the current stream. False where Triton's own path has to be taken instead: on another
        device than the current one, and while a profiler's hooks watch."""
        current = driver.active.get_current_device()
        if current != self.device.index or _watched():
            return False
        stream = driver.active.get_current_stream(current)
        for compiled, grid, given in self.made:
            compiled.call(grid, 1, 1, stream, *given)
        return True


class _Recorder(threading.local):
    launches: Launches | None = None


_recorder = _Recorder()


@contextlib.contextmanager
def record(device: torch.device) -> Iterator[Launches]:
    """Notes this thread's launches."""
    before, _recorder.launches = _recorder.launches, Launches(device)
    try:
        yield _recorder.launches
    finally:
        _recorder.launches = before


_compiled: dict[tuple[Any, ...], _Compiled] = {}
_maps: dict[tuple[Any, ...], list[Any]] = {}


def launch(kernel: Any, grid: int, arguments: Sequence[Any], device: torch.device, **constants: Any) -> None:
    """`kernel[(grid,)](*arguments, **constants)` on `device`: tensors, `TensorMap`s, None and numbers, then constants.

    Numbers have to be named in the kernel's `do_not_specialize`: the key does not hold their values. A kernel that is
    not compiled (interpreted, or a stand-in) is called as it is.
    """
    values: list[Any] = []
    kinds: list[Any] = []
    for a in arguments:
        kind = type(a)
        if kind in _PLAIN:
            address = a.data_ptr()
            values.append(address)
            kinds.append(a.dtype)
            if address & 15:
                kinds.append("unaligned")
            continue
        values.append(a)
        if kind is TensorMap:
            kinds.append(a.tensor.dtype)
            kinds.append(a.box)
        elif kind is int and not -(2**31) <= a < 2**31:
            kinds.append("u64" if a >= 2**63 else "i64")
        else:
            kinds.append(kind)
    current = driver.active.get_current_device() if device.type == "cuda" else None
    # True and 1 are equal and compile to different code.
    key = (id(kernel), current, *constants, *constants.values(), *map(type, constants.values()), *kinds)
    found = _compiled.get(key)
    if found is None or current != device.index or _watched():
        if _recorder.launches is not None:
            _recorder.launches.complete = False
        with on_device(device):
            _by_triton(kernel, grid, arguments, constants, key if current == device.index else None)
        return
    if found.maps:
        values = _encoded(values, found.maps)
    given = (*found.before, *values, *found.after)
    if _recorder.launches is not None:
        _recorder.launches.made.append((found, grid, given))
    found.call(grid, 1, 1, driver.active.get_current_stream(current), *given)


def _watched() -> bool:
    """True where a profiler's hooks want to see every launch."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _by_triton(kernel: Any, grid: int, arguments: Sequence[Any], constants: dict[str, Any], key: tuple | None) -> None:
    """A launch by Triton's path; what it compiled is kept under `key`."""
    mapped = [a.descriptor() if isinstance(a, TensorMap) else a for a in arguments]
    compiled = kernel[(grid,)](*mapped, **constants)
    if key is None or not hasattr(compiled, "packed_metadata"):
        return
    _check_arguments(kernel, arguments, constants)
    call, before, maps = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None), ()
    if RELEASE in DIRECT:
        call, before = _direct(compiled)
        maps = compiled.metadata.tensordesc_meta or ()
    elif any(isinstance(a, TensorMap) for a in arguments):
        return
    after = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    _compiled[key] = _Compiled(call, before, after, maps, (kernel, compiled))


def _check_arguments(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
    """Raises TypeError for what the key cannot tell apart: a number whose value Triton would specialise on, a tensor
    that is not plain, a float among the constants (-0.0 equals 0.0, and no nan equals another)."""
    for name, value in constants.items():
        if isinstance(value, float):
            raise TypeError(f"{kernel.__name__}: expected {name} to be an argument, not a constant, as it is a float")
    for parameter, a in zip(kernel.params, arguments, strict=False):
        if isinstance(a, int | float) and not parameter.do_not_specialize:
            raise TypeError(f"{kernel.__name__}: expected {parameter.name} to be named in do_not_specialize")
        if isinstance(a, Tensor) and type(a) not in _PLAIN:
            raise TypeError(f"{kernel.__name__}: expected a plain tensor for {parameter.name}, got {type(a).__name__}")


def _direct(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The C function that Triton 3.6 calls at last (`CudaLauncher.__call__`), and what goes before the arguments."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise TypeError(f"{compiled.name}: expected a kernel without scratch memory")
    call = launcher.launch
    if inspect.isfunction(call):  # encodes maps, then calls
        call = inspect.getclosurevars(call).nonlocals["launcher"]
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
    return call, (compiled.function, *flags, compiled.packed_metadata, None, None, None)


def _encoded(values: list[Any], metadata: Sequence[Any]) -> list[Any]:
    """The values with every map as an encoded one, its shape and its strides."""
    out: list[Any] = []
    index = 0
    for a in values:
        if type(a) is not TensorMap:
            out.append(a)
            continue
        how = metadata[index]  # of one argument of a kernel that stays alive: its id is the box, the type, the swizzle
        key = (a.tensor.data_ptr(), a.shape, id(how))
        encoded = _maps.get(key)
        if encoded is None:
            if len(_maps) >= MOST_MAPS:
                _maps.clear()
            encoded = _maps[key] = _encode(a, how)
        out += encoded
        index += 1
    return out


def _encode(a: TensorMap, how: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(a.descriptor(), how)
