"""The numbers of a report: one frozen record, from which figures and page are made without computing anything.

A few random global batches are played through, all replicas of each. Tables show means over them; pictures show the
batch whose iteration time is the median one. Where a plan has more replicas than a light page can hold, the slowest are
shown, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.cost.analytic import model_flops, peak_flops_per_second
from entrain_opt.plan import Plan
from entrain_opt.planner.demand import sample_columns
from entrain_opt.planner.stability import Stability, plan_stability
from entrain_opt.planner.table import plan_sentences
from entrain_opt.report.bench import Bench, Trial, best_trial, microbatch_loads
from entrain_opt.report.tables import candidates_table, stages_table, trials_view
from entrain_opt.report.timelines import (
    bubbles_view,
    loads_view,
    memory_curve_view,
    memory_peak_view,
    timeline_view,
)
from entrain_opt.report.views import (
    BubblesView,
    LoadsView,
    MemoryCurveView,
    MemoryPeakView,
    RatioView,
    TableView,
    Tile,
    TimelineView,
)
from entrain_opt.simulator import Timeline
from entrain_opt.units import format_bytes, format_seconds
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.statistics import global_batch_statistics

BASELINE = "in_order"
#: Bars of all timelines together: above it, fewer replicas are shown.
MOST_BARS, MOST_REPLICAS = 12_000, 8
#: Batches of each size for the encoder : LLM ratio.
_RATIO_TRIALS = 59

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContent:
    """Everything a report shows.

    Attributes:
        title, subtitle, sentence: of the headline.
        tiles: numbers of the headline.
        plan_lines, stages, candidates: the plan and why it won.
        policies: names of the plan's policy and of the baseline, if they differ; keys of the pictures.
        replicas: replicas shown, slowest first; keys of the pictures.
        replicas_note: which these are.
        timelines, loads: by (policy, replica).
        bubbles: by policy.
        memory_peaks, memory_curves: of the plan's policy; curves by replica.
        ratio: None without an encoder.
        what_if, counts: other policies and schedules, and other numbers of microbatches.
        footer: where the numbers come from.
    """

    title: str
    subtitle: str
    sentence: str
    tiles: tuple[Tile, ...]
    plan_lines: tuple[str, ...]
    stages: TableView
    candidates: TableView | None
    policies: tuple[str, ...]
    replicas: tuple[int, ...]
    replicas_note: str
    timelines: dict[tuple[str, int], TimelineView]
    loads: dict[tuple[str, int], LoadsView]
    bubbles: dict[str, BubblesView]
    memory_peaks: MemoryPeakView
    memory_curves: dict[int, MemoryCurveView]
    ratio: RatioView | None
    what_if: TableView
    counts: TableView
    footer: tuple[str, ...]


def build_content(
    bench: Bench,
    samples: SampleTable,
    *,
    name: str,
    policies: Sequence[str],
    schedules: Sequence[str],
    seed: int,
    progress: Progress = lambda _: None,
) -> ReportContent:
    """Play everything through.

    Args:
        bench: of the plan.
        samples: the data set.
        name: of the recipe.
        policies, schedules: of the what-if table; those of the plan are added.
        seed: that the bench's batches were drawn with, and of the stability check.
        progress: called with a few words before each longer step.

    Raises:
        EntrainError: the plan itself cannot be played through.
    """
    plan, costs = bench.plan, bench.costs
    progress("playing the plan through")
    own = bench.trial(plan.policy, plan.schedule)
    if not own.has_run:
        bench.timeline(0, plan.policy, plan.schedule)  # Raises the reason.
    has_baseline = plan.policy != BASELINE
    baseline = bench.trial(BASELINE, plan.schedule) if has_baseline else own
    shown = [own, baseline] if has_baseline and baseline.has_run else [own]
    batch = typical_batch(bench, own)
    timelines = {
        t.policy: bench.timeline(batch, t.policy, t.schedule, t.num_microbatches, cap_bytes=t.cap_bytes) for t in shown
    }
    replicas, note = _shown_replicas(timelines, plan)
    views = {
        (policy, replica): timeline_view(timeline, bench.batches[batch], plan, replica)
        for policy, timeline in timelines.items()
        for replica in replicas
    }
    recomputed = bench.recomputed_bytes(batch, own.policy, own.num_microbatches, cap_bytes=own.cap_bytes)
    peaks = memory_peak_view(timelines[own.policy], costs, plan, recomputed, limit_bytes=bench.limit_bytes)
    idle = max(float(timeline.idle_seconds.mean(axis=0).max()) for timeline in timelines.values())
    progress("comparing policies and schedules")
    what_if, counts = _comparisons(bench, own, policies, schedules)
    progress("checking stability")
    stability = plan_stability(plan, samples, costs, seed=seed)
    return ReportContent(
        title=name,
        subtitle=_subtitle(plan, costs),
        sentence=_sentence(own, baseline if has_baseline else None, plan, bench),
        tiles=_tiles(own, baseline if has_baseline else None, bench, samples),
        plan_lines=(*plan_sentences(plan), stability.sentence()),
        stages=stages_table(plan, costs, timelines[own.policy], peaks),
        candidates=candidates_table(plan),
        policies=tuple(timelines),
        replicas=replicas,
        replicas_note=note,
        timelines=views,
        loads=_loads(bench, batch, shown, replicas),
        bubbles={p: bubbles_view(t, plan, limit_seconds=idle) for p, t in timelines.items()},
        memory_peaks=peaks,
        memory_curves={
            r: memory_curve_view(timelines[own.policy], plan, r, limit_bytes=bench.limit_bytes) for r in replicas
        },
        ratio=_ratio(plan, samples, costs, stability, seed) if costs.model.encoders else None,
        what_if=what_if,
        counts=counts,
        footer=_footer(bench, samples, seed, batch),
    )


def typical_batch(bench: Bench, own: Trial) -> int:
    """The batch with the median iteration time."""
    seconds = [
        bench.timeline(b, own.policy, own.schedule, cap_bytes=own.cap_bytes).makespan_seconds
        for b in range(len(bench.batches))
    ]
    return int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])


def _shown_replicas(timelines: dict[str, Timeline], plan: Plan) -> tuple[tuple[int, ...], str]:
    """Slowest first under the plan's policy (the first of `timelines`); as many as a light page holds."""
    own = next(iter(timelines.values()))
    ends = [run.times.makespan_seconds for run in own.runs]
    order = [int(i) for i in np.argsort(-np.array(ends), kind="stable")]
    bars = sum(len(timeline.events) for timeline in timelines.values()) / plan.degrees.data
    count = max(1, min(len(order), MOST_REPLICAS, int(MOST_BARS // max(bars, 1))))
    if len(order) == 1:
        return (0,), "The plan has one replica."
    if count == len(order):
        return tuple(order), f"All {count} replicas can be chosen; the slowest comes first."
    return tuple(order[:count]), f"The {count} slowest of {len(order)} replicas can be chosen."


def _loads(bench: Bench, batch: int, shown: list[Trial], replicas: tuple[int, ...]) -> dict[tuple[str, int], LoadsView]:
    loads = {
        trial.policy: microbatch_loads(
            bench.batches[batch],
            bench.assignment(batch, trial.policy, trial.num_microbatches, cap_bytes=trial.cap_bytes),
            bench.plan,
        )
        for trial in shown
    }
    limit = max(
        (
            float(load.max())
            for one in loads.values()
            for r in replicas
            for load in (one.encoder[r], one.llm[r])
            if len(load)
        ),
        default=0.0,
    )
    return {
        (policy, replica): loads_view(one, replica, limit_seconds=limit)
        for policy, one in loads.items()
        for replica in replicas
    }


def _comparisons(
    bench: Bench, own: Trial, policies: Sequence[str], schedules: Sequence[str]
) -> tuple[TableView, TableView]:
    plan = bench.plan
    names = list(dict.fromkeys((plan.policy, *policies)))
    orders = list(dict.fromkeys((plan.schedule, *schedules)))
    trials = [own if (p, s) == (own.policy, own.schedule) else bench.trial(p, s) for p in names for s in orders]
    what_if = trials_view(
        trials, caption="Other policies and schedules, same stages", reference=0, best=best_trial(trials)
    )
    by_count: list[Trial] = []
    for count in sorted({max(1, int(plan.num_microbatches * factor)) for factor in (0.5, 0.75, 1, 1.5, 2, 3)}):
        trial = own if count == plan.num_microbatches else bench.trial(plan.policy, plan.schedule, count)
        # Policies use no more microbatches than pay; the same again would say nothing.
        same = bool(by_count) and trial.step_seconds == by_count[-1].step_seconds
        if same and trial is own:
            by_count[-1] = own
        elif not same:
            by_count.append(trial)
    counts = trials_view(
        by_count,
        caption="Other numbers of microbatches per replica, same stages, policy and schedule",
        reference=by_count.index(own),
        best=best_trial(by_count),
    )
    return what_if, counts


def _subtitle(plan: Plan, costs: CostModel) -> str:
    cluster = costs.cluster
    is_cpu = cluster.device_spec.name == "cpu"
    devices = f"{cluster.num_devices} CPU processes" if is_cpu else f"{cluster.num_devices} x {cluster.device}"
    if cluster.num_nodes > 1:
        devices += f" ({cluster.num_nodes} nodes of {cluster.devices_per_node})"
    frozen = f", frozen: {', '.join(plan.frozen)}" if plan.frozen else ""
    return f"{plan.model} on {devices}, global batch of {plan.global_batch_size:,} samples{frozen}"


def _sentence(own: Trial, baseline: Trial | None, plan: Plan, bench: Bench) -> str:
    degrees = plan.degrees
    copies = "One copy of the model" if degrees.data == 1 else f"{degrees.data} copies of the model"
    if degrees.pipeline > 1:
        ranks_of = {m: {s.rank for s in plan.stages if s.module == m} for m in (*plan.encoder_modules, "llm")}
        listed = [f"{'the LLM' if name == 'llm' else name} on {len(ranks)}" for name, ranks in ranks_of.items()]
        shared = sum(map(len, ranks_of.values())) - degrees.pipeline
        listed += [f"sharing {shared}"] if shared else []
        cut = f"{degrees.pipeline} devices"
        if degrees.replica_size > degrees.pipeline:
            cut = f"{degrees.pipeline} ranks of {degrees.replica_size} devices in all"
        copies += f"{'' if degrees.data == 1 else ', each'} cut over {cut} ({', '.join(listed)}),"
    text = (
        f"{copies} should take {format_seconds(own.step_seconds)} per step; devices wait {own.bubble_share:.0%} of the "
        "pipeline's time."
    )
    if baseline is not None and baseline.has_run:
        ratio = baseline.step_seconds / own.step_seconds
        also = " and more memory than a device has" if baseline.failure else ""
        text += (
            f" With samples taken in order, the same plan would need {format_seconds(baseline.step_seconds)}{also}, "
            f"{ratio:.2f} times as long, and wait {baseline.bubble_share:.0%}."
        )
    if own.failure:
        text += f" It does not fit: {own.failure}."
    elif own.capped:
        text += (
            " These batches need more memory than the plan allowed for; the numbers are those with limits on what is "
            "in flight."
        )
    return text


def _tiles(own: Trial, baseline: Trial | None, bench: Bench, samples: SampleTable) -> tuple[Tile, ...]:
    costs, plan = bench.costs, bench.plan
    tiles = [
        Tile(name="step", value=format_seconds(own.step_seconds), note=f"{own.times_bound:.2f} x the lower bound"),
        Tile(name="waiting", value=f"{own.bubble_share:.0%}", note="idle share of the pipeline"),
        Tile(name="tokens/s", value=f"{own.tokens_per_second:,.0f}", note=f"{own.samples_per_second:,.4g} samples/s"),
    ]
    if baseline is not None and baseline.has_run:
        tiles.append(
            Tile(
                name="against samples in order",
                value=f"{baseline.step_seconds / own.step_seconds:.2f} x",
                note=f"{format_seconds(baseline.step_seconds)} there",
            )
        )
    device = costs.cluster.device_spec
    if device.name != "cpu":
        # The catalogue's CPU rate is nominal, so a share of it would say nothing.
        drawn = samples.take(bench.rows.reshape(-1))
        peak = peak_flops_per_second(device, costs.precision) * costs.cluster.num_devices
        share = model_flops(costs.model, drawn) / len(bench.rows) / (own.step_seconds * peak)
        tiles.append(Tile(name="model FLOPs used", value=f"{share:.0%}", note=f"of {device.name}'s peak"))
    used = own.peak_bytes / bench.limit_bytes
    tiles.append(
        Tile(
            name="peak memory",
            value=format_bytes(own.peak_bytes),
            note=f"{used:.0%} of {format_bytes(bench.limit_bytes)} usable"
            + (f", {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""),
        )
    )
    return tuple(tiles)


def _ratio(plan: Plan, samples: SampleTable, costs: CostModel, stability: Stability, seed: int) -> RatioView:
    columns = sample_columns(samples, costs)

    def work(module_name: str) -> np.ndarray:
        pieces = [columns[f"{module_name} {piece}"] for piece in ("input", "layer", "output")]
        return pieces[0] + costs.model.module(module_name).num_layers * pieces[1] + pieces[2]

    encoder = np.sum([work(module.name) for module in costs.model.encoders], axis=0)
    llm = work(costs.model.llm.name)
    largest = max(4096, 2 * plan.global_batch_size)
    sizes, quantiles = [], []
    size = 1
    while size <= largest:
        sums = global_batch_statistics({"encoder": encoder, "llm": llm}, size, _RATIO_TRIALS, seed=seed).sums
        sizes.append(size)
        quantiles.append(np.percentile(sums[:, 0] / np.maximum(sums[:, 1], 1e-300), [0, 5, 50, 95, 100]))
        size *= 2
    lowest, low, median, high, highest = (tuple(float(q[i]) for q in quantiles) for i in range(5))
    overall = float(encoder.sum() / max(float(llm.sum()), 1e-300))
    own = min(range(len(sizes)), key=lambda i: abs(sizes[i] - plan.global_batch_size))
    return RatioView(
        sizes=tuple(sizes),
        lowest=lowest,
        low=low,
        median=median,
        high=high,
        highest=highest,
        all_data=overall,
        global_batch_size=plan.global_batch_size,
        trials=_RATIO_TRIALS,
        sentence=stability.sentence(),
        summary=(
            f"Encoder over LLM work is {overall:.2f} in the whole data. In batches of {sizes[own]} nine of ten have "
            f"{low[own]:.2f} to {high[own]:.2f}; single samples have {low[0]:.2f} to {high[0]:.2f}."
        ),
    )


def _footer(bench: Bench, samples: SampleTable, seed: int, batch: int) -> tuple[str, ...]:
    from entrain_opt import __version__

    plan, costs = bench.plan, bench.costs
    return (
        f"Simulated with {costs.source} costs, precision {costs.precision.name}; {len(bench.batches)} random global "
        f"batches of {bench.rows.shape[1]:,} from {len(samples):,} samples, seed {seed}; pictures show batch {batch}.",
        "x bound: pipeline time over what no schedule of the same assignment can beat. max / mean: largest load of a "
        "microbatch over the mean of all. The simulation knows nothing of kernels that slow each other down, of "
        "stragglers or of loading.",
        f"entrain_opt {__version__}, plan by {plan.provenance.method}, inputs "
        f"{plan.provenance.input_hash or 'unknown'}.",
    )
