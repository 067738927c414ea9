"""`solve_plan`: from model, data and cluster to one plan, with its proof and its runners-up.

1. Demand of random global batches (`demand.py`), and the integer problem of the choices that may win (`shortlist.py`).
2. A solver's optimum of the closed form (`cp_sat.py`, `ilp.py`, `search.py`), or the paper's rule (`proportional.py`).
3. The best few candidates and their neighbours, replayed by the real assigner and simulator (`candidates.py`); the
   fastest is returned. The paper's rule is not improved, only replayed.
4. Unless the schedule is given, plans are compared with split backwards (`eager_split`), at the price of splitting; the
   answer keeps them if it is slower without.

Promise: identical inputs give identical plans; the plan fits in memory as far as the cost model knows.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from entrain_opt.cost import CostModel
from entrain_opt.cost.analytic import model_flops, peak_flops_per_second
from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees, Plan, Prediction, Provenance, StagePlan
from entrain_opt.plan.shares import DATA_PARALLELS
from entrain_opt.planner.candidates import Candidates
from entrain_opt.planner.cp_sat import solve_cp_sat
from entrain_opt.planner.demand import Demand, estimate_demand
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.infeasible import explain_infeasible
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.options import AUTO, SEARCH, PlanOptions
from entrain_opt.planner.outcomes import describe_outcomes
from entrain_opt.planner.proportional import solve_proportional
from entrain_opt.planner.replay import Replay, Replayer
from entrain_opt.planner.search import Ranked, solve_by_search
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.planner.solution import Solution
from entrain_opt.planner.stability import plan_stability
from entrain_opt.spec.cluster import ClusterSpec
from entrain_opt.spec.model import TOWER_PARTS, ModelSpec
from entrain_opt.workload.samples import SampleTable

#: Grows when the same inputs would give another plan.
PLANNER_VERSION = 6


def solve_plan(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    *,
    global_batch_size: int,
    options: PlanOptions | None = None,
    costs: CostModel | None = None,
    method: str | None = None,
) -> Plan:
    """The best static configuration for a model, a data set and a cluster.

    Args:
        model: with its frozen parts.
        samples: the data set, or a fair sample of it.
        cluster: whose devices are all used.
        global_batch_size: samples per optimizer step.
        options: None takes the analytic cost model and the cluster's device.
        costs: None takes the analytic cost model of the cluster.
        method: overrides that of the options.

    Returns:
        A checked plan with prediction and provenance.

    Raises:
        PlanError: a bad option, or nothing fits; the message names the binding limit.
        WorkloadError: no samples, or a global batch below 1.
        SolverError: the solver is missing, or stopped without an answer.
    """
    if options is None:
        options = PlanOptions(cost_model="analytic", device=cluster.device, memory_bytes=cluster.memory_bytes)
    if method is not None:
        options = replace(options, method=method)
    options.check()
    if costs is None:
        costs = CostModel(model, cluster, precision=options.precision)
    demand = estimate_demand(samples, costs, global_batch_size, seed=options.seed)
    instance, solution, ranking = solve_instance(costs, demand, options)
    draft = Plan(
        model=model.name,
        degrees=ParallelDegrees(),
        stages=(StagePlan(module="llm", layers=(0, model.llm.num_layers), rank=0),),
        global_batch_size=global_batch_size,
        num_microbatches=1,
        schedule="eager_split" if options.schedule == AUTO else options.schedule,
        policy=options.policy,
        frozen=frozen_parts(model),
    )
    candidates = Candidates(instance, Replayer(costs, demand, options), draft)
    solved = Ranked(choice=solution.choice, ends=solution.ends, ticks=solution.ticks)
    if options.method == "proportional":
        outcomes = [candidates.only(solved)]
    else:
        outcomes = candidates.search(solved, ranking, _baseline(instance, costs, demand, options))
    if outcomes[0].replay is None:
        raise PlanError(f"plan: no candidate can be run. {outcomes[0].failure}")
    if options.schedule == AUTO:
        outcomes = candidates.with_whole_backwards(outcomes)
    best = outcomes[0]
    assert best.replay is not None
    plan = replace(
        best.replay.plan,
        predicted=_prediction(best.replay, costs, demand),
        provenance=Provenance(
            method=options.method,
            cost_source=costs.source,
            solver_status=solution.status,
            objective_seconds=solution.ticks * instance.tick_seconds,
            bound_seconds=solution.bound_ticks * instance.tick_seconds,
            gap=solution.gap,
            seed=options.seed,
            input_hash=input_hash(costs, samples, global_batch_size, options),
            num_dropped=instance.num_dropped,
            candidates=describe_outcomes(outcomes, ranking, instance),
        ),
    )
    certificate = plan_stability(plan, samples, costs, seed=options.seed).as_plain()
    plan = replace(plan, provenance=replace(plan.provenance, stability=certificate))
    plan.check(num_layers={module.name: module.num_layers for module in model.modules})
    return plan


def solve_instance(costs: CostModel, demand: Demand, options: PlanOptions) -> tuple[Instance, Solution, list[Ranked]]:
    """The problem, its optimum, and all choices ranked (not for the paper's rule).

    Where 1F1B's microbatches in flight fit nowhere, one in flight is asked for.

    Raises:
        PlanError: nothing fits; the message names the binding limit.
    """
    for one_in_flight in (False, True):
        everything = options.method == "proportional"
        instance, ranking = build_shortlist(costs, demand, options, one_in_flight=one_in_flight, everything=everything)
        solution = _solve(instance, demand, options, ranking)
        if solution is not None:
            return instance, solution, ranking
    raise explain_infeasible(instance, costs, demand, options)


def _solve(instance: Instance, demand: Demand, options: PlanOptions, ranking: list[Ranked]) -> Solution | None:
    if options.method == "proportional":
        return solve_proportional(instance, demand)
    if not ranking:
        return None
    if options.method == "search":
        return solve_by_search(instance, ranking)
    limit, seed = options.time_limit_seconds, options.seed
    if options.method == "cp-sat":
        workers = options.solver_workers
        return solve_cp_sat(instance, incumbent=ranking[0], time_limit_seconds=limit, seed=seed, workers=workers)
    solver = options.method.removeprefix("ilp").removeprefix("-") or "any"
    return solve_ilp(instance, incumbent=ranking[0], time_limit_seconds=limit, seed=seed, solver=solver)


def _baseline(instance: Instance, costs: CostModel, demand: Demand, options: PlanOptions) -> Ranked | None:
    """What the paper's rule would choose, with its own number of microbatches; None if that does not fit."""
    for data_parallel in DATA_PARALLELS if options.data_parallel == SEARCH else (options.data_parallel,):
        asked = replace(options, method="proportional", data_parallel=data_parallel)
        paper, _ = build_shortlist(costs, demand, asked, everything=True, tick_seconds=instance.tick_seconds)
        solution = solve_proportional(paper, demand)
        if solution is not None:
            return Ranked(choice=solution.choice, ends=solution.ends, ticks=solution.ticks)
    return None


def frozen_parts(model: ModelSpec) -> tuple[str, ...]:
    """Names of the frozen parts of a model, as in a recipe."""
    towers = tuple(TOWER_PARTS[encoder.name] for encoder in model.encoders if not encoder.trained)
    projector = bool(model.encoders) and all(not encoder.output_trained for encoder in model.encoders)
    return (*towers, *(("projector",) if projector else ()), *(() if model.llm.trained else ("language_model",)))


def input_hash(costs: CostModel, samples: SampleTable, global_batch_size: int, options: PlanOptions) -> str:
    """Changes when the model, its costs, the data, the cluster or the options change."""
    digest = hashlib.sha256()
    parts = (PLANNER_VERSION, costs.model, costs.cluster, costs.modules, costs.links, costs.action_seconds)
    asked = replace(options, solver_workers=1)  # The answer does not depend on them.
    parts_ = (costs.step_seconds_per_parameter, costs.precision, global_batch_size, asked)
    digest.update(repr((parts, parts_)).encode())
    for name in ("text_tokens", "label_tokens", "media_offsets", "media_kind", "media_patches", "media_segments"):
        digest.update(getattr(samples, name).tobytes())
    digest.update(samples.media_tokens.tobytes())
    return digest.hexdigest()[:16]


def _prediction(replay: Replay, costs: CostModel, demand: Demand) -> Prediction:
    rows = demand.rows.reshape(-1)
    batches = len(demand.rows)
    seconds = replay.seconds
    drawn = demand.samples.take(rows)
    device = costs.cluster.device_spec
    peak = peak_flops_per_second(device, costs.precision) * costs.cluster.num_devices
    flops = model_flops(costs.model, drawn) / batches
    return Prediction(
        iteration_seconds=seconds,
        bubble_share=replay.bubble_share,
        samples_per_second=demand.global_batch_size / seconds,
        tokens_per_second=float(drawn.total_tokens.sum()) / batches / seconds,
        peak_bytes=replay.peak_bytes,
        peak_bytes_parts=replay.peak_parts,
        # The catalogue's CPU rate is nominal, so a share of it would say nothing.
        model_flops_utilization=None if device.name == "cpu" else flops / (seconds * peak),
    )
