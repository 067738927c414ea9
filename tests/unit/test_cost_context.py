"""Context parallelism: samples divided, keys and values sent round, parameters held by every device."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.cost.context import rank_degrees
from entrain_opt.cost.lines import Line
from entrain_opt.plan import ParallelDegrees

COSTS = make_costs(model=make_model(scale=8), devices=8, device="A100-80GB", precision="bf16-mixed")
LLM = COSTS.model.llm


def ring_bytes(tokens: float, context: int) -> float:
    """Keys and values of two-byte numbers that each device receives in one layer."""
    return 2 * LLM.num_key_value_heads * LLM.head_size * 2 * tokens * (context - 1) / context


def test_one_device_is_the_module_as_it_is():
    for tensor in (1, 2):
        assert COSTS.module_costs("llm", tensor, 1) is COSTS.module_costs("llm", tensor)


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("speed", [1e8, 1e12])
def test_a_layer_takes_the_longer_of_attention_and_exchange_and_its_share_of_the_rest(context, speed):
    costs = make_costs(model=make_model(scale=8), devices=8, device="A100-80GB", precision="bf16-mixed")
    costs.links = replace(costs.links, link_bytes_per_second=speed)
    whole, latency = costs.modules["llm"].layer, costs.links.latency_seconds
    for backward, times in ((False, 1), (True, 2)):
        line = whole.backward if backward else whole.forward
        attention = line.square_seconds * 12_000**2 / context
        exchange = times * ring_bytes(12_000, context) / speed
        assert (attention > exchange) == (speed == 1e12)
        padded = 12_000 / context + 2
        expected = max(attention, exchange) + line.token_seconds * padded + line.segment_seconds / context
        expected += line.fixed_seconds + times * (context - 1) * latency
        found = costs.layer_seconds("llm", [12_000], backward=backward, context=context)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("module", ["vision", "llm"])
@pytest.mark.parametrize("length", [30, 20_000])
def test_no_seconds_are_saved_over_all_devices_but_a_long_sample_is_done_sooner(module, length):
    seconds = [COSTS.layer_seconds(module, [length], context=context) for context in (1, 2, 4, 8)]
    for context, found in zip((1, 2, 4, 8), seconds, strict=True):
        assert found >= seconds[0] / context
    assert (seconds[1] < seconds[0]) == (length == 20_000)


def test_devices_that_share_heads_send_their_own_keys_and_values_only():
    one, four = (COSTS.module_costs("llm", tensor, 2).layer.forward.exchange_seconds for tensor in (1, 4))
    assert one == pytest.approx(4 * four)


def test_weight_gradients_need_no_exchange_and_a_recomputed_layer_one_more():
    layer = COSTS.module_costs("llm", 1, 2).layer
    assert layer.backward.without(layer.input_backward).exchange_seconds == 0
    lines = [COSTS.stage_lines(LLM, (0, 1), backward=True, context=2, recompute=r)[1] for r in (False, True)]
    assert lines[1].exchange_seconds == pytest.approx(1.5 * lines[0].exchange_seconds)


def test_a_frozen_tower_has_no_backward_under_any_degree():
    frozen = make_costs(model=make_model(frozen=("vision_tower", "projector")), devices=2)
    assert frozen.stage_lines(frozen.model.encoders[0], (0, 12), backward=True, context=2) == (Line(), Line(), Line())


def plan_with(context, *, data=1):
    """One rank for the tower and two for the language model."""
    stages = [("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)]
    plan = make_plan(stages, data=data)
    return replace(plan, degrees=replace(plan.degrees, context=context))


def test_what_tokens_hold_is_divided_and_what_parameters_hold_is_not():
    samples = make_samples(16)
    one, four = (COSTS.batch_costs(samples, plan_with(context)).stages for context in (1, (1, 2, 2)))
    assert four.activation_bytes == (one.activation_bytes[0], *(held / 2 for held in one.activation_bytes[1:]))
    assert four.logit_bytes == one.logit_bytes / 2
    plan = plan_with((1, 2, 2))
    assert COSTS.layer_bytes(plan.stages[1], plan.degrees) == COSTS.layer_bytes(plan.stages[1], ParallelDegrees()) / 2
    for stage in plan.stages:
        alone, held = (COSTS.static_bytes(stage, degrees) for degrees in (plan_with(1).degrees, plan.degrees))
        assert (alone.weights, alone.gradients, alone.optimizer) == (held.weights, held.gradients, held.optimizer)
        assert (held.buffers > 0) == (stage.module == "llm")
        assert alone.buffers == 0
    assert four.step_seconds == one.step_seconds


def test_gradients_are_summed_over_replicas_and_context_devices():
    samples = make_samples(16)
    alone, context, replicas, both = (
        COSTS.batch_costs(samples, plan_with(context, data=data)).stages.reduce_seconds[1]
        for context, data in ((1, 1), ((1, 4, 4), 1), (1, 4), ((1, 2, 2), 2))
    )
    assert alone == 0
    assert 0 < context <= replicas
    assert both == replicas  # On a ring of four in either case, over the network.


def test_ranks_send_their_parts_at_once_and_the_narrower_side_of_a_border_decides():
    samples = make_samples(16)
    one, uneven, even = (COSTS.batch_costs(samples, plan_with(context)).stages for context in (1, (1, 2, 2), (2, 2, 2)))
    # The tower's outputs leave one device, or reach as many as they leave.
    np.testing.assert_allclose(uneven.send_seconds[0], one.send_seconds[0])
    np.testing.assert_allclose(even.send_seconds[0], one.send_seconds[0] / 2)
    np.testing.assert_allclose(uneven.send_seconds[1], one.send_seconds[1] / 2)
    assert even.output_bytes == tuple(width / 2 for width in one.output_bytes)


def test_whole_modules_and_stages_are_timed_under_the_same_degrees():
    samples, plan = make_samples(16), plan_with((1, 2, 2))
    _, alone = COSTS.module_seconds(samples, plan_with(1))
    _, divided = COSTS.module_seconds(samples, plan)
    stages = COSTS.batch_costs(samples, plan).stages
    np.testing.assert_allclose(divided, stages.forward_seconds[1] + stages.forward_seconds[2])
    assert (divided != alone).all()


def test_a_rank_of_tensor_and_context_devices_divides_a_node():
    assert rank_degrees((1, 2, 4), (1, 2, 4, 3), 8) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
