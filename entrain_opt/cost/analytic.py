"""Seconds from a device's data sheet, for planning without the device.

Roofline with its two roofs added, not maximised:

    seconds of a matrix product = flops / (peak * reached) + bytes of weights / memory bandwidth

Written as an efficiency this is reached * T / (T + T_half): with few tokens T the time goes into reading weights, and
at T_half (bytes per weight / 2 * reachable rate / bandwidth) half the reachable rate is left. So the curve for small
sizes needs no constant of its own, and the result stays a line in tokens. Elementwise work adds its memory traffic.

The shares of peak that are reached with many tokens (0.7 for matrix products, 0.5 for attention) are round figures for
large models on current GPUs, not measurements; use `entrain profile` where a few percent matter. A backward costs twice
the forward, or once where only input gradients are needed.
"""

from __future__ import annotations

from entrain_opt.cost.features import module_features
from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.memory import layer_activation_bytes
from entrain_opt.cost.precision import Precision
from entrain_opt.spec.cluster import DeviceSpec
from entrain_opt.spec.model import ModelSpec, ModuleSpec
from entrain_opt.workload.samples import SampleTable

#: Share of the peak rate that large matrix products reach, and attention.
MATMUL_SHARE, ATTENTION_SHARE = 0.7, 0.5
#: Kernels of one layer's forward pass.
KERNELS_PER_LAYER = 15
#: What splitting one layer's backward takes: a walk over its graph and a backward for each matrix and norm, in Python.
#: Measured on one CPU core (`benchmarks/split_backward.py`); a device with kernels in its queue may not notice.
SPLIT_LAYER_SECONDS = 1e-3
#: A message between two processes, besides its bytes: launch and synchronisation on both ends.
MESSAGE_LATENCY_SECONDS = 20e-6


def analytic_costs(model: ModelSpec, device: DeviceSpec, precision: Precision) -> dict[str, ModuleCosts]:
    """Costs of every module by name."""
    return {module.name: _module_costs(module, model, device, precision) for module in model.modules}


def layer_matmul_parameters(module: ModuleSpec) -> float:
    """Weights of one layer that a token is multiplied with, the mean over layers; of experts, those it goes to."""
    query = module.num_attention_heads * module.head_size
    key_value = module.num_key_value_heads * module.head_size
    attention = module.hidden_size * (2 * query + 2 * key_value)
    feed_forward = sum(
        count * ((3 if module.gated_mlp else 2) * kind.intermediate_size + kind.num_experts)
        for kind, count in module.kind_counts(0, module.num_layers)
    )
    return attention + module.hidden_size * feed_forward / module.num_layers


def layer_square_flops(module: ModuleSpec) -> float:
    """Operations of one layer's attention per square (see `attention.py`); a causal mask halves them."""
    return 4.0 * module.num_attention_heads * module.head_size * (0.5 if module.vocabulary_size else 1.0)


def _idle_parameters(module: ModuleSpec) -> float:
    """Weights of one layer's experts that one token does not go to, but a microbatch of many does: they are read."""
    return (module.parameters - module.active_parameters) / module.num_layers


def peak_flops_per_second(device: DeviceSpec, precision: Precision) -> float:
    """The device's rate in the compute type. PyTorch's float32 products do not use tensorfloat32 by default.

    Raises:
        RuntimeConfigError: the device has no such rate.
    """
    return device.rate("float32" if precision.compute_bytes == 4 else "bfloat16")


def model_flops(model: ModelSpec, samples: SampleTable) -> float:
    """Operations that one pass over samples needs, forward and backward; what utilization is measured against."""
    features = module_features(samples, model)
    encoder_trained = any(encoder.anything_trained for encoder in model.encoders)
    total = 0.0
    for module in model.modules:
        item = features[module.name]
        is_llm = module.name == model.llm.name
        upstream = module.trained or (is_llm and encoder_trained)
        tokens, outputs = float((item.tokens * item.present).sum()), float((item.outputs * item.present).sum())
        layers = 2.0 * layer_matmul_parameters(module) * tokens
        layers += layer_square_flops(module) * float((item.squares * item.present).sum())
        entry = 2.0 * module.input_width * module.hidden_size * tokens
        exit_weights = module.vocabulary_size * module.hidden_size if is_llm else module.output_parameters
        total += module.num_layers * layers * (1 + module.trained + upstream) + entry * (1 + module.trained)
        total += 2.0 * exit_weights * outputs * (1 + module.output_trained + upstream)
    return total


def _module_costs(module: ModuleSpec, model: ModelSpec, device: DeviceSpec, precision: Precision) -> ModuleCosts:
    peak = peak_flops_per_second(device, precision)
    bandwidth = device.memory_bytes_per_second
    weights = layer_matmul_parameters(module)
    weights_read = weights + _idle_parameters(module)
    layer = Line(
        square_seconds=layer_square_flops(module) / (ATTENTION_SHARE * peak),
        token_seconds=2 * weights / (MATMUL_SHARE * peak) + 2 * layer_activation_bytes(module, precision) / bandwidth,
        fixed_seconds=max(
            weights_read * precision.compute_bytes / bandwidth, KERNELS_PER_LAYER * device.kernel_launch_seconds
        ),
    )
    hidden_bytes = module.hidden_size * precision.compute_bytes
    if module.vocabulary_size:
        entry = Line(token_seconds=2 * hidden_bytes / bandwidth, fixed_seconds=device.kernel_launch_seconds)
        head_parameters = module.vocabulary_size * module.hidden_size
        # Logits are written, read for the softmax, and its result is written, in float32.
        traffic = 3 * 4 * module.vocabulary_size / bandwidth
        exit_ = _product(head_parameters, traffic, peak, device, precision)
    else:
        entry = _product(module.input_width * module.hidden_size, 2 * hidden_bytes / bandwidth, peak, device, precision)
        traffic = 4 * model.llm.hidden_size * precision.compute_bytes / bandwidth
        exit_ = _product(module.output_parameters, traffic, peak, device, precision)
    # Nothing asks for the gradient of pixels or token ids, so an embedding's backward computes weight gradients only.
    return ModuleCosts(
        input=PartCosts(forward=entry, backward=entry, input_backward=Line()),
        layer=_with_backward(layer, split_seconds=SPLIT_LAYER_SECONDS),
        output=_with_backward(exit_),
    )


def _product(num_weights: int, traffic_seconds: float, peak: float, device: DeviceSpec, precision: Precision) -> Line:
    reading = num_weights * precision.compute_bytes / device.memory_bytes_per_second
    return Line(
        token_seconds=2 * num_weights / (MATMUL_SHARE * peak) + traffic_seconds,
        fixed_seconds=max(reading, 2 * device.kernel_launch_seconds),
    )


def _with_backward(forward: Line, split_seconds: float = 0.0) -> PartCosts:
    backward = forward.scaled(2)
    split = backward.plus(Line(fixed_seconds=split_seconds))
    return PartCosts(forward=forward, backward=backward, input_backward=forward, split_backward=split)
