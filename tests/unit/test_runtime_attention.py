"""Attention over packed rows: what the kernel for whole rows is asked for is what the segments compute one by one."""

import itertools

import pytest
import torch
from torch import nn

from entrain_opt.runtime import attention

OFFSETS = [0, 5, 6, 18]


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """`varlen_attn` as it is documented, spelled out."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == max(end - start for start, end in itertools.pairwise(cu_seq_q.tolist()))
    assert query.shape[1] == key.shape[1] or enable_gqa
    outputs = []
    for start, end in itertools.pairwise(cu_seq_q.tolist()):
        group = query.shape[1] // key.shape[1]
        q, k, v = query[start:end], *(one[start:end].repeat_interleave(group, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        away = torch.arange(end - start)[None] - torch.arange(end - start)[:, None]
        before, after = (end if side < 0 else side for side in window_size)
        scores = scores.masked_fill((away < -before) | (away > after), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def rows(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, OFFSETS[-1], 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_whole_rows_are_segments(monkeypatch, is_causal, window, scaling):
    module = nn.Module()
    module.is_causal = is_causal
    query, key, value = rows(4, 0), rows(2, 1), rows(2, 2)
    options = {"segment_offsets": OFFSETS, "scaling": scaling, "sliding_window": window}
    one_by_one, _ = attention.packed_attention(module, query, key, value, None, **options)
    asked = []
    monkeypatch.setattr(attention, "takes_whole_rows", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", lambda *a, **k: asked.append(1) or kernel(*a, **k))
    whole, _ = attention.packed_attention(module, query, key, value, None, **options)
    assert asked
    torch.testing.assert_close(whole, one_by_one)


def test_what_the_kernel_cannot_do_goes_by_segments(monkeypatch):
    monkeypatch.setattr(attention, "takes_whole_rows", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", None)  # A call would raise.
    query, key, value = rows(2, 0), rows(2, 1), rows(2, 2)
    for options in ({"two_way_spans": [(1, 3)]}, {"dropout": 0.1}):
        found, _ = attention.packed_attention(nn.Module(), query, key, value, None, segment_offsets=OFFSETS, **options)
        assert found.shape == (1, OFFSETS[-1], 2, 8)


def test_the_processor_goes_by_segments():
    assert not attention.takes_whole_rows(rows(2, 0).to(torch.bfloat16))
