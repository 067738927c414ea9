"""A plan as a table that is understood at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from entrain_opt.plan import Plan, Provenance
from entrain_opt.plan.shares import SHARDED
from entrain_opt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group

_BAR = 12


def plan_table(plan: Plan, *, limit_bytes: int | None = None) -> Group:
    """One line per pipeline rank, then the plan in a few sentences.

    Args:
        plan: with a prediction, if it was solved rather than written by hand.
        limit_bytes: memory of one rank, to show beside what is used.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    degrees, predicted = plan.degrees, plan.predicted
    table = Table(title=f"{plan.model}: {_degrees(plan)}", title_justify="left")
    for column in ("rank", "module", "layers", "predicted busy", "memory", "made up of"):
        table.add_column(column, justify="right" if column in ("rank", "layers") else "left")
    busy = _chosen(plan).get("busy_share", [])
    for rank in range(degrees.pipeline):
        held = [stage for stage in plan.stages if stage.rank == rank]
        cells = [
            listed_ranks(plan, rank),
            "\n".join(stage.module for stage in held),
            "\n".join(f"{stage.layers[0]} to {stage.layers[1] - 1}" for stage in held),
            f"{_bar(busy[rank])} {busy[rank]:.0%}" if rank < len(busy) else "",
        ]
        if predicted is None:
            cells += ["", ""]
        else:
            used = predicted.peak_bytes[rank]
            limit = f" of {format_bytes(limit_bytes)}" if limit_bytes else ""
            parts = predicted.peak_bytes_parts[rank] if predicted.peak_bytes_parts else {}
            largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
            cells += [
                f"{format_bytes(used)}{limit}",
                ", ".join(f"{name} {format_bytes(size)}" for name, size in largest),
            ]
        table.add_row(*cells)
    return Group(table, *(Text(line) for line in plan_sentences(plan)))


def plan_sentences(plan: Plan) -> list[str]:
    """What the plan promises, how sure the solver is, and what came second."""
    per_replica, many = plan.global_batch_size / plan.degrees.data, "es" if plan.num_microbatches > 1 else ""
    lines = [
        f"global batch of {plan.global_batch_size} samples, {per_replica:.4g} per replica in up to "
        f"{plan.num_microbatches} microbatch{many}; schedule {plan.schedule}, policy {plan.policy}"
        + (f"; frozen: {', '.join(plan.frozen)}" if plan.frozen else "")
    ]
    predicted, provenance = plan.predicted, plan.provenance
    if predicted is not None:
        utilization = predicted.model_flops_utilization
        lines.append(
            f"predicted {format_seconds(predicted.iteration_seconds)} per step ({provenance.cost_source} costs), "
            f"{predicted.samples_per_second:,.4g} samples/s, {predicted.tokens_per_second:,.4g} tokens/s, "
            f"bubble {predicted.bubble_share:.1%}" + (f", MFU {utilization:.1%}" if utilization is not None else "")
        )
    if (context := _per_module(plan, degrees_of="context")) is not None:
        lines.append(f"samples divided over devices: context {context}; planned only, training does not execute this")
    caps = [
        f"{value:,} {what} in flight"
        for what, value in (("patches", plan.patches_in_flight), ("tokens", plan.tokens_in_flight))
        if value is not None
    ]
    if caps:
        lines.append(f"memory allows at most {' and '.join(caps)} per stage")
    if provenance.objective_seconds is not None and provenance.bound_seconds is not None:
        lines.append(f"{provenance.method}: {_proof(provenance)}")
    runner_up = next((c for c in provenance.candidates if c.get("outcome") != "chosen"), None)
    if runner_up is not None:
        lines.append(
            f"runner-up: data {runner_up['data']} x pipeline {runner_up['pipeline']}{candidate_words(runner_up)}, "
            f"{runner_up['num_microbatches']} microbatches, {runner_up['stages']}: {runner_up['outcome']}"
        )
    return lines


def _degrees(plan: Plan) -> str:
    degrees = plan.degrees
    replicas = f"{degrees.data} replica{'s' if degrees.data > 1 else ''}"
    if plan.shards_state:
        replicas += " that share the optimizer's state"
    if degrees.pipeline == 1 and len({stage.module for stage in plan.stages}) > 1:
        chain = "1 pipeline rank (encoder and language model together)"
    else:
        chain = f"{degrees.pipeline} pipeline rank{'s' * (degrees.pipeline > 1)}"
    tensor = ""
    if (widths := _per_module(plan)) is not None:
        tensor = f" of {widths} devices ({degrees.replica_size} per replica)"
    recompute = sorted({stage.module for stage in plan.stages if stage.recompute})
    return f"{degrees.world_size} ranks = {replicas} x {chain}{tensor}" + (
        f", recompute in {' and '.join(recompute)}" if recompute else ""
    )


def _per_module(plan: Plan, degrees_of: str = "devices") -> str | None:
    """`2 vision + 1 llm`: devices of a pipeline rank, or their `context` degree; None where all are 1."""
    counts = plan.degrees.context_degrees if degrees_of == "context" else plan.degrees.widths
    if set(counts) == {1}:
        return None
    of_module = {stage.module: counts[stage.rank] for stage in plan.stages}
    return " + ".join(f"{count} {name}" for name, count in of_module.items())


def _proof(provenance: Provenance) -> str:
    """How sure the solver is."""
    assert provenance.objective_seconds is not None
    assert provenance.bound_seconds is not None
    gap = provenance.gap or 0.0
    if provenance.method == "proportional":
        status = "the paper's rule, which proves nothing"
    elif provenance.solver_status == "optimal":
        status = "optimal"
    else:
        status = f"not proven optimal, gap {gap:.1%}"
    left_out = f"; {provenance.num_dropped:,} choices left out, which do not fit or cannot be faster"
    dropped = left_out if provenance.num_dropped else ""
    return (
        f"{status}, closed form {format_seconds(provenance.objective_seconds)}, bound "
        f"{format_seconds(provenance.bound_seconds)}{dropped}"
    )


def candidate_words(candidate: Mapping[str, Any]) -> str:
    """Tensor and context degrees, recompute and sharding of a candidate of a plan file, where it has any."""
    degrees = "".join(f", {name} on {count}" for name, count in candidate.get("tensor", {}).items())
    degrees += "".join(f", {name} in {c} parts" for name, c in candidate.get("context", {}).items() if c > 1)
    recompute = candidate.get("recompute")
    sharded = ", optimizer state sharded" if candidate.get("data_parallel") == SHARDED else ""
    return degrees + (f", recompute in {' and '.join(recompute)}" if recompute else "") + sharded


def _chosen(plan: Plan) -> dict[str, Any]:
    return next((c for c in plan.provenance.candidates if c.get("outcome") == "chosen"), {})


def listed_ranks(plan: Plan, rank: int) -> str:
    """Global ranks that hold this pipeline rank."""
    ranks = plan.degrees.global_ranks(rank)
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * _BAR)
    return "█" * filled + "░" * (_BAR - filled)
