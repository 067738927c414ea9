"""Tensor parallelism and recompute: work divided, messages added, memory divided where it can be."""

from dataclasses import replace

import pytest
from planner_cases import make_costs, make_model, make_samples

from entrain_opt.cost import memory
from entrain_opt.cost.precision import find_precision
from entrain_opt.cost.tensor import tensor_degrees, tensor_rule
from entrain_opt.plan import ParallelDegrees, StagePlan

COSTS = make_costs(model=make_model(scale=8), devices=4, device="A100-80GB", precision="bf16-mixed")


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_layers_get_faster_but_not_by_the_degree(module):
    times = [COSTS.module_costs(module, tensor).layer.forward for tensor in (1, 2, 4)]
    seconds = [float(line.item_seconds(0.0, 1e4, 1)) for line in times]
    for index, degree in ((1, 2), (2, 4)):
        assert seconds[0] / degree < seconds[index] < seconds[0]
        assert times[index].square_seconds == pytest.approx(times[0].square_seconds / degree)


def test_one_device_is_the_module_as_it_is():
    assert COSTS.module_costs("llm", 1) is COSTS.modules["llm"]


def test_slow_links_make_it_not_worth_it():
    slow = make_costs(model=make_model(), devices=2)
    one, two = (slow.module_costs("llm", tensor).layer.forward.fixed_seconds for tensor in (1, 2))
    assert two > one / 2
    quick = make_costs(model=make_model(scale=8), devices=2, device="B200-192GB", precision="bf16-mixed")
    pcie = make_costs(model=make_model(scale=8), devices=2, device="L40S-48GB", precision="bf16-mixed")
    gains = []
    for costs in (quick, pcie):
        one, two = (costs.module_costs("llm", tensor).layer.forward.token_seconds for tensor in (1, 2))
        gains.append(one / two)
    assert gains[0] > gains[1]


def test_weight_gradients_need_no_messages():
    layer = COSTS.module_costs("llm", 2).layer
    whole = COSTS.module_costs("llm").layer
    only = layer.backward.without(layer.input_backward).token_seconds
    assert only <= whole.backward.without(whole.input_backward).token_seconds


def test_every_parameter_is_on_some_device():
    model = COSTS.model
    for tensor in (1, 2, 4):
        degrees = ParallelDegrees(data=1, pipeline=2, tensor=tensor)
        stages = (StagePlan(module="vision", layers=(0, 12), rank=0), StagePlan(module="llm", layers=(0, 6), rank=1))
        held = tensor * sum(COSTS.static_bytes(stage, degrees).weights for stage in stages)
        copies = (tensor - 1) * model.encoders[0].input_parameters
        assert held == pytest.approx(6 * (model.parameters + copies))


def test_activations_are_divided_but_for_the_norms():
    llm, precision = COSTS.model.llm, find_precision("bf16-mixed")
    one, four = (memory.layer_activation_bytes(llm, precision, tensor) for tensor in (1, 4))
    whole = memory.replicated_layer_bytes(llm)
    assert four - whole == pytest.approx((one - whole) / 4)


def test_recompute_keeps_the_layers_input_and_runs_forward_again():
    llm, samples = COSTS.model.llm, make_samples(10)
    kept, again = (StagePlan(module="llm", layers=(1, 5), rank=0, recompute=r) for r in (False, True))
    held, least = (COSTS.activation_bytes(stage, samples, ParallelDegrees()) for stage in (kept, again))
    assert least == 4 * 4 * llm.hidden_size < held
    forward, backward, redone = (
        COSTS.stage_lines(llm, (1, 5), backward=b, recompute=r)[1].token_seconds
        for b, r in ((False, False), (True, False), (True, True))
    )
    assert redone == pytest.approx(backward + forward)
    frozen = make_costs(model=make_model(frozen=("vision_tower", "projector")))
    tower = frozen.model.encoders[0]
    assert frozen.stage_lines(tower, (0, 12), backward=True, recompute=True)[1].token_seconds == 0


def test_degrees_divide_heads_widths_and_nodes():
    llm = COSTS.model.llm
    assert tensor_degrees(COSTS.model, llm, (1, 2, 3, 4, 5, 8), 4) == [1, 2, 4]
    assert tensor_degrees(COSTS.model, llm, (8,), 4) == []


def test_a_module_with_dropout_inside_its_layers_is_not_divided():
    model = COSTS.model
    dropping = replace(model.llm, drops_inside=True)
    assert tensor_degrees(model, dropping, (1, 2, 4), 4) == [1]
    assert tensor_degrees(model, dropping, (2, 4), 4) == []
    assert tensor_rule(model, dropping, 4).startswith("module llm has dropout inside its layers")


def test_the_rule_names_every_size_that_a_degree_must_divide():
    # The degree divides the tower's own sizes, but not the width of the language model that its projector ends in.
    model = COSTS.model
    odd = replace(model, llm=replace(model.llm, hidden_size=1537))
    assert tensor_degrees(odd, odd.encoders[0], (2,), 4) == []
    assert "the language model's width (1537)" in tensor_rule(odd, odd.encoders[0], 4)
