"""Attention over packed rows: each sample of a row attends to itself only.

One scaled-dot-product call per segment, which is exact and needs no mask: block-diagonal by construction. The price is
one kernel launch per sample of the row instead of one per row.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "entrain_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_offsets: list[int],
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment of one packed row.

    Args:
        query: [1, heads, tokens, head size]; `key` and `value` may have fewer heads (grouped queries).
        segment_offsets: token offsets of the samples in the row, from 0 to the number of tokens.

    Returns:
        [1, tokens, heads, head size], and no weights.
    """
    outputs = [
        nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            dropout_p=dropout,
            scale=scaling,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, end in itertools.pairwise(segment_offsets)
    ]
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return packed.transpose(1, 2), None


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` a name that Transformers models accept; calling it again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
