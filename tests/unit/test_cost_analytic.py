"""Analytic costs: bounded by the roofs, less efficient for few tokens, and counted from the model's sizes."""

import pytest
from planner_cases import make_model, make_samples

from entrain_opt.cost.analytic import (
    MATMUL_SHARE,
    analytic_costs,
    layer_matmul_parameters,
    layer_square_flops,
    model_flops,
    peak_flops_per_second,
)
from entrain_opt.cost.precision import find_precision
from entrain_opt.spec import ClusterSpec

MIXED = find_precision("bf16-mixed")
DEVICE = ClusterSpec(device="A100-80GB").device_spec


def efficiency(tokens: int) -> float:
    """Share of the peak rate that one layer of a wide model reaches."""
    model = make_model(scale=16)
    line = analytic_costs(model, DEVICE, MIXED)["llm"].layer.forward
    seconds = line.square_seconds * tokens**2 + line.token_seconds * tokens + line.fixed_seconds
    flops = 2 * layer_matmul_parameters(model.llm) * tokens + layer_square_flops(model.llm) * tokens**2
    return flops / seconds / DEVICE.flops_per_second


def test_efficiency_grows_with_tokens_and_never_passes_what_is_reachable():
    shares = [efficiency(tokens) for tokens in (16, 64, 256, 1024, 4096)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert 0.3 < shares[-1] < MATMUL_SHARE


def test_backward_is_twice_the_forward():
    for module in analytic_costs(make_model(), DEVICE, MIXED).values():
        assert module.layer.backward == module.layer.forward.scaled(2)
        assert module.layer.input_backward == module.layer.forward


def test_float32_runs_at_its_own_rate():
    full, cpu = find_precision("32-true"), ClusterSpec().device_spec
    assert peak_flops_per_second(DEVICE, full) == DEVICE.float32_flops_per_second < DEVICE.flops_per_second / 2
    assert peak_flops_per_second(cpu, full) == cpu.flops_per_second


def test_matmul_parameters_are_the_layers_weights():
    model = make_model()
    assert layer_matmul_parameters(model.encoders[0]) == model.encoders[0].layer_parameters


def test_model_flops_follow_what_trains():
    samples = make_samples(30)
    everything = model_flops(make_model(), samples)
    frozen_tower = model_flops(make_model(frozen=("vision_tower", "projector")), samples)
    frozen_llm = model_flops(make_model(frozen=("language_model",)), samples)
    assert frozen_tower < everything
    assert frozen_llm < everything
    tokens = samples.total_tokens.sum()
    assert everything > 6 * make_model().llm.layer_parameters * 6 * tokens


@pytest.mark.parametrize("device", ClusterSpec.devices())
def test_every_device_of_the_catalogue_has_positive_costs(device):
    costs = analytic_costs(make_model(), ClusterSpec(device=device).device_spec, MIXED)
    for module in costs.values():
        assert min(module.layer.forward.token_seconds, module.output.forward.token_seconds) > 0
