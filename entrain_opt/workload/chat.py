"""Text becomes token ids: the only place.

1. The tokenizer's chat template renders the conversation with one placeholder per media item.
2. Assistant text is found by the template's generation markers; a template without them is rendered up to each
   assistant message with and without it, and the difference is the answer.
   Gemma 3's templates write the token that opens an image for it, those of InternVL and SmolVLM a token of their own
   for a video; others write the token of its features.
3. Every placeholder becomes what `workload/media` says of the item, exactly once: placeholders for its features, and
   the processor's own text around them where the model has some.
4. Labels are shifted here: `label_ids[t]` is the token to predict at position t, or -100.

Promise: never truncates; a placeholder or control token written inside a text raises instead of becoming one; planner
and trainer call the same `encode`, so they count the same lengths. Price: 1 to 2 ms per sample of 250 text tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.spec.families import COMPOSED_TYPE
from entrain_opt.spec.folder import find_model_folder, first_value, read_json
from entrain_opt.workload.conversation import ChatSample
from entrain_opt.workload.media.rule import Expansion
from entrain_opt.workload.samples import MEDIA_KINDS

IGNORED_LABEL = -100
#: Model types whose videos are frames with the placeholders of images; the template writes one token for a video.
_FRAMES_AS_IMAGES = ("internvl", "smolvlm")
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """A sample as the language model sees it; T tokens, media included.

    Attributes:
        input_ids: [T] int64.
        label_ids: [T] int64, the token to predict AT each position (already shifted by one), or -100.
        media_positions: int64 positions of the tokens of media items, in order.
        feature_positions: int64 positions of the placeholders among them, in the order of the media features; the
            others are text that the processor writes around the features.
    """

    input_ids: NDArray[np.int64]
    label_ids: NDArray[np.int64]
    media_positions: NDArray[np.int64]
    feature_positions: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_text_tokens(self) -> int:
        return len(self.input_ids) - len(self.media_positions)

    @property
    def num_label_tokens(self) -> int:
        return int(np.count_nonzero(self.label_ids != IGNORED_LABEL))


class ChatEncoder:
    """Tokenizer, chat template and media placeholders of one model folder."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        media_token_ids: dict[str, int],
        max_tokens: int,
        opening_token_ids: dict[str, int] | None = None,
    ) -> None:
        """Use a loaded tokenizer.

        Args:
            tokenizer: a fast Transformers tokenizer with a chat template.
            media_token_ids: token of the features of each media kind that the model knows.
            max_tokens: longest sample that `encode` accepts.
            opening_token_ids: token that opens an item of a kind; a template may write it alone, for the whole item.
        """
        self.tokenizer = tokenizer
        self.media_token_ids = dict(media_token_ids)
        self.max_tokens = max_tokens
        template = getattr(tokenizer, "chat_template", None)
        if not isinstance(template, str):
            raise RuntimeConfigError("tokenizer: expected a chat template (chat_template.jinja), found none.")
        self._marks_answers = bool(_GENERATION_MARKER.search(template))
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        for kind, token_id in media_token_ids.items():
            token = tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else None
            if token is None:
                raise RuntimeConfigError(
                    f"config: {kind}_token_id: expected a token of the tokenizer (0 to {len(tokenizer) - 1}), found "
                    f"{token_id}. Do config and tokenizer belong to one model?"
                )
            special.add(token)
        self._special = re.compile("|".join(re.escape(token) for token in sorted(special))) if special else None
        self._takes_parts = self._template_takes_parts()
        self._written_ids = {
            kind: opening_token_ids[kind]
            if opening_token_ids is not None and self._template_writes_opening(kind, token_id, opening_token_ids)
            else token_id
            for kind, token_id in self.media_token_ids.items()
        }

    @classmethod
    def from_pretrained(cls, model_folder: str | Path, *, max_tokens: int | None = None) -> ChatEncoder:
        """Load the tokenizer of a Hugging Face folder.

        Args:
            model_folder: folder with config.json and the tokenizer's files.
            max_tokens: longest sample accepted; None is the model's context length.

        Raises:
            RuntimeConfigError: no config, tokenizer or chat template.
        """
        from transformers import AutoTokenizer, PreTrainedConfig

        folder = find_model_folder(model_folder)
        config = read_json(folder / "config.json")
        # Transformers warns of a model type that it does not know; the tokenizer's own files say all there is.
        plain = {"config": PreTrainedConfig()} if config.get("model_type") == COMPOSED_TYPE else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **plain)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise RuntimeConfigError(
                f"{folder}: expected a tokenizer (tokenizer.json, tokenizer_config.json): {error}"
            ) from error
        if max_tokens is None:
            max_tokens = context_tokens(config)
        if max_tokens is None:
            raise RuntimeConfigError(f"{folder}/config.json: no max_position_embeddings; give max_tokens.")
        opening = first_value(config, "boi_token_id", "boi_token_index")
        openings = {} if opening is None else {"image": int(opening)}
        if config.get("model_type") in _FRAMES_AS_IMAGES:
            # Written by the template and replaced before the model sees it, so it may lie outside the vocabulary.
            written = str(getattr(tokenizer, "video_token", None) or "<video>")
            tokenizer.add_tokens([written], special_tokens=True)
            openings["video"] = tokenizer.convert_tokens_to_ids(written)
        return cls(
            tokenizer, media_token_ids=media_token_ids(config), max_tokens=max_tokens, opening_token_ids=openings
        )

    def encode(self, sample: ChatSample, media: Sequence[int | Expansion]) -> EncodedSample:
        """Token ids of a sample.

        Args:
            sample: the conversation.
            media: for each item of `sample.media`, in order, the number of its features or what replaces its
                placeholder.

        Raises:
            WorkloadError: a control token in a text, a differing placeholder count, or more than `max_tokens` tokens.
        """
        expansions = [(item,) if isinstance(item, int) else item for item in media]
        counts = [sum(piece for piece in pieces if isinstance(piece, int)) for pieces in expansions]
        if len(counts) != len(sample.media) or any(count < 1 for count in counts):
            raise WorkloadError(
                f"sample {sample.id}: expected at least one token for each of {len(sample.media)} media items, found "
                f"{counts}."
            )
        self._check_texts(sample)
        ids, is_answer = self._tokenize(sample)
        placeholders = np.flatnonzero(np.isin(ids, list(self._written_ids.values())))
        expected = [self._media_token(item.kind, sample) for item in sample.media]
        if ids[placeholders].tolist() != [self._written_ids[item.kind] for item in sample.media]:
            raise WorkloadError(
                f"sample {sample.id}: the chat template made {len(placeholders)} media placeholders for "
                f"{len(expected)} media items (or in another order). Does the template know image parts?"
            )
        own_ids = [self._expanded(pieces, token) for pieces, token in zip(expansions, expected, strict=True)]
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[placeholders] = [len(own) for own in own_ids]
        num_tokens = int(repeats.sum())
        if num_tokens > self.max_tokens:
            num_media = int(repeats[placeholders].sum())
            raise WorkloadError(
                f"sample {sample.id}: needs {num_tokens} tokens ({num_tokens - num_media} text, {num_media} media), "
                f"the limit is {self.max_tokens}. Leave it out (policy skip) or raise max_tokens."
            )
        is_answer[placeholders] = False
        is_media = np.zeros(len(ids), dtype=bool)
        is_media[placeholders] = True
        media_positions = np.flatnonzero(np.repeat(is_media, repeats))
        input_ids = np.repeat(ids, repeats)
        input_ids[media_positions] = np.concatenate(own_ids) if own_ids else 0
        is_answer = np.repeat(is_answer, repeats)
        label_ids = np.full(num_tokens, IGNORED_LABEL, dtype=np.int64)
        label_ids[:-1] = np.where(is_answer[1:], input_ids[1:], IGNORED_LABEL)
        is_feature = np.isin(input_ids[media_positions], expected)
        return EncodedSample(
            input_ids=input_ids,
            label_ids=label_ids,
            media_positions=media_positions,
            feature_positions=media_positions[is_feature],
        )

    def _expanded(self, pieces: Expansion, placeholder: int) -> NDArray[np.int64]:
        """Ids of what replaces one placeholder; text is tokenised piece by piece, as `MediaSize.markers` counts it."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids += [placeholder] * piece
            elif piece:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        return np.array(ids, dtype=np.int64)

    def _media_token(self, kind: str, sample: ChatSample) -> int:
        if kind not in self.media_token_ids:
            raise WorkloadError(f"sample {sample.id}: the model takes {sorted(self.media_token_ids)}, found {kind}.")
        return self.media_token_ids[kind]

    def _check_texts(self, sample: ChatSample) -> None:
        for message in sample.messages:
            for part in message["content"]:
                found = self._special.search(part["text"]) if self._special and part["type"] == "text" else None
                if found:
                    raise WorkloadError(
                        f"sample {sample.id}: the {message['role']} text contains {found.group()!r}, a control token "
                        "of the tokenizer. Remove it from the text."
                    )

    def _for_template(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._takes_parts:
            return list(messages)
        return [
            {**message, "content": "".join(part["text"] for part in message["content"])}
            if all(part["type"] == "text" for part in message["content"])
            else message
            for message in messages
        ]

    def _template_takes_parts(self) -> bool:
        """Templates of text-only models take strings, those of several-media models lists of parts."""
        from jinja2 import TemplateError

        probe = [{"role": "user", "content": [{"type": "text", "text": "zqx"}]}]
        try:
            rendered = self.tokenizer.apply_chat_template(probe, tokenize=False)
        except (TemplateError, TypeError):
            return False
        return "zqx" in rendered and "'type'" not in rendered and '"type"' not in rendered

    def _template_writes_opening(self, kind: str, token_id: int, opening_token_ids: dict[str, int]) -> bool:
        """Whether an item of this kind is rendered as its opening token, without the token of its features."""
        from jinja2 import TemplateError

        if kind not in opening_token_ids:
            return False
        probe = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "zqx"}]}]
        try:
            rendered = self.tokenizer.apply_chat_template(probe, tokenize=False)
        except (TemplateError, TypeError):
            return False  # Whatever the sample holds will be refused, with the template's own words.
        own, opening = self.tokenizer.convert_ids_to_tokens([token_id, opening_token_ids[kind]])
        return own not in rendered and opening is not None and opening in rendered

    def _tokenize(self, sample: ChatSample) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[T] ids with one placeholder per media item, and [T] whether each is the assistant's."""
        from jinja2 import TemplateError

        messages = self._for_template(sample.messages)
        try:
            if self._marks_answers:
                encoded = self.tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                return np.array(encoded["input_ids"], dtype=np.int64), np.array(encoded["assistant_masks"], dtype=bool)
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            spans = self._answer_spans(messages, text, sample)
        except TemplateError as error:
            raise WorkloadError(f"sample {sample.id}: the chat template refuses it: {error}") from error
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first_character = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
        is_answer = np.zeros(len(first_character), dtype=bool)
        for start, end in spans:
            is_answer |= (first_character >= start) & (first_character < end)
        return np.array(encoded["input_ids"], dtype=np.int64), is_answer

    def _answer_spans(self, messages: list[dict[str, Any]], text: str, sample: ChatSample) -> list[tuple[int, int]]:
        """Characters of each assistant message, by rendering the conversation with and without it."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
            after = self.tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise WorkloadError(
                    f"sample {sample.id}: the chat template renders earlier messages differently when more follow, so "
                    "answers cannot be found. Use a template with {% generation %} markers."
                )
            spans.append((len(before), len(after)))
        return spans


def media_token_ids(config: dict[str, Any]) -> dict[str, int]:
    """Placeholder token id of each media kind in a model's config.json."""
    found = {kind: first_value(config, f"{kind}_token_id", f"{kind}_token_index") for kind in MEDIA_KINDS}
    if config.get("model_type") in _FRAMES_AS_IMAGES:
        found["video"] = found["image"]
    return {kind: int(token) for kind, token in found.items() if token is not None}


def context_tokens(config: dict[str, Any]) -> int | None:
    """The language model's context length, if the config states it."""
    text = first_value(config, "text_config", "llm_config") or config
    return text.get("max_position_embeddings", config.get("max_position_embeddings"))
