"""One process of a measurement: times the pieces of a model, forward and backward, at a range of sizes.

The model is built with a few layers, so that their weights do not all sit in a small cache, and one more at each end of
the encoder: its first stage embeds and its last one projects, and neither belongs to a layer. Run by `measure.py` as
`python -m entrain_opt.runtime.measure_worker REQUEST`; the result is a JSON file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrain_opt.cost.precision import find_precision
from entrain_opt.runtime.families import MediaUnit
from entrain_opt.runtime.master import MasterWeights

#: Layers of each module that are timed together, and the bytes of weights above which fewer are.
MOST_LAYERS, MOST_WEIGHT_BYTES = 3, 256 << 20
_TILES = (1, 2, 4, 8)
_ROWS = ((64,), (64,) * 4, (256,), (512,), (256, 256), (128,) * 8, (1024,))
_LABELS = (16, 64, 256, 512)
_MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_MOST_ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Something to time.

    Attributes:
        name: `module piece`.
        squares, tokens, segments: what one layer computes on.
        layers: that run in one pass; times are divided by them.
        leaf: the input whose gradient is asked for; None for pixels and ids.
        parameters: of the piece.
        trained: whether its weights train.
        upstream: whether gradients are asked for at its input.
        run: leaf (or None) -> output.
    """

    name: str
    squares: float
    tokens: float
    segments: float
    layers: int
    leaf: Tensor | None
    parameters: list[nn.Parameter]
    trained: bool
    upstream: bool
    run: Callable[[Tensor | None], Tensor]


class _Worker:
    """One process of the measurement."""

    def __init__(self, request: dict[str, Any]) -> None:
        from transformers import AutoConfig

        from entrain_opt.runtime.families import family_of
        from entrain_opt.runtime.families.llava import LlavaFamily
        from entrain_opt.runtime.weights import materialize

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device = torch.device(request["device"])
        self.precision = request["precision"]
        self.frozen = set(request["frozen"])
        self.rank, self.num_workers = request["rank"], request["num_workers"]
        if self.num_workers > 1:
            store = dist.FileStore(f"{request['scratch']}/store", self.num_workers)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.num_workers)
        config = AutoConfig.from_pretrained(request["model_folder"])
        whole = family_of(config).num_layers()
        self.layers = _shorten(config, whole, find_precision(self.precision).weight_bytes)
        family = family_of(config)
        assert isinstance(family, LlavaFamily)  # `measure` refuses the others.
        self.family = family
        self.config = config
        with torch.device("meta"):
            self.model = self.family.build()
        materialize(self.model, {}, seed=0, dtype=torch.bfloat16 if self.precision == "bf16-true" else torch.float32)
        self.model.to(self.device)
        self.dtype = next(self.model.parameters()).dtype

    def pieces(self) -> Iterator[_Piece]:
        """Everything to time, smallest first within a kind."""
        tower, projector = "vision_tower" not in self.frozen, "projector" not in self.frozen
        llm = "language_model" not in self.frozen
        vision, text, layers = self.config.vision_config, self.config.text_config, self.layers
        patches = (vision.image_size // vision.patch_size) ** 2
        rows = self.family.rows_per_segment()
        inner: Any = self.model.model
        stack = list(inner.vision_tower.parameters())
        for tiles in _TILES:
            size = {"squares": float(tiles * rows**2), "tokens": float(tiles * rows), "segments": float(tiles)}
            pixels = torch.randn(tiles, vision.num_channels, vision.image_size, vision.image_size, dtype=self.dtype)
            pixels = pixels.to(self.device)
            hidden = self._leaf(tiles, rows, vision.hidden_size)
            unit = MediaUnit(
                module="vision", segments=(1,) * tiles, patches=(rows,) * tiles, features=(patches,) * tiles
            )
            yield _Piece(
                name="vision input", layers=1, leaf=None, parameters=stack, trained=tower, upstream=False, **size,
                run=lambda _, pixels=pixels, unit=unit: self.family.encode(self.model, pixels, (0, 0), unit),  # type: ignore[misc]
            )  # fmt: skip
            yield _Piece(
                name="vision layer", layers=layers["vision"], leaf=hidden, parameters=stack, trained=tower,
                upstream=tower, **size,
                run=lambda leaf, unit=unit: self.family.encode(  # type: ignore[misc]
                    self.model, leaf, (1, 1 + layers["vision"]), unit
                ),
            )  # fmt: skip
            end = layers["vision"] + 2
            yield _Piece(
                name="vision output", layers=1, leaf=hidden, parameters=list(inner.multi_modal_projector.parameters()),
                trained=projector, upstream=tower, **{**size, "tokens": float(tiles * patches)},
                run=lambda leaf, end=end, unit=unit: self.family.encode(  # type: ignore[misc]
                    self.model, leaf, (end, end), unit
                ),
            )  # fmt: skip
        upstream = llm or tower or projector
        for segments in _ROWS:
            if max(segments) > getattr(text, "max_position_embeddings", max(segments)):
                continue
            tokens = sum(segments)
            offsets = [0, *torch.tensor(segments).cumsum(0).tolist()]
            positions = torch.cat([torch.arange(length) for length in segments]).to(self.device)
            ids = torch.randint(text.vocab_size, (tokens,), device=self.device)
            squares = float(sum(length**2 for length in segments))
            size = {"squares": squares, "tokens": float(tokens), "segments": float(len(segments))}
            yield _Piece(
                name="llm input", layers=1, leaf=None, parameters=list(inner.language_model.embed_tokens.parameters()),
                trained=llm, upstream=False, **size,
                run=lambda _, ids=ids: self.family.embed(self.model, ids),  # type: ignore[misc]
            )  # fmt: skip
            yield _Piece(
                name="llm layer", layers=layers["llm"], leaf=self._leaf(tokens, text.hidden_size),
                parameters=list(inner.language_model.layers.parameters()), trained=llm, upstream=upstream, **size,
                run=lambda leaf, positions=positions, offsets=offsets: self.family.decode(  # type: ignore[misc]
                    self.model, leaf, positions, offsets, (0, layers["llm"])
                ),
            )  # fmt: skip
        for labels in _LABELS:
            targets = torch.randint(text.vocab_size, (labels,), device=self.device)
            head = [*inner.language_model.norm.parameters(), *self.model.lm_head.parameters()]  # type: ignore[union-attr]
            yield _Piece(
                name="llm output", squares=0.0, tokens=float(labels), segments=1.0, layers=1,
                leaf=self._leaf(labels, text.hidden_size), parameters=head, trained=llm, upstream=upstream,
                run=lambda leaf, targets=targets: nn.functional.cross_entropy(  # type: ignore[misc]
                    self.family.logits(self.model, leaf).float(), targets, reduction="sum"
                ),
            )  # fmt: skip

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).requires_grad_()

    def measure(self, budget_seconds: float) -> dict[str, list[list[float]]]:
        """Medians over rounds of every pass: name -> rows of (squares, tokens, segments, seconds)."""
        pieces = list(self.pieces())
        clock = time.perf_counter()
        self._round(pieces)  # Warm-up: memory, caches and kernels.
        rounds = max(2, min(_MOST_ROUNDS, int(budget_seconds / max(self._slowest(time.perf_counter() - clock), 1e-3))))
        timed: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds):
            self._barrier()
            # Input gradients of what trains are needed for split backwards only: fewer rounds will do.
            for key, seconds in self._round(pieces, every_direction=number % 3 == 0).items():
                timed.setdefault(key, []).append(seconds)
        passes: dict[str, list[list[float]]] = {}
        for (name, index), seconds_of_rounds in timed.items():
            piece = pieces[index]
            row = [piece.squares, piece.tokens, piece.segments, statistics.median(seconds_of_rounds) / piece.layers]
            passes.setdefault(name, []).append(row)
        passes["step"] = [self._step()]
        passes["action"] = [[0.0, 0.0, 0.0, self._action()]]
        if self.num_workers > 1 and self.device.type == "cpu" and (messages := self._messages()):
            passes["message"] = messages
        return passes

    def _round(self, pieces: list[_Piece], *, every_direction: bool = False) -> dict[tuple[str, int], float]:
        """Every pass once: (name, index of its piece) -> seconds."""
        timed: dict[tuple[str, int], float] = {}
        for index, piece in enumerate(pieces):
            inputs_only = piece.upstream and (every_direction or not piece.trained)
            wanted = [("backward", True)] * piece.trained + [("input_backward", False)] * inputs_only
            if not wanted:
                timed[f"{piece.name} forward", index], _ = self._time(piece, weights=False, grad=False)
            for direction, weights in wanted:
                forward, backward = self._time(piece, weights=weights, grad=True)
                timed.setdefault((f"{piece.name} forward", index), forward)
                timed[f"{piece.name} {direction}", index] = backward
        return timed

    def _time(self, piece: _Piece, *, weights: bool, grad: bool) -> tuple[float, float]:
        """Seconds of one forward and, with `grad`, one backward."""
        for parameter in piece.parameters:
            parameter.requires_grad_(weights)
        leaf = None if piece.leaf is None else piece.leaf.detach().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            start = self._now()
            with self._autocast():
                output = piece.run(leaf)
            forward = self._now() - start
        if not grad:
            return forward, 0.0
        gradient = torch.ones_like(output)
        start = self._now()
        torch.autograd.backward(output, gradient)
        return forward, self._now() - start

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed"):
            yield

    def _now(self) -> float:
        """On CPU the process's own time: what other programs take for a moment is not the model's cost.

        Waiting for memory, which the other workers cause as training does, counts as own time.
        """
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _step(self) -> list[float]:
        """AdamW on all parameters of the shortened model, or on their float32 masters, which are then written back."""
        named = dict(self.model.named_parameters())
        for parameter in named.values():
            parameter.requires_grad_(True)
        masters = MasterWeights(named)
        parameters = [masters.of(parameter) for parameter in named.values()]
        for parameter in parameters:
            # Gradients of zero would be slower than real ones: they leave moments of zero to divide by.
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        optimizer.step()
        masters.write_back()
        self._barrier()
        seconds = []
        for _ in range(5):
            start = self._now()
            optimizer.step()
            masters.write_back()
            seconds.append(self._now() - start)
        return [0.0, float(sum(p.numel() for p in parameters)), 0.0, statistics.median(seconds)]

    def _action(self) -> float:
        """What surrounds a forward or backward: a fresh leaf, an autograd call on next to nothing, book-keeping."""
        source, gradient = torch.zeros(1, device=self.device), torch.ones(1, device=self.device)
        seconds = []
        for _ in range(200):
            start = self._now()
            leaf = source.detach().requires_grad_()
            torch.autograd.backward(leaf * 1.0, gradient)
            seconds.append((self._now() - start) / 2)
        return statistics.median(seconds)

    def _messages(self) -> list[list[float]]:
        """Rows of (0, bytes, 1, seconds) one way, between the first two workers; the others wait."""
        rows = []
        for num_bytes in _MESSAGE_BYTES:
            tensor = torch.zeros(num_bytes // 4)
            self._barrier()
            seconds = []
            for _ in range(8):
                start = time.perf_counter()
                if self.rank == 0:
                    dist.send(tensor, 1)
                    dist.recv(tensor, 1)
                elif self.rank == 1:
                    dist.recv(tensor, 0)
                    dist.send(tensor, 0)
                seconds.append((time.perf_counter() - start) / 2)
            # The fastest trip: a message waits for whatever else runs, and what waits is not the link.
            rows.append([0.0, float(num_bytes), 1.0, min(seconds)])
        return rows if self.rank < 2 else []

    def _barrier(self) -> None:
        if self.num_workers > 1:
            dist.barrier()

    def _slowest(self, seconds: float) -> float:
        if self.num_workers == 1:
            return seconds
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def _shorten(config: Any, whole: dict[str, int], weight_bytes: int) -> dict[str, int]:
    """Leave a few layers in a config; returns how many of each module are timed together."""
    vision, text = config.vision_config, config.text_config
    layers = {}
    for name, part in (("vision", vision), ("llm", text)):
        weights = part.hidden_size * (4 * part.hidden_size + 3 * part.intermediate_size) * weight_bytes
        layers[name] = max(1, min(MOST_LAYERS, whole[name], MOST_WEIGHT_BYTES // weights))
    # One more at each end: the first stage embeds, the last one projects, and neither belongs to a layer.
    vision.num_hidden_layers = layers["vision"] + 2
    config.vision_feature_layer = layers["vision"] + 2
    text.num_hidden_layers = layers["llm"]
    return layers


def _main() -> None:
    request = json.loads(sys.argv[1])
    worker = _Worker(request)
    passes = worker.measure(request["budget_seconds"])
    Path(request["scratch"], f"result{request['rank']}.json").write_text(json.dumps({"passes": passes}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
