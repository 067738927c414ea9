"""One process of a measurement: times the pieces of a model, forward and backward, at a range of sizes.

The model is built with a few layers (`short_model.py`), so that their weights do not all sit in a small cache; what is
timed is listed in `measure_pieces.py`. Run by `measure.py` as `python -m entrain_opt.runtime.measure_worker REQUEST`;
the result is a JSON file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from entrain_opt.cost.precision import find_precision
from entrain_opt.runtime import split_backward
from entrain_opt.runtime.master import MasterWeights
from entrain_opt.runtime.measure_pieces import Piece, Pieces
from entrain_opt.runtime.short_model import shorten
from entrain_opt.runtime.weights import materialize
from entrain_opt.workload.media import media_rule

_MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_MOST_ROUNDS = 9
_SPLIT = "split_backward"
#: One in so many rounds times all directions.
_SPARSE = 3


class MeasureWorker:
    """One process of the measurement."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device = torch.device(request["device"])
        self.precision = request["precision"]
        self.rank, self.num_workers = request["rank"], request["num_workers"]
        if self.num_workers > 1:
            store = dist.FileStore(f"{request['scratch']}/store", self.num_workers)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.num_workers)
        folder = Path(request["model_folder"])
        self.short = shorten(
            folder,
            Path(request["scratch"], f"short{self.rank}"),
            frozen=request["frozen"],
            weight_bytes=find_precision(self.precision).weight_bytes,
        )
        with torch.device("meta"):
            self.model = self.short.family.build()
        materialize(self.model, {}, seed=0, dtype=torch.bfloat16 if self.precision == "bf16-true" else torch.float32)
        self.model.to(self.device)
        self.pieces = list(Pieces(self.short, self.model, media_rule(folder)))

    def measure(self, budget_seconds: float) -> dict[str, list[list[float]]]:
        """Medians over rounds of every pass: name -> rows of (squares, tokens, segments, seconds)."""
        pieces = self.pieces
        clock = time.perf_counter()
        self._round(pieces)  # Warm-up: memory, caches and kernels.
        rounds = max(2, min(_MOST_ROUNDS, int(budget_seconds / max(self._slowest(time.perf_counter() - clock), 1e-3))))
        timed: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds):
            self._barrier()
            # What is needed for split backwards only: fewer rounds will do.
            for key, seconds in self._round(pieces, every_direction=number % _SPARSE == 0).items():
                timed.setdefault(key, []).append(seconds)
        passes: dict[str, list[list[float]]] = {}
        for (name, index), seconds_of_rounds in timed.items():
            piece = pieces[index]
            seconds = statistics.median(seconds_of_rounds)
            if name.endswith(_SPLIT):  # Times of different rounds differ by more than splitting costs.
                whole = timed[f"{piece.name} backward", index]
                ratios = [
                    split / max(one, 1e-9) for split, one in zip(seconds_of_rounds, whole[::_SPARSE], strict=True)
                ]
                seconds = statistics.median(ratios) * statistics.median(whole)
            row = [piece.squares, piece.tokens, piece.segments, seconds / piece.layers]
            passes.setdefault(name, []).append(row)
        passes["step"] = [self._step()]
        passes["action"] = [[0.0, 0.0, 0.0, self._action()]]
        if self.num_workers > 1 and self.device.type == "cpu" and (messages := self._messages()):
            passes["message"] = messages
        return passes

    def _round(self, pieces: list[Piece], *, every_direction: bool = False) -> dict[tuple[str, int], float]:
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
            if piece.trained and piece.upstream and every_direction and piece.name.endswith(" layer"):
                _, timed[f"{piece.name} {_SPLIT}", index] = self._time(piece, weights=True, grad=True, split=True)
        return timed

    def _time(self, piece: Piece, *, weights: bool, grad: bool, split: bool = False) -> tuple[float, float]:
        """Seconds of one forward and, with `grad`, one backward, whole or in two parts."""
        for parameter in piece.parameters:
            parameter.requires_grad_(weights)
        leaf = None if piece.leaf is None else piece.leaf.detach().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            start = self._now()
            with self._autocast():
                output = piece.run(leaf)
            forward = self._now() - start
        if piece.setup is not None:
            with torch.no_grad(), self._autocast():
                start = self._now()
                piece.setup(leaf)
                # A clock of coarse ticks may show the layers as free: they are not.
                forward = max(forward - (self._now() - start), forward / 100)
        if not grad:
            return forward, 0.0
        gradient = torch.ones_like(output)
        start = self._now()
        if split:
            assert leaf is not None
            split_backward.start(output, gradient, [leaf]).finish()
        else:
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
        parameters = [own for parameter in named.values() if (own := masters.of(parameter)) is not None]
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


def _main() -> None:
    request = json.loads(sys.argv[1])
    worker = MeasureWorker(request)
    passes = worker.measure(request["budget_seconds"])
    Path(request["scratch"], f"result{request['rank']}.json").write_text(json.dumps({"passes": passes}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
