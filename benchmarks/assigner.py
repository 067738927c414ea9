"""How fast, how even: all policies on real multimodal data, under the same memory.

    python benchmarks/assigner.py                                # the repository's trace, and synthetic samples
    python benchmarks/assigner.py --traces DIR --plot docs/assigner.png

For each trace (and mixtures, where their parts are there), language-model size and draw of 128 samples, one replica of
8 ranks that have equal work: the iteration time of each policy's assignment under `--schedule`, over what 1F1B would
take if all work were even in 32 microbatches of 4 samples. Below 1 is possible: more microbatches, small ones first and
last; the busiest rank's work alone is a bound. Two of the peers are shown under 1F1B as well, which is what they run.
`assigner_data.py` says how samples are sized and how much memory a stage has; the gradients that a split backward keeps
count, too.

Policies that search, and `dynapipe`, choose the number of microbatches; the others are asked for 32. For the spread of
microbatches all are asked for 32; `pairwise` and the searches may use fewer, which are larger. Milliseconds are
processor time of one thread, so run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from assigner_data import (
    MODELS,
    SAMPLES_PER_MICROBATCH,
    EvenPipeline,
    Source,
    make_sources,
    read_model,
    read_tables,
    synthetic_table,
)

from entrain_opt import PipelineShape
from entrain_opt.assigner import POLICIES, Placement, assign_microbatches, sample_work, split_replicas
from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.exact import work_seconds
from entrain_opt.assigner.settings import EFFORTS
from entrain_opt.assigner.statistics import AssignmentStatistics, assignment_statistics
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.errors import AssignmentError
from entrain_opt.schedule import FIXED_ORDERS
from entrain_opt.simulator.bounds import balanced_1f1b_seconds, work_bound

TRACES = Path(__file__).parents[1] / "recipes" / "data" / "traces"
BASELINE = "in_order"
#: Shown under 1F1B, too.
UNDER_1F1B = ("in_order", "karmarkar_karp")
#: Beyond those that search: its answer includes the number of microbatches.
CHOOSES_COUNT = ("dynapipe",)
#: Where samples in order deviate by less than this part of the mean, nothing is there to level.
EVEN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A policy, and for one that searches, how long.

    Attributes:
        policy, effort, schedule: by name.
        chooses_count: whether the number of microbatches is open.
    """

    policy: str
    effort: str
    chooses_count: bool
    schedule: str
    name: str

    def assign(self, costs: BatchCosts, shape: PipelineShape, num_microbatches: int | None) -> Assignment:
        return assign_microbatches(
            costs,
            shape,
            num_microbatches=num_microbatches,
            policy=self.policy,
            schedule=self.schedule,
            effort=self.effort,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of one draw. Ratios are NaN where they do not exist.

    Attributes:
        over_balanced: iteration time over the evenly loaded 1F1B; infinite if there is no assignment or it cannot run.
        busiest_over_balanced: the busiest rank's work over the same.
        over_bound: iteration time over what no schedule of this assignment can beat.
        encoder_std, llm_std: deviation over 32 microbatches, as a part of that of samples in order.
        milliseconds: processor time of the call.
    """

    source: str
    model: str
    trained: bool
    contender: str
    over_balanced: float
    busiest_over_balanced: float
    over_bound: float
    encoder_std: float
    llm_std: float
    milliseconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", type=Path, help="folder of Parquet traces; default: the repository's, and synthetic"
    )
    parser.add_argument("--only", nargs="*", help="names of traces and mixtures; default: all")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="language-model sizes")
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--efforts", nargs="*", choices=list(EFFORTS), default=["fast", "default"])
    parser.add_argument("--schedule", choices=FIXED_ORDERS, default="eager")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--split-share", type=float, default=0.0, help="of a backward, what splitting it adds")
    parser.add_argument("--plot", type=Path, help="write a picture of the iteration times here (needs chromium)")
    arguments = parser.parse_args()
    tables = read_tables(arguments.traces or TRACES)
    if arguments.traces is None:
        tables["synthetic"] = synthetic_table()
    sources = [source for source in make_sources(tables) if not arguments.only or source.name in arguments.only]
    contenders = make_contenders({BASELINE, *arguments.policies}, arguments.efforts, arguments.schedule)
    warm_up(sources[0], contenders)
    results: list[Result] = []
    for source in sources:
        started = time.perf_counter()
        for model in arguments.models:
            for trained in (True, False):
                results += measure(source, model, contenders, arguments, trained=trained)
        print(f"{source.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    for trained in (True, False):
        print_table([result for result in results if result.trained == trained], trained=trained)
    if "joint" in arguments.policies:
        print_spread_table(results)
    print_split_table(sources[-1])
    if arguments.plot:
        from assigner_plot import plot_results

        plot_results(results, arguments.plot)


def make_contenders(policies: Container[str], efforts: Iterable[str], schedule: str) -> list[Contender]:
    def contender(policy: str, effort: str, schedule: str, *notes: str) -> Contender:
        chooses_count = POLICIES[policy].search is not None or policy in CHOOSES_COUNT
        name = ", ".join((policy, *notes))
        return Contender(policy=policy, effort=effort, chooses_count=chooses_count, schedule=schedule, name=name)

    found: list[Contender] = []
    for name in [name for name in POLICIES if name in policies]:
        found += [
            contender(name, effort, schedule, *([effort] if effort != "default" else []))
            for effort in (efforts if POLICIES[name].search else ("default",))
        ]
        if name in UNDER_1F1B and schedule != "1f1b":
            found.append(contender(name, "default", "1f1b", "1f1b"))
    return found


def warm_up(source: Source, contenders: list[Contender]) -> None:
    """Load or compile what is compiled, so that the first measurement does not pay for it."""
    model = read_model("3B")
    (costs,) = source.draw(model, 16, 1, seed=0)
    pipeline = EvenPipeline.of(source, model, 2, trained=True)
    shape = pipeline.with_memory(costs)
    for contender in contenders:
        contender.assign(pipeline.with_stages(costs), shape, 4)


def measure(
    source: Source, model_size: str, contenders: list[Contender], arguments: argparse.Namespace, *, trained: bool
) -> list[Result]:
    """All contenders on the same draws."""
    model = read_model(model_size)
    pipeline = EvenPipeline.of(source, model, arguments.ranks, trained=trained)
    count = arguments.samples // SAMPLES_PER_MICROBATCH
    baseline = next(contender for contender in contenders if contender.policy == BASELINE)
    results = []
    for drawn in source.draw(model, arguments.samples, arguments.draws, seed=arguments.seed):
        costs, limited = pipeline.with_stages(drawn, arguments.split_share), pipeline.with_memory(drawn)
        work = sample_work(costs, limited)
        evaluators = {contender.schedule: Evaluator(work, contender.schedule) for contender in contenders}
        balanced = balanced_1f1b_seconds(costs, limited, num_microbatches=count)
        busiest = work_seconds(work)
        in_order = assignment_statistics(costs, baseline.assign(costs, limited, count), limited)
        for contender in contenders:
            started = time.process_time()
            try:
                assignment = contender.assign(costs, limited, None if contender.chooses_count else count)
                milliseconds = 1e3 * (time.process_time() - started)
                fixed = contender.assign(costs, limited, count) if contender.chooses_count else assignment
            except AssignmentError as error:
                print(f"{source.name}, {model_size}, {contender.name}: {error}", file=sys.stderr)
                seconds, bound, milliseconds, spread = np.inf, 1.0, np.nan, (np.nan, np.nan)
            else:
                seconds = evaluators[contender.schedule].seconds(placement_of(assignment))
                bound = work_bound(costs, assignment, limited)
                spread = ratios(assignment_statistics(costs, fixed, limited), in_order)
            results.append(
                Result(
                    source=source.name,
                    model=model_size,
                    trained=trained,
                    contender=contender.name,
                    over_balanced=seconds / balanced,
                    busiest_over_balanced=busiest / balanced,
                    over_bound=seconds / bound,
                    encoder_std=spread[0],
                    llm_std=spread[1],
                    milliseconds=milliseconds,
                )
            )
    return results


def placement_of(assignment: Assignment) -> Placement:
    """The only replica's."""
    return Placement(
        encoder_microbatch=assignment.encoder_microbatch,
        llm_microbatch=assignment.llm_microbatch,
        num_microbatches=int(assignment.num_microbatches[0]),
    )


def ratios(found: AssignmentStatistics, in_order: AssignmentStatistics) -> tuple[float, float]:
    """Deviations over those of samples in order; NaN where these are even already."""
    encoder, llm = (
        mine.std_seconds / theirs.std_seconds if theirs.coefficient_of_variation > EVEN else float("nan")
        for mine, theirs in ((found.encoder, in_order.encoder), (found.llm, in_order.llm))
    )
    return encoder, llm


def geometric_mean(values: Iterable[float]) -> float:
    """Of those that exist; NaN without any."""
    numbers = np.array([value for value in values if not np.isnan(value)])
    return float(np.exp(np.log(np.maximum(numbers, 1e-6)).mean())) if len(numbers) else float("nan")


def print_table(results: list[Result], *, trained: bool) -> None:
    """One column per policy; rows are geometric means over the draws of a trace, then over everything."""
    names = list(dict.fromkeys(result.contender for result in results))
    sources, models = ({getattr(r, field): None for r in results} for field in ("source", "model"))
    print(f"\n{'Trained' if trained else 'Frozen'} encoder: iteration time over the evenly loaded 1F1B\n")
    print(f"| data | {' | '.join(names)} |\n|---|" + "---|" * len(names))

    def row(title: str, field: str = "over_balanced", **only: str) -> None:
        cells = []
        for name in names:
            mine = [r for r in results if r.contender == name and all(getattr(r, k) == v for k, v in only.items())]
            cells.append(f"{geometric_mean(getattr(r, field) for r in mine):.3f}")
        print(f"| {title} | {' | '.join(cells)} |")

    for source in sources:
        row(source, source=source)
    for model in models:
        row(f"**geometric mean, {model}**", model=model)
    row("**geometric mean**")
    row("busiest rank's work alone", "busiest_over_balanced")
    row("over the work bound", "over_bound")
    row("encoder deviation over in_order's", "encoder_std")
    row("LLM deviation over in_order's", "llm_std")
    medians = [np.nanmedian([r.milliseconds for r in results if r.contender == name]) for name in names]
    print(f"| ms per call, median | {' | '.join(f'{median:.1f}' for median in medians)} |")


def print_spread_table(results: list[Result]) -> None:
    """How much lower the deviations of `joint` are than those of samples in order, which the paper measures."""
    print("\n| data | encoder deviation, times lower | LLM deviation, times lower |\n|---|---|---|")
    for source in dict.fromkeys(result.source for result in results):
        mine = [result for result in results if result.source == source and result.contender == "joint"]
        cells = [1 / geometric_mean(getattr(result, field) for result in mine) for field in ("encoder_std", "llm_std")]
        print(f"| {source} | {' | '.join('already even' if np.isnan(cell) else f'{cell:.1f}' for cell in cells)} |")


def print_split_table(source: Source, num_samples: int = 4096, num_replicas: int = 32) -> None:
    """What the split over replicas costs; the fastest of three calls."""
    (costs,) = source.draw(read_model("3B"), num_samples, 1, seed=0)
    work, cells = sample_work(costs, PipelineShape(encoder_stages=3, llm_stages=5)), []
    for policy in POLICIES:
        times = []
        for _ in range(3):
            started = time.process_time()
            split_replicas(work, num_replicas=num_replicas, policy=policy)
            times.append(1e3 * (time.process_time() - started))
        cells.append(f"{min(times):.1f}")
    print(f"\n| {' | '.join(['', *POLICIES])} |\n|---|" + "---|" * len(POLICIES))
    print(f"| {num_samples:,} samples over {num_replicas} replicas, ms | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
