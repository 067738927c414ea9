"""Write the model folder `models/tiny-llava`: config, image processor, tokenizer and chat template; no weights.

The tokenizer is a byte-level BPE trained on the shipped physics texts. Running this again writes the same bytes.

    python models/scripts/make_tiny_llava.py [--data recipes/data/physics] [--output models/tiny-llava]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY_SIZE = 4096
TILE_SIDE, PATCH_SIDE = 112, 14
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<image>", "<|im_start|>", "<|im_end|>"]

# The answer and the token that ends it stand inside the generation markers: these tokens carry the loss.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {%- if message['content'] is string %}
                {{- message['content'] }}
            {%- else %}
                {%- for part in message['content'] %}
                    {{- part['text'] }}
                {%- endfor %}
            {%- endif %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for part in message['content'] %}
                {{- '<image>' if part['type'] == 'image' else part['text'] }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def shipped_texts(data_folder: Path) -> list[str]:
    """Every text of the training split, in file order."""
    lines = (data_folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    return [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]


def write_tokenizer(data_folder: Path, output: Path) -> dict[str, int]:
    """Train and write the tokenizer; the ids of the special tokens are returned."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(shipped_texts(data_folder), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise SystemExit(f"expected {VOCABULARY_SIZE} tokens, the texts gave {tokenizer.get_vocab_size()}")
    tokenizer.save(str(output / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
            "additional_special_tokens": ["<eos>", "<image>", "<|im_start|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "padding_side": "right",
        },
    )
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return ids


def model_config(ids: dict[str, int]) -> dict[str, Any]:
    """Encoder and language model of similar work on the shipped data, twelve and six layers so that both can be cut."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": (TILE_SIDE // PATCH_SIDE) ** 2,
        "image_token_id": ids["<image>"],
        "image_token_index": ids["<image>"],
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<pad>"],
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_channels": 3,
            "image_size": TILE_SIDE,
            "patch_size": PATCH_SIDE,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": ids["<bos>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<pad>"],
        },
    }


def image_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "GotOcr2ImageProcessorPil",
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 6,
        "size": {"height": TILE_SIDE, "width": TILE_SIDE},
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "recipes" / "data" / "physics")
    parser.add_argument("--output", type=Path, default=ROOT / "models" / "tiny-llava")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(arguments.data, arguments.output)
    write_json(arguments.output / "config.json", model_config(ids))
    write_json(arguments.output / "preprocessor_config.json", image_processor_config())
    write_json(
        arguments.output / "generation_config.json",
        {"bos_token_id": ids["<bos>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<pad>"]},
    )


if __name__ == "__main__":
    main()
