"""What global batches ask of each module: the numbers that every choice of degrees is judged with.

Sums over independent random global batches (means over the batches drawn) and the largest single sample, per layer and
for the embedding and head apart. Single samples differ by orders of magnitude, sums over a global batch by percents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel
from entrain_opt.cost.features import module_features
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.statistics import global_batch_statistics

#: Global batches drawn for the means.
NUM_BATCHES = 16
#: What a module is made up of, in the order of the chain; each of its layers is a `layer`.
PIECES = ("input", "layer", "output")
_AMOUNTS = ("amount", "outputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One quantity of a global batch.

    Attributes:
        total: mean sum over a global batch.
        largest: mean over batches of the largest sample.
        worst: the largest sample of the data; memory must hold it.
    """

    total: float
    largest: float
    worst: float = 0.0

    def divided(self, by: int) -> Load:
        """Of one of so many devices that share it evenly."""
        return Load(total=self.total / by, largest=self.largest / by, worst=self.worst / by)

    def of_microbatch(self, data: int, num_microbatches: int) -> float:
        """Of a mean microbatch."""
        return self.total / (data * num_microbatches)

    def of_largest_microbatch(self, data: int, num_microbatches: int) -> float:
        """A microbatch is never smaller than the largest sample."""
        return max(self.of_microbatch(data, num_microbatches), self.largest)

    def of_worst_microbatch(self, data: int, num_microbatches: int) -> float:
        """The largest microbatch that any batch may hold: at least the largest sample of the data."""
        return max(self.of_largest_microbatch(data, num_microbatches), self.worst)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDemand:
    """What a global batch asks of one module, or of each of the devices that its samples are divided over.

    Attributes:
        input, layer, output: forward plus backward seconds of the embedding, one layer, and the projector or head.
        amount: patches or tokens.
        outputs: media tokens or label tokens.
    """

    input: Load
    layer: Load
    output: Load
    amount: Load
    outputs: Load


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What global batches ask of a model.

    Attributes:
        modules: in the order of `ModelSpec.modules`.
        samples: the table.
        rows: [batches, global_batch_size] the samples of each batch drawn.
        global_batch_size: samples per optimizer step.
        costs: what the seconds are from.
    """

    modules: tuple[ModuleDemand, ...]
    samples: SampleTable
    rows: NDArray[np.int64]
    global_batch_size: int
    costs: CostModel
    _variants: dict[tuple[int, int, int, bool], ModuleDemand] = field(default_factory=dict)

    def of(self, module: int, tensor: int = 1, context: int = 1, recompute: bool = False) -> ModuleDemand:
        """What a global batch asks of a device of a module under its degrees, or recomputed.

        The largest sample is the one that is largest on one device without recompute.
        """
        if tensor == context == 1 and not recompute:
            return self.modules[module]
        key = (module, tensor, context, recompute)
        if key not in self._variants:
            self._variants[key] = self._variant(*key)
        return self._variants[key]

    def _variant(self, module: int, tensor: int, context: int, recompute: bool) -> ModuleDemand:
        name, base = self.costs.model.modules[module].name, self.modules[module]
        plain = sample_columns(self.samples, self.costs)
        columns = sample_columns(self.samples, self.costs, tensor=tensor, context=context, recompute=recompute)
        times = np.bincount(self.rows.reshape(-1), minlength=len(self.samples)) / len(self.rows)

        def load(piece: str) -> Load:
            column, by = columns[f"{name} {piece}"], plain[f"{name} {piece}"]
            largest = np.take_along_axis(self.rows, by[self.rows].argmax(axis=1)[:, None], axis=1)
            return Load(total=float(times @ column), largest=float(column[largest].mean()), worst=float(column.max()))

        amounts = {name: getattr(base, name).divided(context) for name in _AMOUNTS}
        return ModuleDemand(**amounts, **{piece: load(piece) for piece in PIECES})


def estimate_demand(
    samples: SampleTable, costs: CostModel, global_batch_size: int, *, num_batches: int = NUM_BATCHES, seed: int = 0
) -> Demand:
    """The demand of random global batches of a table.

    Args:
        samples: the data set.
        costs: of the model.
        global_batch_size: samples per batch.
        num_batches: batches to draw.
        seed: the same seed draws the same batches.

    Raises:
        WorkloadError: an empty table, or a size below 1.
    """
    columns = sample_columns(samples, costs)
    statistics = global_batch_statistics(columns, global_batch_size, num_batches, seed=seed)
    total = dict(zip(statistics.names, statistics.mean, strict=True))
    largest = dict(zip(statistics.names, statistics.maxima.mean(axis=0), strict=True))

    def load(module: str, piece: str) -> Load:
        name = f"{module} {piece}"
        return Load(total=float(total[name]), largest=float(largest[name]), worst=float(columns[name].max()))

    return Demand(
        modules=tuple(
            ModuleDemand(**{piece: load(module.name, piece) for piece in PIECES + _AMOUNTS})
            for module in costs.model.modules
        ),
        samples=samples,
        rows=statistics.rows,
        global_batch_size=global_batch_size,
        costs=costs,
    )


def sample_columns(
    samples: SampleTable, costs: CostModel, *, tensor: int = 1, context: int = 1, recompute: bool = False
) -> dict[str, NDArray[np.float64]]:
    """`module piece` -> [N] per sample: forward plus backward seconds without fixed parts, and (whole) amounts.

    Args:
        samples: N samples.
        costs: of the model.
        tensor, context: degrees of every module.
        recompute: whether layers run forward again in the backward pass.
    """
    features = module_features(samples, costs.model)
    columns: dict[str, NDArray[np.float64]] = {}
    for module in costs.model.modules:
        item = features[module.name]
        is_encoder = module.name != costs.model.llm.name
        last = module.num_layers
        forward, backward = (
            costs.stage_lines(module, (0, last), backward=b, tensor=tensor, context=context, recompute=recompute)
            for b in (False, True)
        )
        for piece, index, seconds_of in (
            ("input", 0, item.input_seconds),
            ("layer", 1, item.layer_seconds),
            ("output", 2, item.output_seconds),
        ):
            seconds = seconds_of(forward[index]) + seconds_of(backward[index])
            seconds = seconds / (last if piece == "layer" else 1)
            columns[f"{module.name} {piece}"] = samples.sum_media(seconds) if is_encoder else seconds
        for name, amount in (("amount", item.tokens), ("outputs", item.outputs)):
            amount = amount * item.present
            columns[f"{module.name} {name}"] = samples.sum_media(amount) if is_encoder else amount
    return columns


def module_seconds(samples: SampleTable, costs: CostModel) -> NDArray[np.float64]:
    """[N, modules] forward plus backward seconds of whole modules on one device, per sample, without fixed parts."""
    columns = sample_columns(samples, costs)
    return np.stack(
        [
            columns[f"{module.name} input"]
            + module.num_layers * columns[f"{module.name} layer"]
            + columns[f"{module.name} output"]
            for module in costs.model.modules
        ],
        axis=1,
    )


def work_shares(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[modules] share of each in all work, of [N, modules] `module_seconds`; zeros where there is no work."""
    total = float(seconds.sum())
    return seconds.sum(axis=0) / total if total > 0 else np.zeros(seconds.shape[1])
