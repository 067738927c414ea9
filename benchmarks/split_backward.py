"""What splitting a backward costs: time, and memory until the weight gradients are done.

    python benchmarks/split_backward.py
    python benchmarks/split_backward.py --device cuda --dtype bfloat16 --widths 4096 --tokens 4096

Llama layers of random weights. Time: processor seconds (on a GPU: synchronized wall seconds) of a whole backward and of
input gradients followed by weight gradients, run in turns, medians. Memory: the gradients kept for the weights as a
part of the activations (`schedule.columns.KEPT_PERCENT` is what schedules count).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from entrain_opt.runtime import split_backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--widths", nargs="*", type=int, default=[64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| width | tokens | whole backward, ms per layer | split | ratio | kept gradients over activations |")
    print("|---|---|---|---|---|---|")
    for width in arguments.widths:
        stage = Stage(width, arguments.layers, arguments.tokens, arguments.device, getattr(torch, arguments.dtype))
        whole, split = stage.time(arguments.rounds)
        whole, split = (1e3 * seconds / arguments.layers for seconds in (whole, split))
        print(
            f"| {width} | {arguments.tokens} | {whole:.2f} | {split:.2f} | {split / whole:.2f} | "
            f"{stage.kept_share():.2f} |"
        )


class Stage:
    """Some layers, as a stage in the middle of a pipeline runs them."""

    def __init__(self, width: int, layers: int, tokens: int, device: str, dtype: torch.dtype) -> None:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_hidden_layers=layers,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(layers)).to(device, dtype)
        self.rotary = LlamaRotaryEmbedding(config).to(device)
        self.shape, self.device, self.dtype = (1, tokens, width), device, dtype

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Input, output and a gradient of the output."""
        leaf = torch.randn(self.shape, device=self.device, dtype=self.dtype, requires_grad=True)
        positions = self.rotary(leaf, torch.arange(self.shape[1], device=self.device)[None])
        hidden: Tensor = leaf
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
        return leaf, hidden, torch.randn_like(hidden)

    def time(self, rounds: int) -> tuple[float, float]:
        """Median seconds of a whole and of a split backward."""
        whole, split = [], []
        for _ in range(rounds + 2):
            _, output, gradient = self.forward()
            whole.append(self._seconds(lambda output=output, gradient=gradient: output.backward(gradient)))
            leaf, output, gradient = self.forward()
            split.append(
                self._seconds(
                    lambda leaf=leaf, output=output, gradient=gradient: split_backward.start(
                        output, gradient, [leaf]
                    ).finish()
                )
            )
            self.layers.zero_grad()
        return statistics.median(whole[2:]), statistics.median(split[2:])

    def _seconds(self, run: Callable[[], None]) -> float:
        clock = time.process_time
        if self.device != "cpu":
            torch.cuda.synchronize()
            clock = time.perf_counter
        started = clock()
        run()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return clock() - started

    def kept_share(self) -> float:
        """Bytes of gradients that a split backward keeps over those of the activations."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.layers.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            leaf, output, gradient = self.forward()
        pending = split_backward.start(output, gradient, [leaf])
        arrived = [g.untyped_storage() for border in pending.borders for g in border.gradients if g is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in arrived}.values()) / sum(saved.values())


if __name__ == "__main__":
    main()
