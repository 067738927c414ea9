"""The shortlist: nothing that could win is dropped, and tensor degrees and recompute are searched as they should be."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_model, make_samples

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.estimates import Estimator, Layout
from entrain_opt.planner.search import lower_bound_ticks, rank_choices
from entrain_opt.planner.shortlist import WORTH_KEEPING, build_shortlist
from entrain_opt.planner.space import allowed_layouts, groups_fit_nodes, microbatch_counts
from entrain_opt.spec import ClusterSpec

SAMPLES = make_samples(80)
WIDE = PlanOptions(cost_model="analytic", device="A40-48GB", tensor_degrees=(1, 2), recompute="search")


def make(devices: int = 8, *, gib: float | None = None, scale: int = 8, frozen=(), batch: int = 32, options=WIDE):
    memory = None if gib is None else int(gib * 2**30)
    cluster = ClusterSpec(
        device="A40-48GB", num_nodes=max(devices // 4, 1), devices_per_node=min(devices, 4), memory_bytes=memory
    )
    model = make_model(scale=scale, vision_layers=5, llm_layers=4, frozen=frozen)
    costs = CostModel(model, cluster)
    return costs, estimate_demand(SAMPLES, costs, batch), replace(options, memory_bytes=memory)


@pytest.mark.parametrize("gib", [None, 4.0, 2.5, 2.0])
@pytest.mark.parametrize("frozen", [(), ("vision_tower",)])
@pytest.mark.parametrize("devices", [2, 8])
def test_no_choice_that_could_win_is_dropped(devices, gib, frozen):
    costs, demand, options = make(devices, gib=gib, frozen=frozen)
    short, ranking = build_shortlist(costs, demand, options)
    whole, _ = build_shortlist(costs, demand, options, everything=True)
    best = rank_choices(whole)
    assert len(whole.choices) == len(short.choices) + short.num_dropped
    assert (ranking[0].ticks if ranking else None) == (best[0].ticks if best else None)
    if ranking:
        assert whole.tick_seconds == short.tick_seconds


def test_another_kind_is_kept_however_much_slower_it_is():
    # On a slow network, messages between two ranks take far less than summing all gradients.
    costs = CostModel(make_model(), ClusterSpec(devices_per_node=1, num_nodes=2))
    costs.links = replace(costs.links, network_bytes_per_second=1e3)
    _, ranking = build_shortlist(costs, estimate_demand(SAMPLES, costs, 32), PlanOptions(cost_model="analytic"))
    best = {kind: min(r.ticks for r in ranking if r.choice.kind == kind) for kind in {r.choice.kind for r in ranking}}
    first, second = sorted(best.values())[:2]
    assert second > (1 + WORTH_KEEPING) * first


def test_bounds_hold_for_every_layout():
    costs, demand, options = make(8)
    estimator = Estimator(costs, demand)
    whole, _ = build_shortlist(costs, demand, options, everything=True)
    ticks = {(r.choice.kind, r.choice.num_microbatches): r.ticks for r in rank_choices(whole)}
    choices = iter(whole.choices)
    assert {choice.sharded for choice in whole.choices} == {False, True}
    for layout in allowed_layouts(costs, 32, options):
        counts = np.array(microbatch_counts(32 // layout.degrees.data, layout.degrees.pipeline, options))
        for bound in estimator.seconds(layout, counts).bound:
            choice = next(choices)
            found = ticks.get((choice.kind, choice.num_microbatches))
            if found is not None:
                assert bound / whole.tick_seconds <= found + 1e-6
                assert lower_bound_ticks(whole, choice) <= found


def test_the_copy_of_a_tied_head_is_stepped_as_a_head_of_its_own_is():
    layout = Layout(
        degrees=ParallelDegrees(data=1, pipeline=2), tensor=(1, 1), context=(1, 1), recompute=(False, False)
    )
    updates = []
    for tied in (True, False):
        costs = CostModel(make_model(tied=tied), ClusterSpec(devices_per_node=2))
        # With one microbatch, a rank is judged by its update alone.
        seconds = Estimator(costs, estimate_demand(SAMPLES, costs, 32)).seconds(layout, np.array([1]))
        updates.append(seconds.parts[2, 1, 0])
    assert updates[0] == pytest.approx(updates[1])
    assert updates[0] > 0


def test_layouts_use_all_devices_divide_heads_and_stay_within_nodes():
    costs, _, options = make(8, options=replace(WIDE, tensor_degrees=(1, 2, 3, 4)))
    layouts = allowed_layouts(costs, 32, options)
    assert {layout.tensor for layout in layouts} >= {(1, 1), (2, 1), (1, 2), (4, 4)}
    assert all(3 not in layout.tensor for layout in layouts)
    for layout in layouts:
        layout.degrees.check(8)
        assert groups_fit_nodes(layout.degrees, 4)
        assert bool(layout.ranks) == (len(set(layout.tensor)) > 1)
    assert not groups_fit_nodes(ParallelDegrees(data=1, pipeline=2, tensor=(1, 2)), 2)
    assert not groups_fit_nodes(ParallelDegrees(data=3, pipeline=2, tensor=(1, 2)), 4)


def test_a_degree_that_no_module_can_have_is_an_error():
    costs, demand, options = make(2, options=replace(WIDE, tensor_degrees=(7,)))
    with pytest.raises(PlanError, match=r"tensor_degrees: none of \[7\] is possible: .* its heads \(48\)"):
        build_shortlist(costs, demand, options)


def test_the_error_for_degrees_that_use_no_number_of_devices_lists_those_that_do():
    costs, demand, options = make(8, options=replace(WIDE, tensor_degrees=(2,), data_degree=8))
    possible = r"\[\(1, 4, 2\), \(2, 2, 2\), \(4, 1, 2\)\]"
    with pytest.raises(PlanError, match=rf"tensor_degrees \[2\], data_degree = 8\. .*: {possible}"):
        build_shortlist(costs, demand, options)


def test_recompute_saves_memory_and_costs_time():
    costs, demand, options = make(4)
    whole, _ = build_shortlist(costs, demand, replace(options, tensor_degrees=(1,)), everything=True)
    by = {(c.data, c.num_microbatches, c.recompute): c for c in whole.choices}
    for (data, count, recompute), choice in by.items():
        if recompute == (True, True):
            plain = by[data, count, ()]
            assert sum(choice.ticks.layer) + choice.constant_ticks > sum(plain.ticks.layer) + plain.constant_ticks
            assert all(a.layer <= b.layer for a, b in zip(choice.mib, plain.mib, strict=True))


def test_frozen_towers_have_nothing_to_recompute():
    costs, _, options = make(4, frozen=("vision_tower", "projector"))
    assert {layout.recompute for layout in allowed_layouts(costs, 32, options)} == {(False, False), (False, True)}


def test_plans_with_tensor_degrees_and_recompute_are_checked_and_replayed():
    for gib in (None, 2.0):
        costs, _, options = make(4, gib=gib)
        plan = solve_plan(costs.model, SAMPLES, costs.cluster, global_batch_size=32, options=options, costs=costs)
        plan.check(num_layers={"vision": 5, "llm": 4})
        plan.degrees.check(4)
        assert plan.predicted is not None
        assert max(plan.predicted.peak_bytes) <= costs.cluster.memory_limit_bytes
    always = replace(options, recompute="always", tensor_degrees=(2,), memory_bytes=None)
    costs, _, _ = make(4)
    plan = solve_plan(costs.model, SAMPLES, costs.cluster, global_batch_size=32, options=always, costs=costs)
    assert all(stage.recompute for stage in plan.stages)
    assert plan.degrees.tensor == 2
    assert any("recomputed layer" in parts for parts in plan.predicted.peak_bytes_parts)
