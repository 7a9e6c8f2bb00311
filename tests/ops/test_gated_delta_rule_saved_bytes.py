"""Bytes that a call of the gated delta rule keeps for its backward: announced and saved, tolerance 0; bad arguments."""

from __future__ import annotations

import pytest
import torch
from oracles.gdn import make_case

import ple_gdn
from ple_gdn.ops.gated_delta_rule.workspace import needed_phases

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY = {"heads": 1, "value_heads": 3, "key_width": 16, "value_width": 48}
SIZES = (1, 3, 16, 48)


@pytest.mark.parametrize("lengths", [(64,), (70, 0, 1, 64, 65), (0,), (1, 1, 1), (200, 55)])
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


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_rows_behind_the_last_document_are_counted_by_tokens(save_mode: str) -> None:
    case = make_case((200,), **GEOMETRY)
    boundaries = torch.tensor([0, 60])
    options = {"dtype": torch.float32, "save_mode": save_mode, "tokens": 200}
    tapes = torch.ops.ple_gdn.gated_delta_rule(*case[:5], None, boundaries, save_mode=save_mode)[2:]
    assert ple_gdn.gdn_saved_bytes(boundaries, *SIZES, **options) == sum(tape.nbytes for tape in tapes)
    needed = ple_gdn.gdn_workspace_bytes(boundaries, *SIZES, **options)
    assert needed == max(
        ple_gdn.gdn_workspace_layout(boundaries, *SIZES, **options).bytes(p) for p in needed_phases(save_mode, False)
    )
    leaves = [x.clone().requires_grad_() for x in case[:5]]
    scratch = torch.empty(needed, dtype=torch.uint8)
    call = {"cu_seqlens": boundaries, "save_mode": save_mode}
    ple_gdn.gated_delta_rule(*leaves, workspace=scratch, **call)[0].sum().backward()
    with pytest.raises(ValueError, match=f"workspace: expected at least {needed} bytes"):
        ple_gdn.gated_delta_rule(*leaves, workspace=scratch[:-1], **call)
    context = ple_gdn.build_kcp_context(ple_gdn.kcp_partition(boundaries, 1), None, 0, "cpu").prepare(1, 3)
    with pytest.raises(ValueError, match="tokens: expected None with cp="):
        ple_gdn.gdn_saved_bytes(boundaries, *SIZES, cp=context, **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"H": 2}, ValueError, "HV: expected a positive multiple of H = 2, got 3"),
        ({"H": -1}, ValueError, "H: expected at least 1, got -1"),
        ({"H": 2**70}, ValueError, "H: expected an int of 64 bits"),
        ({"tokens": 4}, ValueError, "tokens: expected at least the last entry of cu_seqlens, 5, got 4"),
        ({"tokens": 5.0}, TypeError, "tokens: expected an int, got float"),
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
