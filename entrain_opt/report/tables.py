"""Tables of the report: the plan, its runners-up, and what else could be run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from entrain_opt.cost import CostModel
from entrain_opt.plan import Plan
from entrain_opt.planner.table import candidate_words, listed_ranks
from entrain_opt.report.bench import Trial
from entrain_opt.report.views import MemoryPeakView, TableView
from entrain_opt.simulator import Timeline
from entrain_opt.units import format_bytes, format_seconds

#: The time in an outcome, which has a column of its own.
_REPLAYED = re.compile(r" \([^()]* replayed\)$")


def stages_table(plan: Plan, costs: CostModel, timeline: Timeline, peaks: MemoryPeakView) -> TableView:
    """One line per pipeline rank."""
    busy = timeline.busy_seconds.mean(axis=0)
    totals = [sum(values) for values in zip(*(values for _, values in peaks.parts), strict=True)]
    rows = []
    for rank in range(plan.degrees.pipeline):
        held = [stage for stage in plan.stages if stage.rank == rank]
        trained = [costs.model.module(stage.module).anything_trained for stage in held]
        rows.append(
            (
                str(rank),
                listed_ranks(plan, rank),
                ", ".join(stage.module for stage in held),
                ", ".join(f"{stage.layers[0]} to {stage.layers[1] - 1}" for stage in held),
                "yes" if all(trained) else "in part" if any(trained) else "frozen",
                format_seconds(float(busy[rank])),
                f"{busy[rank] / max(timeline.makespan_seconds, 1e-12):.0%}",
                f"{format_bytes(totals[rank])} of {format_bytes(peaks.limit_bytes)}",
            )
        )
    columns = ("pipeline rank", "global ranks", "module", "layers", "trained", "computes", "busy", "peak memory")
    return TableView(
        caption="What each pipeline rank holds, and what it does in the iteration shown",
        columns=columns,
        rows=tuple(rows),
        text_columns=(1, 2, 3, 4),
    )


def candidates_table(plan: Plan) -> TableView | None:
    """The runners-up of the solver; None for a plan without them."""
    candidates = plan.provenance.candidates
    if not candidates:
        return None
    rows, marked, faint = [], None, []
    for index, candidate in enumerate(sorted(candidates, key=_rank_of_candidate)):
        seconds = candidate.get("predicted_seconds")
        outcome = str(candidate.get("outcome", ""))
        if outcome == "chosen":
            marked = index
        if seconds is None:
            faint.append(index)
        rows.append(
            (
                f"{candidate['data']} x {candidate['pipeline']}{candidate_words(candidate)}",
                str(candidate["num_microbatches"]),
                _short_stages(str(candidate["stages"])),
                format_seconds(float(candidate["closed_form_seconds"])),
                "-" if seconds is None else format_seconds(float(seconds)),
                _REPLAYED.sub("", outcome),
            )
        )
    return TableView(
        caption="The configurations that were played through; layers in brackets share a rank",
        columns=("replicas x pipeline", "microbatches", "layers per rank", "closed form", "replayed", "outcome"),
        rows=tuple(rows),
        text_columns=(0, 2, 5),
        marked=marked,
        faint=tuple(faint),
    )


def _rank_of_candidate(candidate: Mapping[str, Any]) -> tuple[bool, float]:
    """The chosen one first: others may have been faster on fewer batches."""
    seconds = candidate.get("predicted_seconds")
    return candidate.get("outcome") != "chosen", math.inf if seconds is None else float(seconds)


def _short_stages(stages: str) -> str:
    """`vision 8+8+8+8, llm 7+7+7+7` from `vision[0:8]@0 ...`; layers that share a rank stand in brackets."""
    counts: dict[str, list[tuple[int, str]]] = {}
    for item in stages.split():
        module, _, rest = item.partition("[")
        layers, _, rank = rest.partition("]@")
        first, _, end = layers.partition(":")
        counts.setdefault(module, []).append((int(end) - int(first), rank))
    used = [rank for pieces in counts.values() for _, rank in pieces]
    said = []
    for module, pieces in counts.items():
        shown = [f"({count})" if used.count(rank) > 1 else str(count) for count, rank in pieces]
        listed = "+".join(shown) if len(shown) <= 8 else f"{'+'.join(shown[:3])}+...+{shown[-1]} ({len(shown)} ranks)"
        said.append(f"{module} {listed}")
    return ", ".join(said)


def trials_view(trials: list[Trial], *, caption: str, reference: int, best: int | None) -> TableView:
    """One line per trial, with what each loses against the reference."""
    rows, faint = [], []
    base = trials[reference].step_seconds
    for index, trial in enumerate(trials):
        if not trial.has_run:
            faint.append(index)
            cells = (trial.policy, trial.schedule, str(trial.num_microbatches), "-", "-", "-", "-", "-", "-", "-", "-")
            rows.append((*cells, f"cannot run: {trial.failure}"))
            continue
        change = trial.step_seconds / base - 1
        notes = [
            "this plan" if index == reference else "",
            "fastest that fits" if index == best else "",
            trial.failure,
            "with memory caps" if trial.capped and not trial.failure else "",
        ]
        if trial.failure:
            faint.append(index)
        rows.append(
            (
                trial.policy,
                trial.schedule,
                str(trial.num_microbatches),
                format_seconds(trial.step_seconds),
                "" if index == reference else f"{change:+.1%}",
                f"{trial.bubble_share:.1%}",
                f"{trial.times_bound:.3f}",
                f"{trial.encoder_imbalance:.2f}",
                f"{trial.llm_imbalance:.2f}",
                f"{trial.deferred_samples:,.0f}",
                format_bytes(trial.peak_bytes),
                "; ".join(note for note in notes if note),
            )
        )
    columns = ("policy", "schedule", "microbatches", "step", "against plan", "bubble", "x bound", "encoder max / mean")
    return TableView(
        caption=caption,
        columns=(*columns, "LLM max / mean", "deferred", "peak memory", "note"),
        rows=tuple(rows),
        text_columns=(0, 1, 11),
        marked=reference,
        faint=tuple(faint),
    )
