"""The cost model: parts add up to wholes, what trains decides the backward, both sources behind one interface."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.assigner import assign_microbatches
from entrain_opt.cost import CostModel, Line, MeasuredCosts, ModuleCosts, PartCosts
from entrain_opt.cost.alike import AlikeStages
from entrain_opt.cost.features import module_features
from entrain_opt.errors import PlanError, RuntimeConfigError, WorkloadError
from entrain_opt.simulator import simulate
from entrain_opt.spec import ClusterSpec

LINE = Line(square_seconds=1e-9, token_seconds=2e-6, segment_seconds=3e-6, fixed_seconds=1e-4)
PART = PartCosts(forward=LINE, backward=LINE.scaled(2), input_backward=LINE)
MEASURED = MeasuredCosts(
    modules={name: ModuleCosts(input=PART, layer=PART, output=PART) for name in ("vision", "llm")},
    message_latency_seconds=1e-4,
    message_bytes_per_second=1e9,
    step_seconds_per_parameter=1e-9,
    action_seconds=1e-5,
)


@pytest.mark.parametrize("measured", [None, MEASURED])
def test_stages_add_up_to_modules(measured):
    model, samples = make_model(), make_samples(50)
    costs = CostModel(model, ClusterSpec(devices_per_node=4), measured=measured)
    plan = make_plan([("vision", 0, 4, 0), ("vision", 4, 12, 1), ("llm", 0, 3, 2), ("llm", 3, 6, 3)])
    batch = costs.batch_costs(samples, plan)
    assert batch.stages is not None
    forward = batch.stages.forward_seconds
    np.testing.assert_allclose(forward[0] + forward[1], batch.encoder_seconds)
    np.testing.assert_allclose(forward[2] + forward[3], batch.llm_seconds)
    encoder, llm = costs.module_seconds(samples)
    np.testing.assert_array_equal(encoder, batch.encoder_seconds)
    np.testing.assert_array_equal(llm, batch.llm_seconds)


def test_layer_seconds_is_the_line():
    costs = CostModel(make_model(), ClusterSpec(), measured=MEASURED)
    expected = 1e-9 * (64**2 + 32**2) + 2e-6 * 96 + 3e-6 * 2 + 1e-4
    assert costs.layer_seconds("vision", [64, 32]) == pytest.approx(expected)
    assert costs.layer_seconds("llm", [64, 32], backward=True) == pytest.approx(2 * expected)


def test_packing_costs_less_than_one_long_segment():
    costs = make_costs()
    assert costs.layer_seconds("llm", [512, 512]) < costs.layer_seconds("llm", [1024])


@pytest.mark.parametrize(
    ("frozen", "vision", "llm"),
    [
        ((), 2, 2),
        (("vision_tower",), 0, 2),
        (("vision_tower", "projector"), 0, 2),
        (("language_model",), 2, 1),
        (("vision_tower", "language_model"), 0, 1),
    ],
)
def test_backward_follows_what_trains(frozen, vision, llm):
    costs = make_costs(model=make_model(frozen=frozen))
    for module, times in (("vision", vision), ("llm", llm)):
        forward = costs.layer_seconds(module, [256])
        assert costs.layer_seconds(module, [256], backward=True) == pytest.approx(times * forward)


@pytest.mark.parametrize("frozen", [(), ("vision_tower",), ("vision_tower", "projector"), ("language_model",)])
def test_costs_and_plan_agree_on_backward_passes(frozen):
    costs = make_costs(model=make_model(frozen=frozen), devices=3)
    plan = replace(make_plan([("vision", 0, 6, 0), ("vision", 6, 12, 1), ("llm", 0, 6, 2)]), frozen=frozen)
    batch = costs.batch_costs(make_samples(20), plan)
    assert batch.stages is not None
    for index, has in enumerate(plan.pipeline_shape.has_backward):
        assert has == (batch.stages.backward_seconds[index].sum() > 0)
        assert has == (batch.stages.backward_fixed_seconds[index] > 0)


def test_a_trained_projector_behind_a_frozen_tower_needs_weight_gradients_only():
    costs = make_costs(model=make_model(frozen=("vision_tower",)))
    module = costs.model.module("vision")
    entry, layers, projector = costs.stage_lines(module, (0, 12), backward=True)
    assert entry == layers == Line()
    assert projector == costs.modules["vision"].output.forward


def test_messages_and_reductions_are_free_where_nothing_moves():
    costs, samples = make_costs(devices=1), make_samples(10)
    batch = costs.batch_costs(samples, make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 0)]))
    assert batch.stages is not None
    assert all((seconds == 0).all() for seconds in batch.stages.send_seconds)
    assert batch.stages.reduce_seconds == (0.0, 0.0)


def test_message_bytes_and_ring_all_reduce():
    costs, samples = CostModel(make_model(), ClusterSpec(devices_per_node=4), measured=MEASURED), make_samples(10)
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], data=2)
    batch = costs.batch_costs(samples, plan)
    assert batch.stages is not None
    np.testing.assert_allclose(batch.stages.send_seconds[0], samples.media_tokens * 192 * 4 / 1e9)
    assert (batch.stages.send_seconds[1] == 0).all()
    parameters = costs.model.llm.parameters
    assert batch.stages.reduce_seconds[1] == pytest.approx(2 * 1 / 2 * parameters * 4 / 1e9 + 2 * 1e-4)
    assert batch.stages.step_seconds[1] == pytest.approx(parameters * 1e-9)


def test_links_between_nodes_are_network_links():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)])
    seconds = []
    for cluster in (
        ClusterSpec(device="A40-48GB", devices_per_node=2),
        ClusterSpec(device="A40-48GB", num_nodes=2, devices_per_node=1),
    ):
        stages = CostModel(make_model(), cluster).batch_costs(make_samples(5), plan).stages
        assert stages is not None
        seconds.append(stages.send_seconds[0].sum())
    assert seconds[1] / seconds[0] == pytest.approx(28 / 6.25)


def test_tied_embeddings_are_summed_across_ranks():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)])
    reductions = [
        make_costs(model=make_model(tied=tied), devices=3).update.reduce_seconds(plan, 2) for tied in (False, True)
    ]
    assert reductions[0] == 0 < reductions[1]


def test_the_copy_of_a_tied_head_is_stepped_and_reduced_like_a_head_of_its_own():
    stages = [("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)]
    tied, untied = (make_costs(model=make_model(tied=tied), devices=6) for tied in (True, False))
    one, two = (make_plan(stages, data=data) for data in (1, 2))
    steps = [costs.batch_costs(make_samples(5), one).stages.step_seconds for costs in (tied, untied)]
    assert steps[0] == steps[1]
    between_replicas = tied.update.reduce_seconds(two, 2) - tied.update.reduce_seconds(one, 2)
    assert between_replicas == pytest.approx(untied.update.reduce_seconds(two, 2))


def test_the_assigner_and_simulator_take_the_costs():
    costs, samples = make_costs(devices=3), make_samples(40)
    plan = make_plan([("vision", 0, 6, 0), ("vision", 6, 12, 1), ("llm", 0, 6, 2)])
    batch = costs.batch_costs(samples, plan)
    assignment = assign_microbatches(batch, plan.pipeline_shape, num_microbatches=8)
    timeline = simulate(batch, assignment, plan.pipeline_shape)
    busiest = max(
        (f + b).sum() for f, b in zip(batch.stages.forward_seconds, batch.stages.backward_seconds, strict=True)
    )
    assert timeline.makespan_seconds > busiest


def test_backwards_of_stages_with_recompute_have_no_part_that_can_wait():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)])
    recomputing = replace(plan, stages=(*plan.stages[:2], replace(plan.stages[2], recompute=True)))
    costs, samples = make_costs(devices=3), make_samples(10)
    kept, recomputed = (costs.batch_costs(samples, p).stages.weight_gradient_share for p in (plan, recomputing))
    assert kept[2] > 0
    assert recomputed == (*kept[:2], 0.0)


def test_what_a_split_backward_takes_beyond_a_whole_one():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 2, 1), ("llm", 2, 6, 2)])
    samples = make_samples(10)
    split = replace(PART, split_backward=PART.backward.scaled(1.25).plus(Line(fixed_seconds=2e-4)))
    modules = {"vision": ModuleCosts(input=PART, layer=split, output=PART), "llm": MEASURED.modules["llm"]}
    measured = replace(MEASURED, modules=modules | {"llm": ModuleCosts(layer=split)})

    def stages(plan=plan, frozen=(), measured=measured):
        costs = CostModel(make_model(frozen=frozen), ClusterSpec(devices_per_node=3), measured=measured)
        return costs.batch_costs(samples, plan).stages

    found = stages()
    # A quarter of the layers' part: of all of a stage that has layers only.
    assert found.split_share[1] == pytest.approx(0.25)
    assert 0.2 < found.split_share[0] < 0.25
    assert found.split_fixed_seconds == pytest.approx([layers * (2e-4 + 0.25 * 2e-4) for layers in (12, 2, 4)])
    assert stages(frozen=("vision_tower", "projector")).split_fixed_seconds[0] == 0
    recomputing = replace(plan, stages=(*plan.stages[:2], replace(plan.stages[2], recompute=True)))
    assert stages(recomputing).split_share[2] == stages(recomputing).split_fixed_seconds[2] == 0
    assert set(stages(measured=MEASURED).split_share) == {0.0}


def test_rows_can_be_taken_before_or_after():
    costs, samples = make_costs(devices=2), make_samples(30)
    plan, rows = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)]), np.array([3, 17, 4])
    before, after = costs.batch_costs(samples.take(rows), plan), costs.batch_costs(samples, plan).take(rows)
    np.testing.assert_array_equal(before.llm_seconds, after.llm_seconds)
    np.testing.assert_array_equal(before.encoder_seconds, after.encoder_seconds)


def test_wrong_inputs_are_named():
    samples = make_samples(5)
    with pytest.raises(PlanError, match="has 6 layers, the plan holds 5"):
        make_costs(devices=2).batch_costs(samples, make_plan([("vision", 0, 12, 0), ("llm", 0, 5, 1)]))
    with pytest.raises(RuntimeConfigError, match="expected precision bf16-true, found 32-true"):
        CostModel(make_model(), ClusterSpec(), measured=MEASURED, precision="bf16-true")
    with pytest.raises(RuntimeConfigError, match=r"missing \['llm'\]"):
        CostModel(make_model(), ClusterSpec(), measured=replace(MEASURED, modules={"vision": ModuleCosts()}))
    with pytest.raises(RuntimeConfigError, match="expected one of"):
        CostModel(make_model(), ClusterSpec(), precision="16-mixed")
    audio = replace(samples, media_kind=np.ones_like(samples.media_kind))
    with pytest.raises(WorkloadError, match="none for audio"):
        make_costs().module_seconds(audio)


def test_stages_that_are_alike_cost_what_each_costs_alone():
    stages = [("vision", 0, 4), ("vision", 4, 8), ("vision", 8, 12), ("llm", 0, 2), ("llm", 2, 4), ("llm", 4, 6)]
    plan = make_plan([(*stage, rank) for rank, stage in enumerate(stages)])
    costs, samples = make_costs(model=make_model(tied=True), devices=6), make_samples(20)
    found = costs.batch_costs(samples, plan).stages
    features = module_features(samples, costs.model)
    for index, stage in enumerate(plan.stages):
        module = costs.model.module(stage.module)
        for backward, seconds in ((False, found.forward_seconds), (True, found.backward_seconds)):
            alone = costs.stage_item_seconds(module, stage.layers, features[module.name], backward=backward)
            np.testing.assert_array_equal(seconds[index], alone)
        assert found.weight_bytes[index] == costs.static_bytes(stage, plan.degrees).total
        assert found.reduce_seconds[index] == costs.update.reduce_seconds(plan, index)
    assert AlikeStages(costs.model, plan).first == [0, 1, 2, 3, 4, 5]
    inner = make_plan([("vision", layer, layer + 1, layer) for layer in range(12)] + [("llm", 0, 6, 12)])
    assert AlikeStages(costs.model, inner).first == [0, *[1] * 10, 11, 12]
    sent = costs.batch_costs(samples, inner).stages.send_seconds
    assert sent[1] is sent[2]
    assert not sent[12].any()
