"""Runs a Gluon kernel for Hopper on the CPU, and stops where its synchronisation is wrong.

Layouts are ignored; shapes and types are checked. Partitions are threads of which one runs at a time; copies and
products are actors of their own that finish in a random (seeded) order, as late as the waits allow. Every actor has a
vector clock: barriers hand clocks over, and each access to shared memory must come after (in that order) the write it
reads and the reads and writes it destroys, so a missing wait is found even where the timing hides it. What it cannot
see: proxy fences and barriers among the threads of one partition, which is one actor here.
"""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import torch


class Hazard(AssertionError):
    """The kernel's synchronisation or a type is wrong."""


class Slot:
    """One buffer of shared memory: what is written, by whom, and who reads it."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.data = torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
        self.written: tuple[str, int] | None = None
        self.reads: dict[str, int] = {}
        self.busy: list[str] = []


class Shared:
    """A view of allocated slots: indexed, permuted, sliced."""

    def __init__(self, machine: Machine, slots: list[Slot], view: torch.Tensor | None) -> None:
        self.machine, self.slots, self.view = machine, slots, view
        self.dtype = slots[0].data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape) if self.view is not None else (len(self.slots), *self.slots[0].data.shape)

    def index(self, i: Any) -> Shared:
        slot = self.slots[int(i)]
        return Shared(self.machine, [slot], slot.data)

    def only(self) -> Slot:
        if self.view is None:
            if len(self.slots) > 1:
                raise Hazard("a whole ring is used as one buffer")
            self.view = self.slots[0].data
        return self.slots[0]

    def permute(self, order: tuple[int, ...]) -> Shared:
        self.only()
        return Shared(self.machine, self.slots, self.view.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        self.only()
        return Shared(self.machine, self.slots, self.view.narrow(dim, start, length))

    def load(self, layout: object) -> torch.Tensor:
        self.machine.step()
        self.machine.read(self.only())
        return self.view.clone()

    def store(self, value: torch.Tensor) -> None:
        self.machine.step()
        slot = self.only()
        if value.shape != self.view.shape or value.dtype != self.dtype:
            raise Hazard(f"{slot.name}: stores {value.shape} {value.dtype} into {self.view.shape} {self.dtype}")
        self.machine.write(slot)
        self.view.copy_(value)


class Barrier(Slot):
    """mbarrier: a phase completes when no arrival and no byte is pending."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (1,), torch.int64)
        self.count = self.pending = self.bytes = self.phase = 0
        self.gathered: dict[str, int] = {}
        self.clocks: list[dict[str, int]] = []

    def advance(self) -> None:
        if self.pending == 0 and self.bytes < 0:
            raise Hazard(f"{self.name}: {-self.bytes} more bytes arrive than are expected")
        if self.pending == 0 and self.bytes == 0:
            self.clocks.append(dict(self.gathered))
            self.phase, self.pending = self.phase + 1, self.count


class Descriptor:
    """Tensor map over a contiguous tensor."""

    def __init__(self, base: torch.Tensor, block_shape: list[int]) -> None:
        if base.data_ptr() % 16 or any(s * base.itemsize % 16 for s in base.stride()[:-1]) or base.stride(-1) != 1:
            raise Hazard("a tensor map needs a base and strides of whole 16 bytes")
        self.base, self.block_shape, self.dtype = base, tuple(block_shape), base.dtype
        self.layout = "rows" if len(block_shape) == 1 else "tile"

    def _box(self, corner: list[Any]) -> list[slice]:
        at = [int(c) for c in corner]
        if len(at) != len(self.block_shape) or min(at) < 0 or max(at) >= 2**31:
            raise Hazard(f"box at {at}")
        return [slice(a, min(a + b, s)) for a, b, s in zip(at, self.block_shape, self.base.shape, strict=True)]

    def read(self, corner: list[Any]) -> torch.Tensor:
        inside = self.base[tuple(self._box(corner))]
        out = torch.zeros(self.block_shape, dtype=self.dtype)
        out[tuple(slice(0, n) for n in inside.shape)] = inside
        return out

    def write(self, corner: list[Any], value: torch.Tensor) -> None:
        target = self.base[tuple(self._box(corner))]
        target.copy_(value[tuple(slice(0, n) for n in target.shape)])


class Pointer:
    """Global memory: a flat tensor and offsets into it; an access out of it is an error."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset, self.dtype = flat, offset, types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + other)

    def at(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.as_tensor(self.offset, dtype=torch.int64)
        mask = torch.as_tensor(True if mask is None else mask).expand(where.shape)
        if mask.any() and not 0 <= int(where[mask].min()) <= int(where[mask].max()) < self.flat.numel():
            raise Hazard("global access out of range")
        return where, mask


class Product:
    """An asynchronous product: no value until a wait has covered it."""

    def __init__(
        self, machine: Machine, a: torch.Tensor | Shared, b: Shared, acc: torch.Tensor | Product | None
    ) -> None:
        self.machine, self.a, self.b, self.acc, self.value = machine, a, b, acc, None
        self.shape, self.dtype = (a.shape[0], b.shape[1]), torch.float32
        for slot in self.operands():
            machine.check(slot, writing=False)
            slot.busy.append("a product")

    def operands(self) -> list[Slot]:
        return [x.only() for x in (self.a, self.b) if isinstance(x, Shared)]

    def finish(self) -> torch.Tensor:
        if self.value is None:
            a, b = ((x.view if isinstance(x, Shared) else x).float() for x in (self.a, self.b))
            before = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            self.value = a @ b if before is None else before + a @ b
            for slot in self.operands():
                slot.busy.remove("a product")
        return self.value

    def early(self, *_: object) -> Any:
        raise Hazard("an accumulator is used before its product was waited for")

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise Hazard("an accumulator is used before its product was waited for")

    to = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = early


class Machine:
    """One CTA: actors, their clocks, and a seeded schedule."""

    def __init__(self, seed: int, program: int) -> None:
        self.random, self.program = random.Random(seed), program
        self.clocks: dict[str, dict[str, int]] = {"parent": {"parent": 1}}
        self.current, self.turn = "parent", threading.Condition()
        self.waiting: dict[str, tuple[Barrier, int]] = {}
        self.copies: list[tuple[torch.Tensor, Barrier, Slot, dict[str, int], str]] = []
        self.stores: dict[str, list[Any]] = {}
        self.products: dict[str, list[Product]] = {}
        self.alive: list[str] = ["parent"]
        self.error: BaseException | None = None
        self.serial = 0

    # Clocks -------------------------------------------------------------------------------------------------------
    def tick(self, actor: str | None = None) -> tuple[str, int]:
        actor = actor or self.current
        self.clocks[actor][actor] += 1
        return actor, self.clocks[actor][actor]

    def seen(self, event: tuple[str, int] | None, actor: str) -> bool:
        return event is None or self.clocks[actor].get(event[0], 0) >= event[1]

    def check(self, slot: Slot, writing: bool) -> None:
        if not self.seen(slot.written, self.current):
            raise Hazard(f"{slot.name}: {'overwritten' if writing else 'read'} before its copy was waited for")
        if writing:
            if slot.busy:
                raise Hazard(f"{slot.name}: overwritten while {slot.busy[0]} in flight uses it")
            if any(not self.seen(event, self.current) for event in slot.reads.items()):
                raise Hazard(f"{slot.name}: reused before its reader released it")

    def read(self, slot: Slot) -> None:
        self.check(slot, writing=False)
        actor, at = self.tick()
        slot.reads[actor] = at

    def write(self, slot: Slot) -> None:
        self.check(slot, writing=True)
        slot.written, slot.reads = self.tick(), {}

    def join(self, actor: str, clock: dict[str, int]) -> None:
        own = self.clocks[actor]
        for name, at in clock.items():
            own[name] = max(own.get(name, 0), at)

    # Schedule -----------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Anything may happen here: a copy lands, a store reads, another partition runs."""
        if self.error:
            raise self.error
        while self.copies and self.random.random() < 0.3:
            self.land(self.random.randrange(len(self.copies)))
        if self.random.random() < 0.5:
            self.switch()

    def land(self, which: int) -> None:
        value, barrier, slot, clock, actor = self.copies.pop(which)
        self.clocks[actor] = {**clock, actor: 1}
        slot.data.copy_(value.view(slot.data.shape))
        slot.busy.remove("a copy")
        barrier.gathered = {**barrier.gathered, actor: 1}
        barrier.bytes -= value.numel() * value.itemsize
        barrier.advance()

    def runnable(self) -> list[str]:
        """Partitions that can go on; where none can, copies land until one can."""
        while not (ready := [n for n in self.alive if n not in self.waiting or self.passed(*self.waiting[n])]):
            if not self.copies:
                waits = {n: f"{b.name}, parity {p}, phase {b.phase}" for n, (b, p) in self.waiting.items()}
                raise Hazard(f"deadlock: {waits}")
            self.land(self.random.randrange(len(self.copies)))
        return ready

    def switch(self) -> None:
        me = self.current
        self.current = self.random.choice(self.runnable())
        if self.current != me:
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.current == me or self.error)
        if self.error:
            raise self.error

    @staticmethod
    def passed(barrier: Barrier, parity: int) -> bool:
        return barrier.phase & 1 != parity

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.step()
        self.waiting[self.current] = (barrier, parity)
        if not self.passed(barrier, parity):
            self.switch()
        del self.waiting[self.current]
        # Two phases ahead and the parity would lie: whoever waits here may have skipped one.
        if barrier.clocks:
            self.join(self.current, barrier.clocks[-1])

    def specialize(self, parts: list[tuple[Any, tuple]], *_: object) -> None:
        names = [f"{function.__name__}" for function, _ in parts]
        for name in names:
            self.clocks[name] = {**self.clocks["parent"], name: 1}
        self.alive = list(names)
        threads = [
            threading.Thread(target=self.partition, args=(n, *p), daemon=True)
            for n, p in zip(names, parts, strict=True)
        ]
        with self.turn:
            self.current = names[0]
            for thread in threads:
                thread.start()
            self.turn.wait_for(lambda: self.error or not self.alive)
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        if self.copies:
            raise Hazard("the kernel ends with a copy in flight")
        self.current, self.alive = "parent", ["parent"]

    def partition(self, name: str, function: Any, args: tuple) -> None:
        with self.turn, torch.no_grad():  # a mode of the thread
            try:
                self.turn.wait_for(lambda: self.current == name or self.error)
                if self.error:
                    return
                function(*args)
                if self.products.get(name) or self.stores.get(name):
                    raise Hazard(f"{name} ends with products or stores in flight")
                self.alive.remove(name)
                if self.alive:
                    self.current = self.random.choice(self.runnable())
            except BaseException as error:
                self.error = self.error or error
            finally:
                self.turn.notify_all()

    # Operations ---------------------------------------------------------------------------------------------------
    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        self.serial += 1
        if layout == "mbarrier":
            return Shared(self, [Barrier(f"barrier {self.serial}.{i}") for i in range(shape[0])], None)
        ring = shape if len(shape) > 2 or (len(shape) == 2 and layout == "rows") else [1, *shape]
        slots = [Slot(f"tile {self.serial}.{i}", tuple(ring[1:]), dtype) for i in range(ring[0])]
        return Shared(self, slots, slots[0].data if ring is not shape else None)

    def copy_in(self, desc: Descriptor, corner: list[Any], barrier: Shared, target: Shared) -> None:
        self.step()
        slot = target.only()
        if desc.block_shape != target.shape or desc.dtype != target.dtype:
            raise Hazard(f"{slot.name}: copies {desc.block_shape} {desc.dtype} to {target.shape} {target.dtype}")
        self.check(slot, writing=True)
        self.serial += 1
        actor = f"copy {self.serial}"
        slot.written, slot.reads = (actor, 1), {}
        slot.busy.append("a copy")
        slot.data.copy_(torch.full(slot.data.shape, float("nan")))
        self.copies.append((desc.read(corner), barrier.only(), slot, dict(self.clocks[self.current]), actor))

    def copy_out(self, desc: Descriptor, corner: list[Any], source: Shared) -> None:
        self.step()
        slot = source.only()
        if desc.block_shape != source.shape or desc.dtype != source.dtype:
            raise Hazard(f"{slot.name}: stores {source.shape} {source.dtype} as {desc.block_shape} {desc.dtype}")
        self.check(slot, writing=False)
        slot.busy.append("a store")
        self.stores.setdefault(self.current, []).append((desc, [int(c) for c in corner], source))

    def store_wait(self, pending: int) -> None:
        queue = self.stores.get(self.current, [])
        while len(queue) > pending:
            desc, corner, source = queue.pop(0)
            desc.write(corner, source.view)
            source.only().busy.remove("a store")
            self.read(source.only())
        self.step()

    def arrive(self, barrier: Shared, count: int = 1) -> None:
        self.step()
        b = barrier.only()
        b.gathered = {**b.gathered, **{k: max(v, b.gathered.get(k, 0)) for k, v in self.clocks[self.current].items()}}
        b.pending -= count
        if b.pending < 0:
            raise Hazard(f"{b.name}: more arrivals than its count of {b.count}")
        b.advance()

    def expect(self, barrier: Shared, size: int) -> None:
        barrier.only().bytes += size
        self.arrive(barrier)

    def init(self, barrier: Shared, count: int) -> None:
        barrier.only().count = barrier.only().pending = count

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        self.step()
        if a.dtype != b.dtype or acc.dtype != torch.float32 or not isinstance(b, Shared):
            raise Hazard(f"product of {a.dtype} and {b.dtype} into {acc.dtype}")
        if a.shape[1] != b.shape[0] or tuple(acc.shape) != (a.shape[0], b.shape[1]):
            raise Hazard(f"product of {tuple(a.shape)} and {b.shape} into {tuple(acc.shape)}")
        queue = self.products.setdefault(self.current, [])
        queue.append(Product(self, a, b, acc if use_acc else None))
        return queue[-1] if is_async else self.mma_wait(0, [queue[-1]])

    def mma_wait(self, pending: int, deps: list[Any]) -> Any:
        self.step()
        queue = self.products.get(self.current, [])
        while len(queue) > pending:
            done = queue.pop(0)
            done.finish()
            for slot in done.operands():
                self.read(slot)
        out = tuple(d.value if isinstance(d, Product) and d.value is not None else d for d in deps)
        return out[0] if len(out) == 1 else out
