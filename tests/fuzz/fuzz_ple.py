"""Fuzzes `ple_gdn.ple_gate_conv` and `ple_gdn.causal_conv1d`, forward and backward, against float64 oracles."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fuzz_runs import main
from harness import Failure, Source, Tally, rms, same_bits
from oracles.ple import TENSORS, grouped_norm
from torch import Tensor

import ple_gdn

# Allowed root mean square of the error, relative, by the dtype of the result; the math is float32 for all but float64.
BUDGETS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}
# Below it the gradient of the square root magnifies a float32 score's error past any budget: such rows get score 0.
SMALLEST_SCORE = 0.03
# Inputs and upstream gradients are of size 1: what is smaller than this is left of terms that cancel (the norm of one
# channel has no gradient), and is held to the budget of this size.
SMALLEST = 0.02
LOW = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16)


def positions(tokens: int, boundaries: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """Row of each token in its document, and whether it belongs to one."""
    row = torch.arange(tokens)
    if boundaries is None:
        return row, torch.ones(tokens, dtype=torch.bool)
    cu_seqlens = torch.tensor(boundaries)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, row, right=True) - 1]
    return row - start, row < boundaries[-1]


def convolve(x: Tensor, weight: Tensor, dilation: int, position: Tensor) -> Tensor:
    """Causal depthwise convolution of `[B,T,D]` with `[D,kernel]`, tap by tap, that restarts where `position` is 0."""
    out = torch.zeros_like(x)
    for tap in range(weight.shape[1]):
        back = (weight.shape[1] - 1 - tap) * dilation
        shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        out = out + torch.where((position >= back)[:, None], shifted, 0.0) * weight[:, tap]
    return out


def score_of(
    hidden: Tensor, key: Tensor, key_weight: Tensor, query_weight: Tensor, channels: int, eps: float
) -> Tensor:
    normed = grouped_norm(key, key_weight, channels, eps) * grouped_norm(hidden, query_weight, channels, eps)
    return normed.unflatten(-1, (-1, channels)).sum(-1, keepdim=True) / math.sqrt(channels)


def ple_oracle(
    tensors: list[Tensor], dilation: int, eps: float, mask: Tensor | None, boundaries: tuple | None
) -> Tensor:
    """`oracles.ple.ple_packed` without a loop over the documents."""
    hidden, key, value, key_weight, query_weight, conv_norm, conv_weight = tensors
    channels = value.shape[-1]
    position, live = positions(hidden.shape[1], boundaries)
    score = score_of(hidden, key, key_weight, query_weight, channels, eps)
    gate = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
    gated = (gate * value.unsqueeze(-2)).flatten(-2)
    normed = grouped_norm(gated, conv_norm, channels, eps)
    if mask is not None:
        gated, normed = gated * mask[..., None], normed * mask[..., None]
    out = gated + F.silu(convolve(normed, conv_weight[:, 0], dilation, position))
    return torch.where(live[:, None], out, 0.0)


def conv_oracle(tensors: list[Tensor], activation: str | None, boundaries: tuple | None) -> Tensor:
    x, weight, *bias = tensors
    position, live = positions(x.shape[1], boundaries)
    out = convolve(x, weight, 1, position) + (bias[0] if bias else 0.0)
    return torch.where(live[:, None], out if activation is None else F.silu(out), 0.0)


def _dtypes(source: Source, count: int) -> list[torch.dtype]:
    if source.device.type == "cpu" and source.chance(0.1):
        return [torch.float64] * count
    if source.structure.random() < 0.6:
        return [source.choice(LOW, structure=True)] * count
    return [source.choice(LOW, structure=True) for _ in range(count)]


def _packing(source: Source, tokens: int) -> tuple[int, object, tuple[int, ...] | None]:
    """Batch, `cu_seqlens` argument, boundaries."""
    if source.structure.random() < 0.4:
        return source.pick.randint(1, 3), None, None
    boundaries = source.boundaries(tokens)
    cu_seqlens = source.guarded("cu_seqlens", torch.tensor(boundaries, dtype=source.choice((torch.int32, torch.int64))))
    if source.chance(0.2):
        cu_seqlens = cu_seqlens.cpu()
    return 1, ple_gdn.prepare_varlen(cu_seqlens) if source.chance(0.3) else cu_seqlens, boundaries


def _clear_small_scores(values: list[Tensor], channels: int, eps: float) -> None:
    hidden, key, _, key_weight, query_weight, *_ = (x.double() for x in values)
    score = score_of(hidden, key, key_weight, query_weight, channels, eps)
    small = (score.abs() < SMALLEST_SCORE).expand(*score.shape[:-1], channels).flatten(-2)
    values[1].masked_fill_(small, 0.0)


def _ple_case(source: Source) -> tuple[list[Tensor], Callable, Callable, str]:
    """The seven tensors, the op, the oracle over their float64 copies, and a description."""
    pick, shape = source.pick, source.structure
    channels = source.choice((shape.randint(1, 12), shape.randint(13, 48), 160), (4, 5, 1), structure=True)
    kernel = source.choice((1, 2, 3, 4, 5, 8), (1, 2, 2, 5, 1, 1), structure=True)
    streams, dilation = shape.randint(2, 5), shape.randint(1, 4)
    tokens = source.choice((pick.randint(0, 8), pick.randint(9, 60), pick.randint(61, 150)), (3, 5, 1))
    batch, packing, boundaries = _packing(source, tokens)
    eps, width = source.choice((1e-6, 1e-5, 1e-2)), streams * channels
    shapes = [(batch, tokens, width)] * 2 + [(batch, tokens, channels)] + [(width,)] * 3 + [(width, 1, kernel)]
    scales = (1.0, 1.0, 1.0, 0.2, 0.2, 0.2, kernel**-0.5)
    values = [source.normal(*shape) * scale for shape, scale in zip(shapes, scales, strict=True)]
    if source.chance(0.3):
        values[pick.randrange(3)][:, : tokens // 3] = 0.0
    values = [x.to(dtype) for x, dtype in zip(values, _dtypes(source, 7), strict=True)]
    _clear_small_scores(values, channels, eps)
    mask = None
    if source.chance(0.3):
        mask = source.guarded("conv_mask", (source.uniform(batch, tokens) < 0.8).to(source.choice(MASKS)))
    options = {"dilation": dilation, "eps": eps, "workspace_bytes": source.choice((None, 1, 4096, 1 << 16, 1 << 20))}
    tensors = [source.guarded(n, x) for n, x in zip(TENSORS, values, strict=True)]
    residual = shape.random() < 0.15

    def op(*given: Tensor) -> Tensor:
        if not residual:
            return ple_gdn.ple_gate_conv(*given, cu_seqlens=packing, conv_mask=mask, **options)
        bare = packing.cu_seqlens if isinstance(packing, ple_gdn.Packing) else packing
        return torch.ops.ple_gdn.ple_gate_conv(*given, bare, mask, residual=True, **options)[0]

    def oracle(*leaves: Tensor) -> Tensor:
        factor = None if mask is None else mask.cpu().double()
        out = ple_oracle(list(leaves), dilation, eps, factor, boundaries)
        return out + leaves[0] if residual else out

    return tensors, op, oracle, f"ple N={streams} C={channels} kernel={kernel} dilation={dilation} {options}"


def _conv_case(source: Source) -> tuple[list[Tensor], Callable, Callable, str]:
    pick = source.pick
    width, kernel = source.structure.randint(1, 70), source.choice((1, 2, 3, 4, 4, 4, 7), structure=True)
    tokens = pick.randint(0, 90)
    batch, packing, boundaries = _packing(source, tokens)
    x_dtype, weight_dtype = _dtypes(source, 2)
    shapes = {"x": (batch, tokens, width), "weight": (width, kernel)} | (
        {"bias": (width,)} if source.chance(0.5) else {}
    )
    tensors = [
        source.guarded(n, source.normal(*shape).to(x_dtype if n == "x" else weight_dtype))
        for n, shape in shapes.items()
    ]
    activation = source.choice((None, "silu"))
    return (
        tensors,
        lambda *given: ple_gdn.causal_conv1d(*given, activation=activation, cu_seqlens=packing),
        lambda *leaves: conv_oracle(list(leaves), activation, boundaries),
        f"conv D={width} kernel={kernel} {activation}",
    )


def _judge(
    tally: Tally,
    name: str,
    what: str,
    got: Tensor,
    want: Tensor | None,
    like: Tensor,
    coarse: float,
    smallest: float = SMALLEST,
) -> None:
    """`coarse`: the budget of the coarsest dtype that the result was rounded through."""
    want = torch.zeros(got.shape).double() if want is None else want
    if got.shape != want.shape or got.dtype != like.dtype or not got.is_contiguous():
        tally.failures.append(Failure(name, what, f"{got.dtype} {tuple(got.shape)} {got.stride()}"))
        return
    tally.compared += 1
    if not got.numel():
        return
    allowed = max(BUDGETS[got.dtype], coarse)
    share = rms(got.cpu().double() - want) / max(rms(want), smallest, 1e-30) / allowed
    tally.note(f"{name.split()[6]} {what}", share)
    if not share <= 1:
        tally.failures.append(Failure(name, what, f"{share:.2f} of the allowed error (size {rms(want):.2e})"))


def _one(tally: Tally, source: Source, place: str) -> None:
    conv = source.structure.random() < 0.2
    tensors, op, oracle, described = (_conv_case if conv else _ple_case)(source)
    name = f"{place} {described}"
    wanted = [at for at in range(len(tensors)) if source.chance(0.8)] or [0]
    leaves = [x.detach().cpu().double() for x in tensors]
    for at in wanted:
        tensors[at].requires_grad_()
        leaves[at].requires_grad_()
    out = op(*tensors)
    dout = source.gradient("dout", out)
    grads = torch.autograd.grad(out, [tensors[at] for at in wanted], dout)
    expected = oracle(*leaves)
    wide = [leaves[at] for at in wanted]
    exact = [None] * len(wide)
    if expected.requires_grad:
        exact = torch.autograd.grad(expected, wide, dout.cpu().double(), allow_unused=True)
    # The convolution rounds where eager rounds, through the weight's dtype; PLE rounds its results alone.
    coarse = 2 * max(BUDGETS[x.dtype] for x in tensors[:2]) if conv else 0.0
    _judge(tally, name, "out", out.detach(), expected.detach(), tensors[0], coarse)
    for at, got, want in zip(wanted, grads, exact, strict=True):
        # Sums over tokens of terms that were rounded one by one.
        smallest = 0.3 * math.sqrt(out.shape[0] * out.shape[1]) if conv and at else SMALLEST
        _judge(tally, name, f"d{at}", got, want, tensors[at], coarse, smallest)
    if source.chance(0.2):
        dense = [x.detach().contiguous().clone().requires_grad_(x.requires_grad) for x in tensors]
        again = op(*dense)
        found = torch.autograd.grad(again, [dense[at] for at in wanted], dout.contiguous().clone())
        if not all(same_bits(a, b) for a, b in zip((out, *grads), (again, *found), strict=True)):
            tally.failures.append(Failure(name, "layout", "other bits than from dense copies"))
    for touched in source.touched():
        tally.failures.append(Failure(name, touched, "written, or its guard was"))
    tally.guards += source.guards
    tally.kinds["conv" if conv else "ple"] += 1
    tally.cases += 1


def fuzz(tally: Tally, seed: int, group: int, device: torch.device) -> None:
    """A group is a single case."""
    _one(tally, Source("ple", seed, group, device=device), f"seed {seed} group {group} case 0")


if __name__ == "__main__":
    main(fuzz)
