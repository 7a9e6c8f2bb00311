"""Metadata of packed batches: values, the checks, host reads, Dynamo."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ple_gdn
from ple_gdn.ops import varlen


def test_chunk_offsets_count_whole_and_partial_chunks_of_every_document() -> None:
    packing = ple_gdn.prepare_varlen(torch.tensor([0, 0, 1, 65, 129, 194, 194], dtype=torch.int32))
    assert packing.chunk_offsets.tolist() == [0, 0, 1, 2, 3, 5, 5]
    assert packing.chunk_offsets.dtype == torch.int32
    assert isinstance(packing, ple_gdn.Packing)


def test_documents_up_to_the_largest_int32_have_their_chunks() -> None:
    most = 2**31 - 1
    packing = ple_gdn.prepare_varlen(torch.tensor([0, 1, 1, most], dtype=torch.int32))
    assert packing.chunk_offsets.tolist() == [0, 1, 1, 1 + 2**25]


def test_fake_boundaries_have_fake_metadata() -> None:
    with FakeTensorMode():
        packing = ple_gdn.prepare_varlen(torch.empty(4, dtype=torch.int32))
    assert (packing.chunk_offsets.shape, packing.chunk_offsets.dtype) == ((4,), torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strided_and_contiguous_boundaries_give_the_same_metadata(dtype: torch.dtype) -> None:
    plain = torch.tensor([0, 5, 9, 200], dtype=dtype)
    strided = torch.tensor([0, -1, 5, -1, 9, -1, 200, -1], dtype=dtype)[::2]
    for a, b in zip(ple_gdn.prepare_varlen(plain), ple_gdn.prepare_varlen(strided), strict=True):
        assert torch.equal(a, b)
        assert b.is_contiguous()


def test_preparing_twice_is_harmless_and_no_document_is_a_packing() -> None:
    packing = ple_gdn.prepare_varlen(torch.tensor([0, 3]))
    assert ple_gdn.prepare_varlen(packing) is packing
    assert ple_gdn.prepare_varlen(torch.tensor([0])).chunk_offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.tensor([0, 5, 3]), ValueError, "non-decreasing entries, got 5 then 3 at index 1"),
        (torch.tensor([1, 5]), ValueError, "first entry to be 0, got 1"),
        (torch.tensor([[0, 5]]), ValueError, r"1 dimensions .* got shape \(1, 2\)"),
        (torch.tensor([], dtype=torch.int64), ValueError, r"N \+ 1"),
        (torch.tensor([0.0, 5.0]), TypeError, "int32, int64, got float32"),
        ([0, 5], TypeError, "expected a torch.Tensor, got list"),
    ],
)
def test_bad_boundaries_raise_naming_the_argument(bad: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        ple_gdn.prepare_varlen(bad)
    assert str(caught.value).startswith("cu_seqlens")


def test_values_are_checked_against_tokens_and_offsets() -> None:
    boundaries = torch.tensor([0, 70, 71])
    assert varlen.read_boundaries(boundaries, 71, torch.tensor([0, 2, 3])) == (0, 70, 71)
    with pytest.raises(ValueError, match="at most T = 70, got 71"):
        varlen.read_boundaries(boundaries, 70)
    with pytest.raises(ValueError, match="chunk_offsets"):
        varlen.read_boundaries(boundaries, 71, torch.tensor([0, 1, 2]))


def test_boundaries_changed_in_place_are_read_again() -> None:
    boundaries = torch.tensor([0, 4, 8])
    assert varlen.read_boundaries(boundaries) == (0, 4, 8)
    boundaries.numpy()[1] = 6  # no version counter sees this write
    assert varlen.read_boundaries(boundaries) == (0, 6, 8)


def test_metadata_checks_name_batch_device_and_count() -> None:
    cpu = torch.device("cpu")
    boundaries = torch.tensor([0, 4])
    varlen.check_packing(1, cpu, boundaries, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="batch size 1"):
        varlen.check_packing(2, cpu, boundaries)
    with pytest.raises(ValueError, match="expected 2 entries"):
        varlen.check_packing(1, cpu, boundaries, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="None without cu_seqlens"):
        varlen.check_packing(1, cpu, None, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"expected device cpu \(that of the inputs\), got meta"):
        varlen.check_packing(1, cpu, torch.empty(2, dtype=torch.int64, device="meta"))


def test_fronts_accept_a_tensor_a_packing_or_nothing() -> None:
    boundaries = torch.tensor([0, 4])
    assert varlen.unpack_cu_seqlens(None) == (None, None)
    assert varlen.unpack_cu_seqlens(boundaries) == (boundaries, None)
    packing = ple_gdn.prepare_varlen(boundaries)
    assert varlen.unpack_cu_seqlens(packing) == tuple(packing)
    with pytest.raises(TypeError, match="Packing of prepare_varlen, got list"):
        varlen.unpack_cu_seqlens([0, 4])


def test_preparing_inside_a_full_graph_equals_eager() -> None:
    def offsets(boundaries: torch.Tensor) -> torch.Tensor:
        return ple_gdn.prepare_varlen(boundaries).chunk_offsets * 2

    boundaries = torch.tensor([0, 5, 70, 200])
    compiled = torch.compile(offsets, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(boundaries), offsets(boundaries))


def test_a_packing_crosses_a_full_graph_boundary() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def first(packing: ple_gdn.Packing) -> torch.Tensor:
        cu_seqlens, chunk_offsets = varlen.unpack_cu_seqlens(packing)
        return cu_seqlens + chunk_offsets

    assert first(ple_gdn.prepare_varlen(torch.tensor([0, 5, 70]))).tolist() == [0, 6, 73]
