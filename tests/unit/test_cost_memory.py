"""Memory formulas: parts add up, nothing is counted twice, frozen parts cost their weights only."""

import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.cost import memory
from entrain_opt.cost.precision import find_precision, precisions
from entrain_opt.plan import ParallelDegrees

FULL = find_precision("32-true")


def test_stages_hold_every_parameter_once():
    costs = make_costs(devices=4)
    plan = make_plan([("vision", 0, 5, 0), ("vision", 5, 12, 1), ("llm", 0, 2, 2), ("llm", 2, 6, 3)])
    held = [costs.static_bytes(stage, plan.degrees) for stage in plan.stages]
    assert sum(part.weights for part in held) == 4 * costs.model.parameters
    assert sum(part.gradients for part in held) == 4 * costs.model.parameters
    assert sum(part.optimizer for part in held) == 8 * costs.model.parameters
    assert sum(part.buffers for part in held) == 0


@pytest.mark.parametrize(("name", "per_parameter"), [("32-true", 16), ("bf16-mixed", 18), ("bf16-true", 18)])
def test_bytes_per_trained_parameter(name, per_parameter):
    static = memory.parameter_bytes(1000, trained=True, precision=find_precision(name), reduced=False)
    assert static.total == 1000 * per_parameter
    assert name in precisions()


@pytest.mark.parametrize(("name", "per_parameter"), [("32-true", 28), ("bf16-mixed", 28), ("bf16-true", 32)])
def test_the_step_moves_the_masters_of_shorter_weights_as_well(name, per_parameter):
    costs = make_costs(device="A100-80GB", precision=name)
    bandwidth = costs.cluster.device_spec.memory_bytes_per_second
    assert costs.step_seconds_per_parameter == pytest.approx(per_parameter / bandwidth)


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state():
    static = memory.parameter_bytes(1000, trained=False, precision=FULL, reduced=True)
    assert (static.weights, static.total) == (4000, 4000)


def test_replicas_need_a_buffer_for_the_reduction():
    assert memory.parameter_bytes(10, trained=True, precision=FULL, reduced=True).buffers == 40


def test_a_tied_head_away_from_its_embedding_is_a_second_copy():
    model = make_model(tied=True)
    whole = memory.stage_bytes(model, model.llm, (0, 6), precision=FULL, reduced=False)
    halves = [memory.stage_bytes(model, model.llm, part, precision=FULL, reduced=False) for part in ((0, 3), (3, 6))]
    assert sum(h.weights for h in halves) - whole.weights == 4 * model.llm.input_parameters


def test_what_trains_is_what_has_gradients_the_copy_of_a_tied_head_included():
    model = make_model(tied=True)
    for layers in ((0, 6), (0, 3), (3, 6), (2, 4)):
        held = memory.stage_bytes(model, model.llm, layers, precision=FULL, reduced=False)
        assert memory.trained_parameters(model, model.llm, layers) == held.gradients / 4
    frozen = make_model(tied=True, frozen=("language_model",))
    assert memory.trained_parameters(frozen, frozen.llm, (3, 6)) == 0


def test_frozen_towers_hold_one_layer_of_activations():
    samples, plan = make_samples(10), make_plan([("vision", 0, 6, 0), ("vision", 6, 12, 1), ("llm", 0, 6, 2)])
    trained, frozen = make_costs(), make_costs(model=make_model(frozen=("vision_tower", "projector")))
    first = plan.stages[0]
    per_layer = memory.layer_activation_bytes(trained.model.encoders[0], FULL)
    assert frozen.activation_bytes(first, samples, ParallelDegrees()) == per_layer
    assert trained.activation_bytes(first, samples, ParallelDegrees()) > 6 * per_layer


def test_logits_are_the_vocabulary_in_several_copies():
    llm = make_model().llm
    assert memory.logit_bytes(llm, FULL) == 4096 * 12
    assert memory.logit_bytes(llm, find_precision("bf16-mixed")) == 4096 * 14
