"""What launchers give to kernels: tensors themselves where they lie as dense ones do, copies where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.layouts import LAYOUTS
from torch import Tensor

from ple_gdn.ops.layout import packed, rows_as_packed

pytest.importorskip("triton")

from ple_gdn.ops.gated_delta_rule import launch as gated_delta_rule
from ple_gdn.ops.gated_residual import launch as gated_residual

pytestmark = pytest.mark.usefixtures("one_thread")


def unaligned(x: Tensor) -> Tensor:
    """Contiguous, but it begins one element behind where an allocation does."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_packed_copies_what_is_not_contiguous_or_not_aligned() -> None:
    x = torch.randn(4, 6, 8)
    assert packed(x) is x
    for other in (x.transpose(0, 1), x[:, :3], unaligned(x), x.new_zeros(1).expand(4, 6)):
        got = packed(other)
        assert got.is_contiguous()
        assert got.data_ptr() % 16 == 0
        assert torch.equal(got, other)


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (45, {"rows_padded_by_8", "rows_padded_by_2", "rows_padded_by_1", "begins_at_element_1",
              "begins_at_element_2_rows_padded_to_16", "batch_rows_padded", "batch_rows_padded_by_1_element",
              "tokens_before_batch"}),
        (64, {"rows_padded_to_16", "batch_rows_padded", "tokens_before_batch"}),
    ],
)  # fmt: skip
def test_rows_are_kept_where_all_or_none_are_aligned_as_dense_ones(width: int, kept: set[str]) -> None:
    x = torch.randn(3, 4, width)
    assert rows_as_packed(x) is x
    for name, layout in LAYOUTS.items():
        other = layout(x)
        got = rows_as_packed(other)
        assert (got is other) == (name in kept), name
        assert torch.equal(got, x)
        assert got.stride(2) == 1


def test_batch_stride_of_one_batch_row_does_not_matter() -> None:
    x = torch.randn(1, 4, 64).as_strided((1, 4, 64), (7, 64, 1))
    assert rows_as_packed(x) is x


def test_gated_delta_rule_kernels_get_dense_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor | None] = []
    monkeypatch.setattr(gated_delta_rule.repeats, "run", lambda _, inputs, *rest: given.extend(inputs))
    rows, gates = (1, 70, 2, 16), (1, 70, 2)
    shapes = (rows, rows, rows, gates, gates, (1, 2, 16, 16))
    q, k, v, g, beta, state = (unaligned(torch.randn(shape)) for shape in shapes)
    options = (None, None, None, None)
    *_, gcum, k_rstd, qscale, x, h, delta = gated_delta_rule.launch_forward(
        q, k, v, g, beta, state, *options, True, True, "full"
    )
    gated_delta_rule.launch_backward(
        unaligned(v), state, q, k, v, g, beta, state, None, None, None, gcum, k_rstd, qscale, x, h, delta, None, True
    )
    tensors = [t for t in given if t is not None]
    assert len(tensors) == 6 + 8 + 6
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def test_gated_residual_sums_get_dense_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: given.extend(arguments)

    monkeypatch.setattr(gated_residual.kernels, "inject_backward_kernel", Kernel())
    dy, hidden, weights = torch.randn(5, 4 * 32), torch.randn(5, 32), torch.randn(5, 4)
    gated_residual.inject_backward(*(unaligned(x) for x in (dy, hidden, weights)))
    assert [x.data_ptr() % 16 for x in given if isinstance(x, Tensor)] == [0] * 5
