"""Runs one CTA of compiled PTX on the CPU, threads in lockstep, with the hazards of shared memory between barriers.

Covers what the operand kernel compiles to. A word of shared memory that two warps write and read with no barrier
between raises `Hazard`; copies land when they are waited for, products read until then; wavefronts are counted.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import Any

import numpy as np
import torch

from .ptx_text import parse, split_operands

THREADS, WARPS = 128, 4
WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
SIGNED = {"8": np.int8, "16": np.int16, "32": np.int32, "64": np.int64}


BINARY = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor}
BINARY |= {"min": np.minimum, "max": np.maximum, "rem": operator.mod}
SHIFTS = {"shl": operator.lshift, "shr": operator.rshift}
FUNCTIONS = {"ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x}
TO_INTEGER = {"rmi": np.floor, "rpi": np.ceil}


def flushed(x: np.ndarray) -> np.ndarray:
    """What an `.ftz` instruction reads and writes: zeros for fp32 subnormals."""
    return np.where(abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


class Hazard(Exception):
    """A race, a stray address, or a branch that threads do not take together."""


class Memory:
    """Tensors at addresses of their own; nothing else can be touched."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, np.ndarray]] = []

    def place(self, tensor: torch.Tensor) -> int:
        base = (len(self.segments) + 1) << 40
        view = tensor.view(-1).view(torch.uint8).numpy()
        self.segments.append((base, view))
        return base

    def at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if not len(addresses):
            return np.zeros(0, np.uint8), np.zeros((0, size), np.int64)
        base, view = self.segments[int(addresses[0] >> np.uint64(40)) - 1]
        where = addresses.astype(np.int64) - base
        if where.min() < 0 or where.max() + size > len(view) or (where % size).any():
            raise Hazard(f"global access at {where.min()}..{where.max()} of {len(view)} bytes, {size} each")
        return view, where[:, None] + np.arange(size)


class Shared:
    """Bytes, and per word who wrote and read it since which barrier."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.epoch = 1
        words = (size + 3) // 4
        self.write_epoch, self.writer = np.zeros(words, int), np.zeros(words, int)
        self.read_epoch = np.zeros((WARPS, words), int)
        self.wavefronts = 0

    def count(self, addresses: np.ndarray, warps: np.ndarray, size: int) -> None:
        for w in np.unique(warps):
            lanes = addresses[warps == w]
            group = 32 if size <= 4 else 16 if size == 8 else 8
            for i in range(0, len(lanes), group):
                words = np.unique((lanes[i : i + group, None] // 4 + np.arange(max(size // 4, 1))).ravel())
                self.wavefronts += int(np.bincount(words % 32).max())

    def check(self, addresses: np.ndarray, warps: np.ndarray, size: int, writing: bool) -> None:
        if len(addresses) and (
            addresses.min() < 0 or addresses.max() + size > len(self.data) or (addresses % min(size, 16)).any()
        ):
            raise Hazard(f"shared access at {addresses.min()}..{addresses.max()}")
        words = addresses[:, None] // 4 + np.arange(max(size // 4, 1))
        owners = np.broadcast_to(warps[:, None], words.shape)
        if ((self.write_epoch[words] == self.epoch) & (self.writer[words] != owners)).any():
            raise Hazard("shared memory written by another warp since the last barrier")
        if writing:
            for w in range(WARPS):
                if ((self.read_epoch[w][words] == self.epoch) & (owners != w)).any():
                    raise Hazard("shared memory overwritten that another warp read since the last barrier")
            self.write_epoch[words], self.writer[words] = self.epoch, owners
        else:
            self.read_epoch[owners, words] = self.epoch


class Machine:
    """One CTA. `arguments` in the order of the kernel's PTX parameters: tensors' addresses, integers, floats."""

    def __init__(self, ptx: str, shared: int, memory: Memory) -> None:
        self.code, self.labels = parse(ptx)
        self.memory, self.size = memory, shared
        self.lane, self.warp = np.arange(THREADS) % 32, np.arange(THREADS) // 32

    def run(self, program: int, arguments: list[Any]) -> None:
        self.registers: dict[str, np.ndarray] = {}
        self.shared, self.arguments, self.program = Shared(self.size), arguments, program
        self.copies, self.copied, self.products, self.executed = [], [], [], Counter()
        at = 0
        while at < len(self.code):
            negated, guard, op, operands, self.place = self.code[at]
            at += 1
            mask = np.ones(THREADS, bool) if guard is None else self.registers[guard] ^ negated
            self.flushes = "ftz" in op
            self.executed[op[0]] += 1
            if op[0] == "bra":
                if mask.any() != mask.all():
                    raise Hazard("threads part at a branch")
                at = self.labels[operands[0]] if mask.all() else at
            elif op[0] == "ret":
                if mask.all():
                    break
            elif op[0] in BINARY:
                self.binary(op, operands, mask, BINARY[op[0]])
            elif op[0] in SHIFTS:
                self.shift(op, operands, mask, SHIFTS[op[0]])
            elif op[0] in FUNCTIONS:
                self.function(operands, mask, FUNCTIONS[op[0]])
            else:
                getattr(self, "op_" + op[0])(op, operands, mask)

    # Operands -----------------------------------------------------------------------------------------------------
    def get(self, text: str, kind: str) -> np.ndarray:
        """Kind: u32, s32, f32, b16, pred, ..."""
        if kind == "pred":
            return self.registers[text] if text.startswith("%") else np.full(THREADS, text != "0")
        width = kind[1:]
        dtype = np.float32 if kind[0] == "f" else (SIGNED if kind[0] == "s" else WIDTHS)[width]
        if text in ("%tid.x", "%ctaid.x"):
            return (np.arange(THREADS) if text == "%tid.x" else np.full(THREADS, self.program)).astype(dtype)
        if text.startswith("%") or text in self.registers:
            value = self.registers[text].view(dtype)
            return flushed(value) if self.flushes and kind == "f32" else value
        if text.startswith("0f"):
            return np.full(THREADS, int(text[2:], 16), np.uint32).view(dtype)
        value = 0 if text == "global_smem" else int(text, 0)
        return np.full(THREADS, value & ((1 << int(width)) - 1), WIDTHS[width]).view(dtype)

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        value = flushed(value) if self.flushes and value.dtype == np.float32 else value
        value = value if value.dtype == bool else value.view(WIDTHS[str(value.dtype.itemsize * 8)])
        self.registers[name] = np.where(mask, value, self.registers.get(name, np.zeros_like(value)))

    def address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[] ").partition("+")
        base = base.strip()
        start = self.get(base, "b64" if base.startswith("%rd") else "b32").astype(np.int64)
        return start + int(offset or 0)

    # Arithmetic ---------------------------------------------------------------------------------------------------
    def binary(self, op: list[str], x: list[str], mask: np.ndarray, function: Any) -> None:
        kind = "pred" if op[-1] == "pred" else op[-1]
        with np.errstate(all="ignore"):
            out = function(self.get(x[1], kind), self.get(x[2], kind))
        self.put(x[0], out.astype(np.float32) if kind == "f32" else out, mask)

    def op_div(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        """Quotients of integers that are not negative, where truncation and floor agree."""
        self.binary(op, x, mask, operator.truediv if op[-1] == "f32" else operator.floordiv)

    def op_not(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        self.put(x[0], ~self.get(x[1], op[1]), mask)

    def op_neg(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        value = self.get(x[1], op[-1])
        self.put(x[0], abs(value) if op[0] == "abs" else -value, mask)

    op_abs = op_neg

    def op_mul(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        if op[1] == "wide":
            wide = {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}[op[2]]
            self.put(x[0], self.get(x[1], op[2]).astype(wide) * self.get(x[2], op[2]).astype(wide), mask)
        else:
            self.binary(op, x, mask, operator.mul)

    def op_mad(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        kind, wide = op[2], op[1] == "wide"
        to = {"u32": np.uint64, "s32": np.int64}[kind] if wide else self.get(x[1], kind).dtype
        product = self.get(x[1], kind).astype(to) * self.get(x[2], kind).astype(to)
        self.put(x[0], product + self.get(x[3], kind[0] + "64" if wide else kind).astype(to), mask)

    def op_fma(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        a, b, c = (self.get(t, "f32").astype(np.float64) for t in x[1:])
        with np.errstate(all="ignore"):
            self.put(x[0], (a * b + c).astype(np.float32), mask)

    def function(self, x: list[str], mask: np.ndarray, function: Any) -> None:
        with np.errstate(all="ignore"):
            self.put(x[0], function(self.get(x[1], "f32").astype(np.float64)).astype(np.float32), mask)

    def shift(self, op: list[str], x: list[str], mask: np.ndarray, function: Any) -> None:
        value = self.get(x[1], op[1])
        self.put(x[0], function(value, self.get(x[2], "u32").astype(value.dtype)), mask)

    def op_bfe(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        value, start, length = self.get(x[1], "u32").astype(np.int64), int(x[2], 0), int(x[3], 0)
        out = value >> start & (1 << length) - 1
        if op[1] == "s32":
            out = np.where(out >> (length - 1) & 1, out - (1 << length), out)
        self.put(x[0], out.astype(np.int32), mask)

    def op_setp(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
        compare |= {"ge": np.greater_equal}
        a, b = self.get(x[1], op[2]), self.get(x[2], op[2])
        unordered = (a != a) | (b != b) if op[1].endswith("u") else False
        self.put(x[0], compare[op[1][:2]](a, b) | unordered, mask)

    def op_selp(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        self.put(x[0], np.where(self.registers[x[3]], self.get(x[1], op[1]), self.get(x[2], op[1])), mask)

    def op_mov(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        if x[0].startswith("{"):
            value = self.get(x[1], "b32")
            for i, name in enumerate(split_operands(x[0].strip("{}"))):
                if name != "_":
                    self.put(name, (value >> np.uint32(16 * i)).astype(np.uint16), mask)
        elif x[1].startswith("{"):
            low, high = (self.get(n, "b16").astype(np.uint32) for n in split_operands(x[1].strip("{}")))
            self.put(x[0], low | high << np.uint32(16), mask)
        else:
            self.put(x[0], self.get(x[1], op[1]), mask)

    def op_cvt(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        to, *source = [p for p in op[1:] if p not in ("rn", "rz", "sat", "ftz", *TO_INTEGER)]
        if to in ("bf16", "f16", "bf16x2", "f16x2"):
            dtype = torch.bfloat16 if to.startswith("bf16") else torch.float16
            parts = [torch.from_numpy(self.get(t, "f32").copy()).to(dtype).view(torch.int16).numpy() for t in x[1:]]
            parts = [p.view(np.uint16) for p in parts]
            packed = parts[0] if len(parts) == 1 else parts[1].astype(np.uint32) | parts[0].astype(np.uint32) << 16
            self.put(x[0], packed, mask)
        elif to == "f32" and source[0] == "f32":
            self.put(x[0], TO_INTEGER[op[1]](self.get(x[1], "f32")), mask)
        elif to == "f32" and source[0] in ("s32", "u32"):
            self.put(x[0], self.get(x[1], source[0]).astype(np.float32), mask)
        elif to == "f32":
            half = torch.from_numpy(self.get(x[1], "b16").view(np.int16).copy())
            dtype = torch.bfloat16 if source[0] == "bf16" else torch.float16
            self.put(x[0], half.view(dtype).float().numpy(), mask)
        else:
            width = (SIGNED if to[0] == "s" else WIDTHS)[to[1:]]
            self.put(x[0], self.get(x[1], source[0]).astype(width), mask)

    def op_shfl(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        value, step = self.get(x[1], "b32"), int(x[2], 0)
        source = self.lane ^ step if op[2] == "bfly" else np.where(self.lane < step, self.lane, self.lane - step)
        self.put(x[0].split("|")[0], value[self.warp * 32 + source], mask)

    def op_redux(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        """The largest of a warp."""
        assert op[2] == "max", op
        value = self.get(x[1], op[3])
        self.put(x[0], value.reshape(WARPS, 32).max(1).repeat(32), mask)

    # Memory -------------------------------------------------------------------------------------------------------
    def names(self, text: str) -> list[str]:
        return split_operands(text.strip("{} ")) if text.startswith("{") else [text]

    def op_ld(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        names, kind = self.names(x[0]), op[-1]
        size = int(kind[1:]) // 8
        if op[1] == "param":
            value = self.arguments[int(re.search(r"param_(\d+)", x[1])[1])]
            value = np.float32(value).view(np.uint32) if isinstance(value, float) else value
            self.put(names[0], np.full(THREADS, value, WIDTHS[kind[1:]]), mask)
            return
        data = self.fetch(op[1], self.address(x[1])[mask], size * len(names), mask)
        for i, name in enumerate(names):
            out = np.zeros(THREADS, WIDTHS[kind[1:]])
            out[mask] = np.ascontiguousarray(data[:, i * size : i * size + size]).view(out.dtype).ravel()
            self.put(name, out, mask)

    def fetch(self, space: str, where: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        if space == "global":
            view, index = self.memory.at(where.astype(np.uint64), size)
            return view[index]
        self.shared.check(where, self.warp[mask], size, writing=False)
        self.shared.count(where, self.warp[mask], size)
        return self.shared.data[where[:, None] + np.arange(size)]

    def op_st(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        names, kind = self.names(x[1]), op[-1]
        parts = [self.get(n, kind)[mask] for n in names]
        data = np.stack(parts, 1).view(np.uint8)
        where = self.address(x[0])[mask]
        if op[1] == "global":
            view, index = self.memory.at(where.astype(np.uint64), data.shape[1])
            view[index] = data
        else:
            self.shared.check(where, self.warp[mask], data.shape[1], writing=True)
            self.shared.count(where, self.warp[mask], data.shape[1])
            self.shared.data[where[:, None] + np.arange(data.shape[1])] = data

    def op_cp(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        """cp.async takes effect at the wait."""
        if op[2] == "commit_group":
            self.copied, self.copies = [*self.copied, self.copies], []
        elif op[2] == "wait_group":
            keep = int(x[0], 0)
            while len(self.copied) > keep:
                for where, data in self.copied.pop(0):
                    self.shared.check(where, self.warp, 16, writing=True)
                    self.shared.data[where[:, None] + np.arange(16)] = data
        else:
            where, source = self.address(x[0]), self.address(x[1])
            taken = (self.get(x[3], "b32") > 0) & mask
            data = np.zeros((THREADS, 16), np.uint8)
            view, index = self.memory.at(source[taken].astype(np.uint64), 16)
            data[taken] = view[index] if len(index) else 0
            self.copies.append((where, data))

    def matrix_rows(self, text: str, count: int, writing: bool) -> np.ndarray:
        """[warp, matrix, row, byte] indices of 8 rows of 16 bytes a matrix; lane 8j + r has the address of row r."""
        where = self.address(text).reshape(WARPS, 32)[:, : 8 * count].ravel()
        warps = np.repeat(np.arange(WARPS), 8 * count)
        self.shared.check(where, warps, 16, writing)
        self.shared.count(where, warps, 16)
        return (where[:, None] + np.arange(16)).reshape(WARPS, count, 8, 16)

    def op_ldmatrix(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        names = self.names(x[0])
        data = self.shared.data[self.matrix_rows(x[1], len(names), writing=False)].view(np.uint32)
        for i, name in enumerate(names):
            self.put(name, np.ascontiguousarray(data[:, i].reshape(-1)), mask)

    def op_stmatrix(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        names = self.names(x[1])
        index = self.matrix_rows(x[0], len(names), writing=True)
        values = np.stack([self.get(n, "b32").reshape(WARPS, 8, 4) for n in names], 1)
        if "trans" in op:
            halves = values.view(np.uint16).reshape(WARPS, len(names), 8, 8).transpose(0, 1, 3, 2)
            values = np.ascontiguousarray(halves).view(np.uint32)
        self.shared.data[index] = np.ascontiguousarray(values).view(np.uint8).reshape(index.shape)

    # Barriers and products ----------------------------------------------------------------------------------------
    def op_bar(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        self.shared.epoch += 1

    def op_fence(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        pass

    def op_mma(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        """m16n8k8: rows lane/4 and + 8, k lane%4 and + 4."""
        trim = lambda t: (self.get(t, "b32") & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)  # noqa: E731
        a, b = [trim(t) for t in self.names(x[1])], [trim(t) for t in self.names(x[2])]
        c = [self.get(t, "f32").astype(np.float64) for t in self.names(x[3])]
        shape = lambda parts: np.stack(parts).reshape(len(parts), WARPS, 8, 4)  # noqa: E731
        left, right, total = shape(a), shape(b), shape(c)
        A = np.concatenate([np.concatenate([left[0], left[2]], 2), np.concatenate([left[1], left[3]], 2)], 1)
        B = np.concatenate([right[0], right[1]], 2)  # [warp, n, k]
        out = A @ B.transpose(0, 2, 1)
        for i, name in enumerate(self.names(x[0])):
            rows = out[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2]
            self.put(name, (rows + total[i]).reshape(-1).astype(np.float32), mask)

    def tile(self, descriptor: int) -> np.ndarray:
        """64 rows of 16 values, rows of 128 bytes swizzled, from a wgmma descriptor."""
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        if descriptor >> 62 != 1:
            raise Hazard("a swizzle other than 128 bytes")
        r, byte = np.arange(64)[:, None], np.arange(32)[None, :]
        where = start + r // 8 * stride + r % 8 * 128 + byte
        where ^= (where >> 7 & 7) << 4
        words = where[:, ::4].ravel()
        for w in range(WARPS):
            self.shared.check(words, np.full(len(words), w), 4, writing=False)
        self.products.append(words)
        return torch.from_numpy(self.shared.data[where].view(np.int16))

    def op_wgmma(self, op: list[str], x: list[str], mask: np.ndarray) -> None:
        if op[1] == "wait_group":
            for words in self.products:
                for w in range(WARPS):
                    self.shared.check(words, np.full(len(words), w), 4, writing=False)
            self.products = []
        if op[1] != "mma_async":
            return
        dtype = torch.bfloat16 if op[-1] == "bf16" else torch.float16
        left, right = (self.tile(int(self.get(t, "b64")[0])).view(dtype).double().numpy() for t in x[1:3])
        names = self.names(x[0])
        use = self.get(x[3], "pred")[0] if x[3].startswith("%") else x[3] != "0"
        out = (left @ right.T).reshape(WARPS, 2, 8, 8, 4, 2)  # warp, half, row, column tile, lane, pair
        for i, name in enumerate(names):
            part = out[:, i // 2 % 2, :, i // 4, :, i % 2].reshape(-1)
            before = self.get(name, "f32").astype(np.float64) if use else 0.0
            self.put(name, (part + before).astype(np.float32), mask)
