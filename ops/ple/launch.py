"""What the forward and the backward launcher of PLE share: layout of the inputs, rows of documents, folded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import packed, rows_as_packed
from ..varlen import read_boundaries
from .kernels_common import BF16_PAIRS, FP16_PAIRS, PLAIN, ple_prepare_kernel

_PAIRS = {torch.bfloat16: BF16_PAIRS.value, torch.float16: FP16_PAIRS.value}
PREPARE_BLOCK = 1024
# No contraction beyond the fma that is written: a row's bits must not depend on which copy of a loop body handles it.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
BAD_CU_SEQLENS = "cu_seqlens must start at 0, never decrease and end at or before T"


def as_pairs(x: Tensor) -> tuple[Tensor, int]:
    """`x` as a walker takes it and its kind: int32 pairs of 16-bit elements where every dense row starts on a pair."""
    kind = _PAIRS.get(x.dtype)
    if kind is None or x.shape[-1] % 2:
        return x, PLAIN.value
    batch, row, step = x.stride()
    if step != 1 or (batch | row | x.storage_offset()) % 2 or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    return rows_as_packed(x.view(torch.int32)), kind


class Problem:
    """Sizes, strides and small device tensors of one call.

    Attributes:
        rows: B*T rows, counted through the batch.
        first: `[rows]` int32, first row of each row's document (`NO_DOCUMENT` if none); None: all start at row 0.
        fold: `[K+1, N*C]` fp32 weights, see `_fold_weights`.
    """

    def __init__(
        self,
        hidden: Tensor,
        key: Tensor,
        value: Tensor,
        conv_weight: Tensor,
        cu_seqlens: Tensor | None,
        conv_mask: Tensor | None,
        dilation: int,
        dout: Tensor | None,
    ) -> None:
        self.batch, self.tokens, self.width = hidden.shape
        self.rows = self.batch * self.tokens
        if self.rows >= 2**31 - 2**20:
            raise ValueError(f"hidden: expected fewer than {2**31 - 2**20} rows (B*T), got {self.rows}")
        self.channels, self.kernel = value.shape[-1], conv_weight.shape[-1]
        self.streams = self.width // self.channels
        self.device = hidden.device
        self.dilation = dilation
        given = {"hidden": hidden, "key": key, "value": value, "dout": dout}
        self.sources = {name: rows_as_packed(x) for name, x in given.items() if x is not None}
        self.sources["value_walk"], self.value_kind = self._walked(self.sources["value"])
        if dout is not None:
            self.sources["dout_walk"], self.dout_kind = self._walked(self.sources["dout"])
            self.sources["hidden_walk"], self.hidden_kind = self._walked(self.sources["hidden"])
            self.sources["key_walk"], self.key_kind = self._walked(self.sources["key"])
        self.mask = None if conv_mask is None else packed(conv_mask)
        self.cu_seqlens = None if cu_seqlens is None else self._on_device(cu_seqlens)
        self.flat = self.batch == 1 or all(x.stride(0) == self.tokens * x.stride(1) for x in self.sources.values())
        self.first: Tensor | None = None
        if self.cu_seqlens is not None or self.batch > 1:
            self.first = self.scratch(self.rows, dtype=torch.int32)
        self.fold = self.scratch(self.kernel + 1, self.width)
        self.a = self.scratch(self.rows, self.streams)
        self.gated = self.scratch(self.rows, self.streams)
        self.healthy: Tensor | None = None
        if self.cu_seqlens is not None:
            self.healthy = torch.ones(1, dtype=torch.int32, device=self.device)

    def _walked(self, x: Tensor) -> tuple[Tensor, int]:
        return (x, PLAIN.value) if self.channels % 2 else as_pairs(x)

    def _on_device(self, cu_seqlens: Tensor) -> Tensor:
        if cu_seqlens.device.type == "cpu" and cu_seqlens.device != self.device:
            read_boundaries(cu_seqlens, self.tokens)
        return cu_seqlens.to(self.device, non_blocking=True).contiguous()

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def strides(self, **sources: str) -> dict[str, int]:
        """Kernel arguments `<name>_batch`, `<name>_row` for each `name=source`."""
        out = {}
        for name, source in sources.items():
            out[f"{name}_batch"], out[f"{name}_row"], _ = self.sources[source].stride()
        return out

    @property
    def facts(self) -> dict[str, Any]:
        """Compile-time facts every token kernel takes."""
        return {
            "C": self.channels,
            "N": self.streams,
            "K": self.kernel,
            "HAS_FIRST": self.first is not None,
            "FLAT": self.flat,
        }

    def prepare(
        self, norm_key_weight: Tensor, norm_query_weight: Tensor, norm_conv_weight: Tensor, conv_weight: Tensor,
        stats: Tensor | None,
    ) -> None:  # fmt: skip
        """Folds the weights, fills `first`; with `stats` (backward) also `a` and `gated`. No host synchronisation."""
        row_work = self.first is not None or stats is not None
        blocks = -(-self.rows // PREPARE_BLOCK) if row_work else 0
        fold_blocks = -(-self.width // PREPARE_BLOCK)
        documents = 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        ple_prepare_kernel[(fold_blocks + blocks,)](
            norm_key_weight, norm_query_weight, norm_conv_weight, conv_weight, self.fold, self.cu_seqlens, self.first,
            self.healthy, stats, self.mask, self.a, self.gated, self.rows, self.tokens, documents,
            documents.bit_length(), blocks, W=self.width, N=self.streams, K=self.kernel, FOLD_BLOCKS=fold_blocks,
            HAS_DOCUMENTS=self.cu_seqlens is not None, HAS_FIRST=self.first is not None,
            HAS_STATS=stats is not None, HAS_MASK=self.mask is not None, BLOCK=PREPARE_BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip
