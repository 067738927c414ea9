"""Attention over packed rows: each sample of a row attends to itself only.

On a GPU in half precision, one kernel for the whole row (`torch.nn.attention.varlen`), which takes the segments'
offsets. Elsewhere, and for what that kernel does not do (rows that attend to each other in both directions, dropout),
one scaled-dot-product call per segment, which is exact and needs no mask: block-diagonal by construction. Its price is
one kernel launch per sample of the row. Only where a window is shorter than a segment, or rows attend to each other in
both directions, the segment gets a mask of its own length squared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED_ATTENTION = "entrain_packed"
#: What the kernel for whole rows needs: compute capability, and head sizes that are a multiple and at most so large.
_LEAST_CAPABILITY, _HEAD_MULTIPLE, _LARGEST_HEAD = (8, 0), 8, 256


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_offsets: list[int],
    two_way_spans: Sequence[tuple[int, int]] = (),
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each segment of one packed row: causal, unless the module says `is_causal = False`.

    Args:
        query: [1, heads, tokens, head size]; `key` and `value` may have fewer heads (grouped queries).
        segment_offsets: token offsets of the samples in the row, from 0 to the number of tokens.
        two_way_spans: rows that attend to each other in both directions, each within one segment.
        sliding_window: rows that a query sees at most before and including itself; None for all.

    Returns:
        [1, tokens, heads, head size], and no weights.
    """
    is_causal = getattr(module, "is_causal", True)
    if not two_way_spans and not dropout and takes_whole_rows(query):
        return _whole_row(query, key, value, segment_offsets, is_causal, sliding_window, scaling), None
    outputs = []
    for start, end in itertools.pairwise(segment_offsets):
        mask = _mask(start, end, two_way_spans, sliding_window, query.device) if is_causal else None
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=mask,
                dropout_p=dropout,
                scale=scaling,
                is_causal=is_causal and mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return packed.transpose(1, 2), None


def takes_whole_rows(query: Tensor) -> bool:
    """Whether one kernel can attend within all segments of a row: half precision on a GPU that has it."""
    head = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head % _HEAD_MULTIPLE == 0
        and head <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= _LEAST_CAPABILITY
    )


def _whole_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_offsets: Sequence[int],
    is_causal: bool,
    sliding_window: int | None,
    scaling: float | None,
) -> Tensor:
    """[1, tokens, heads, head size], from one kernel."""
    offsets = _offsets(tuple(segment_offsets), query.device)
    longest = max(end - start for start, end in itertools.pairwise(segment_offsets))
    # How many rows before and after itself a row sees; -1 is all of them.
    before = -1 if sliding_window is None or not is_causal else sliding_window - 1
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = varlen_attn(
        queries,
        keys,
        values,
        offsets,
        offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0 if is_causal else -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended[None]


@lru_cache(maxsize=64)
def _offsets(segment_offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device, once for all layers."""
    return torch.tensor(segment_offsets, dtype=torch.int32, device=device)


def _mask(
    start: int, end: int, spans: Sequence[tuple[int, int]], window: int | None, device: torch.device
) -> Tensor | None:
    """[length, length] of what each row of a segment sees; None if it is plainly causal."""
    inside = [(first - start, last - start) for first, last in spans if start <= first < end]
    is_cut = window is not None and window < end - start
    if not (inside or is_cut):
        return None
    length = end - start
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    for first, last in inside:
        seen[first:last, first:last] = True
    if window is not None and is_cut:
        seen &= torch.ones(length, length, dtype=torch.bool, device=device).triu(1 - window)
    return seen


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` a name that Transformers models accept; calling it again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
