"""Language models: Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, Gemma 3, and those inside the Qwen-VL family.

All are pre-norm decoders with a gated feed-forward part; they differ in biases, norms of the heads, windows, experts.

    layer = q, k, v, output projections (+ biases) + head norms + feed-forward (or router and experts) + norms

An expert is a gated feed-forward part of its own. A token goes through `num_experts_per_tok` of them, so computing
follows `active_parameters` and memory `parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.fields import Fields, known_type
from entrain_opt.spec.model import AttentionWindow, LayerKind, ModuleSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class _Type:
    """What sets a language model's type apart.

    Attributes:
        defaults: of its config class.
        bias: of the attention: never, on q, k and v always, or on all four where `attention_bias` says so.
        head_norms: q and k are normalised per head.
        num_norms: per layer.
        window: no layer has one, all do, or those that `layer_types` names; `if_used`: if `use_sliding_window` is true.
        has_head_dim: whether `head_dim` is read.
        experts: where their sizes stand.
    """

    defaults: dict[str, Any]
    bias: Literal["never", "qkv", "config"] = "never"
    head_norms: bool = False
    num_norms: int = 2
    window: Literal["never", "all", "all_if_used", "typed", "typed_if_used"] = "never"
    has_head_dim: bool = True
    experts: Literal["none", "mixtral", "qwen3"] = "none"


def _sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


_QWEN = {**_sizes(151936, 4096, 22016, 32, 32, 32768), "num_key_value_heads": 32, "sliding_window": 4096}
_QWEN |= {"max_window_layers": 28}
_MISTRAL = {**_sizes(32000, 4096, 14336, 32, 32, 131072), "num_key_value_heads": 8}
_EXPERTS = {"decoder_sparse_step": 1}
_TYPES = {
    "llama": _Type(defaults=_sizes(32000, 4096, 11008, 32, 32, 2048), bias="config"),
    "mistral": _Type(defaults={**_MISTRAL, "sliding_window": 4096}, window="all"),
    "mixtral": _Type(
        defaults={**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2}, window="all", experts="mixtral"
    ),
    "qwen2": _Type(defaults=_QWEN, bias="qkv", window="typed_if_used"),
    "qwen3": _Type(defaults={**_QWEN, "head_dim": 128}, bias="config", head_norms=True, window="typed_if_used"),
    "qwen3_moe": _Type(
        defaults={
            **_sizes(151936, 2048, 6144, 24, 32, 32768), **_EXPERTS, "num_key_value_heads": 4, "sliding_window": 4096,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        },
        bias="config", head_norms=True, window="all_if_used", experts="qwen3",
    ),
    "gemma3_text": _Type(
        defaults={
            **_sizes(262208, 2304, 9216, 26, 8, 131072), "num_key_value_heads": 4, "head_dim": 256,
            "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
        },
        bias="config", head_norms=True, num_norms=4, window="typed",
    ),
    "qwen2_5_vl_text": _Type(
        defaults={
            **_sizes(152064, 8192, 29568, 80, 64, 32768), "num_key_value_heads": 8, "sliding_window": 4096,
            "max_window_layers": 80,
        },
        bias="qkv", window="typed_if_used", has_head_dim=False,
    ),
    "qwen2_5_omni_text": _Type(
        defaults={
            **_sizes(152064, 3584, 18944, 28, 28, 32768), "num_key_value_heads": 4, "sliding_window": 32768,
            "max_window_layers": 28, "tie_word_embeddings": True,
        },
        bias="qkv", window="typed_if_used",
    ),
    "qwen3_vl_text": _Type(
        defaults={**_sizes(151936, 4096, 22016, 32, 32, 128000), "num_key_value_heads": 32, "head_dim": 128},
        bias="config", head_norms=True,
    ),
    "qwen3_vl_moe_text": _Type(
        defaults={
            **_sizes(151936, 2048, 5632, 24, 16, 128000), **_EXPERTS, "num_key_value_heads": 16,
            "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60, "tie_word_embeddings": True,
        },
        bias="config", head_norms=True, experts="qwen3",
    ),
}  # fmt: skip
TEXT_TYPES = tuple(_TYPES)
_NULLABLE = ("num_key_value_heads", "head_dim", "sliding_window")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextModel:
    """A language model as its config describes it.

    Attributes:
        module: with its own norm and head; the head counts.
        max_tokens: longest sequence.
        tied: whether this config asks for head and embedding to be one matrix; the model around it decides.
    """

    module: ModuleSpec
    max_tokens: int
    tied: bool


def read_text(given: Mapping[str, Any] | None, where: str, *, default: str, fixed: bool = False) -> TextModel:
    """A language model from its config.

    Args:
        given: the config; None takes every default.
        where: file and part, for messages.
        default: model type where the config has none.
        fixed: that type is the only one, whatever the config says.

    Raises:
        RuntimeConfigError: an unknown type, or a field without sense.
    """
    given = given or {}
    name = known_type(given, where, _TYPES, default=default, fixed=fixed)
    kind = _TYPES[name]
    text = Fields(given, kind.defaults, where, _NULLABLE)
    hidden, layers, vocabulary = text.count("hidden_size"), text.count("num_hidden_layers"), text.count("vocab_size")
    heads = text.count("num_attention_heads")
    key_value_heads = text.count("num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    head = text.count("head_dim") if kind.has_head_dim and text.get("head_dim") is not None else hidden // heads
    query, key_value = heads * head, key_value_heads * head
    attention = hidden * (2 * query + 2 * key_value) + kind.num_norms * hidden + 2 * head * kind.head_norms
    all_biased = kind.bias == "config" and text.flag("attention_bias")
    attention += (kind.bias == "qkv" or all_biased) * (query + 2 * key_value) + all_biased * hidden
    kinds = _layer_kinds(kind, text, layers, hidden, attention)
    plain = len(kinds) == 1 and kinds[0].window is None and not kinds[0].num_experts
    module = ModuleSpec(
        name="llm",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=_mean(kinds, [one.intermediate_size for one in kinds]),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_size=head,
        gated_mlp=True,
        layer_parameters=_mean(kinds, [one.parameters for one in kinds]),
        input_parameters=vocabulary * hidden,
        output_parameters=hidden + vocabulary * hidden,
        vocabulary_size=vocabulary,
        layer_kinds=() if plain else kinds,
        drops_inside=text.drops("attention_dropout"),
    )
    return TextModel(
        module=module, max_tokens=text.count("max_position_embeddings"), tied=text.flag("tie_word_embeddings")
    )


def _mean(kinds: tuple[LayerKind, ...], values: list[int]) -> int:
    """The mean of a value over the layers, rounded up."""
    counts = [len(kind.layers) for kind in kinds]
    return -(-sum(count * value for count, value in zip(counts, values, strict=True)) // sum(counts))


def _layer_kinds(kind: _Type, text: Fields, layers: int, hidden: int, attention: int) -> tuple[LayerKind, ...]:
    sliding, sparse = _sliding_layers(kind, text, layers), _sparse_layers(kind, text, layers)
    found = []
    for has_window in (True, False):
        for has_experts in (True, False):
            chosen = [i for i in range(layers) if (i in sliding) == has_window and (i in sparse) == has_experts]
            if not chosen:
                continue
            inner = text.count("intermediate_size")
            if has_experts and kind.experts == "qwen3":
                inner = text.count("moe_intermediate_size")
            num_experts = text.count("num_local_experts", "num_experts") if has_experts else 0
            per_token = text.count("num_experts_per_tok") if has_experts else 1
            if has_experts and per_token > num_experts:
                raise RuntimeConfigError(
                    f"{text.where}: num_experts_per_tok: expected at most the {num_experts} experts, found {per_token}."
                )
            feed_forward, router = 3 * hidden * inner, hidden * num_experts
            # Llama's feed-forward part alone may have biases.
            biases = text.flag("mlp_bias") * (2 * inner + hidden) if kind is _TYPES["llama"] else 0
            found.append(
                LayerKind(
                    name=("sliding" if has_window else "full")
                    + (" sparse" if has_experts else " dense" * bool(sparse)),
                    layers=tuple(chosen),
                    parameters=attention + biases + router + max(num_experts, 1) * feed_forward,
                    active_parameters=attention + biases + router + per_token * feed_forward,
                    intermediate_size=per_token * inner,
                    num_experts=num_experts,
                    window=AttentionWindow(shape="sliding", keys=text.count("sliding_window")) if has_window else None,
                )
            )
    return tuple(found)


def _sliding_layers(kind: _Type, text: Fields, layers: int) -> set[int]:
    """Layers whose tokens see a sliding window only."""
    if kind.window == "never" or text.get("sliding_window") is None:
        return set()
    if kind.window.endswith("if_used") and not text.flag("use_sliding_window"):
        return set()
    if kind.window.startswith("all"):
        return set(range(layers))
    types = text.get("layer_types")
    if types is None and "sliding_window_pattern" in kind.defaults:
        pattern = text.count("sliding_window_pattern")
        return {i for i in range(layers) if (i + 1) % pattern}
    if types is None:
        return set(range(text.count("max_window_layers", minimum=0), layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise RuntimeConfigError(
            f"{text.where}: layer_types: expected sliding_attention or full_attention for each of {layers} layers, "
            f"found {types!r}."
        )
    return {i for i, name in enumerate(types) if name == "sliding_attention"}


def _sparse_layers(kind: _Type, text: Fields, layers: int) -> set[int]:
    """Layers with experts."""
    if kind.experts == "none" or text.first("num_local_experts", "num_experts") == 0:
        return set()
    if kind.experts == "mixtral":
        return set(range(layers))
    dense, step = set(text.get("mlp_only_layers") or ()), text.count("decoder_sparse_step")
    return {i for i in range(layers) if i not in dense and (i + 1) % step == 0}
