"""Gemma 3: squares through SigLIP, pooled; an image's tokens attend to each other in both directions.

Some language-model layers see a sliding window only, in which the two-way attention is cut as well, and rotary angles
differ between the two kinds of layers. Every language-model stage needs to know where the images stand.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families.base import IntArray, Span, consecutive_runs
from entrain_opt.runtime.families.towers import SquareTowerFamily


class Gemma3Family(SquareTowerFamily):
    """`Gemma3ForConditionalGeneration`."""

    rotary_by_kind = True
    reads_text_everywhere = True
    text_types = ("gemma3_text",)
    encoder_types = ("siglip_vision_model",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_gemma3_text(config.text_config)
        self.uses_post_norm = True

    def features(self, patches: int, segments: int, tokens: int) -> int:
        return segments * int(self.config.mm_tokens_per_image)

    def two_way_spans(self, feature_rows: IntArray) -> tuple[Span, ...]:
        if not len(feature_rows):
            return ()
        return tuple((int(run[0]), int(run[-1]) + 1) for run in consecutive_runs(feature_rows))

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        # The placeholder may lie outside the vocabulary; its row is replaced anyway.
        outside = input_ids >= self.text_config.vocab_size
        return super().embed(model, input_ids.masked_fill(outside, 0))


def check_gemma3_text(text: Any) -> None:
    """Raise RuntimeConfigError for a setting that `Family.decode` or `logits` would leave out."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(text, name, None):
            raise RuntimeConfigError(f"model: text_config.{name}: expected none, found {value}; it is not executed.")
