"""How big: the one home of memory formulas.

Per stage: weights, gradients and AdamW state (by precision and by what is frozen), activations per patch or token that
a microbatch in flight holds until its backward, logits and their gradients per label token, outputs in messages, and
the flat copy of a stage's gradients that is summed over replicas.

Where d replicas share out the optimizer's state (`plan/shares.py`), masters and moments take 1 / d, exactly so where
the rows of every parameter divide by d, and a row of each parameter more at most. Gradients stay whole until they are
summed, once per step; in place of their copy there are the sums of a replica's own rows (1 / d) and one message.

Activations of a layer, in values per token, counted from what autograd keeps of a pre-norm transformer layer with
memory-efficient attention (no attention matrix is stored):

    2 norms (input, and the normalised value where the norm has its own), q, k, v (twice where they are rotated),
    attention output and its log-sum, the two residual sums, and the feed-forward's inner values
    (2 without a gate; gate, up, activation and product with one).

Under tensor parallelism of degree t the norms and residual sums are whole on every device and the rest is divided by t,
as are a layer's weights, the projector's, the head's and the token table's; the patch embedding is whole (Korthikanti
et al. 2022, "Reducing activation recomputation in large transformer models", section 4.1). Recompute keeps a layer's
input alone, and one layer's worth for the microbatch in its backward pass. Context parallelism divides what tokens
hold (activations, logits, messages) and not what parameters do; keys and values on their way round the ring, a few
percent of one layer's activations, are not counted.

A stage without a backward pass holds one layer's worth while it runs. Compared with what autograd keeps of
models/tiny-llava in float32: the same for the SigLIP layer and the embeddings, up to 7 % more for the Llama layer; the
projector and logits are counted at the peak of their backward. Allocator overhead is not included, which is why a
cluster keeps a reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.cost.precision import Precision
from entrain_opt.plan.shares import BUCKET_BYTES
from entrain_opt.spec.model import ModelSpec, ModuleSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """What a stage holds all the time."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.buffers

    def __add__(self, other: StaticBytes) -> StaticBytes:
        return StaticBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            buffers=self.buffers + other.buffers,
        )


def parameter_bytes(
    num_parameters: float, *, trained: bool, precision: Precision, reduced: bool, shares: int = 1
) -> StaticBytes:
    """Bytes of some parameters.

    Args:
        num_parameters: how many.
        trained: frozen ones have neither gradient nor optimizer state.
        precision: of the run.
        reduced: whether gradients are summed over replicas, which copies them once.
        shares: replicas that share out the optimizer's state; its copies are those of one share then.
    """
    trained_parameters = num_parameters if trained else 0.0
    return StaticBytes(
        weights=num_parameters * (precision.weight_bytes + precision.copy_bytes),
        gradients=trained_parameters * precision.gradient_bytes,
        optimizer=trained_parameters * precision.optimizer_bytes / shares,
        buffers=trained_parameters * precision.gradient_bytes / shares if reduced else 0.0,
    )


def stage_bytes(
    model: ModelSpec,
    module: ModuleSpec,
    layers: tuple[int, int],
    *,
    precision: Precision,
    reduced: bool,
    tensor: int = 1,
    shares: int = 1,
) -> StaticBytes:
    """What a device of a stage with these layers holds all the time, embeddings, projector or head included."""
    body, output = stage_parameters(model, module, layers, tensor)
    found = StaticBytes()
    for parameters, trained in ((body, module.trained), (output, module.output_trained)):
        found += parameter_bytes(parameters, trained=trained, precision=precision, reduced=reduced, shares=shares)
    if shares == 1:
        return found
    message = min(found.gradients, float(BUCKET_BYTES))
    tables = table_copy_bytes(module, precision, tensor, shares)
    ends = (layers[0] == 0) * module.trained, (layers[1] == module.num_layers) * module.output_trained
    return found + StaticBytes(buffers=message + tables * sum(ends))


def table_copy_bytes(module: ModuleSpec, precision: Precision, tensor: int, shares: int) -> float:
    """Copy of the gradient of a token table or head before `shares` replicas sum it.

    None where its rows divide: then the gradient itself is the message. Other parameters go through small messages.
    """
    if shares == 1 or module.vocabulary_size % (tensor * shares) == 0:
        return 0.0
    return float(module.vocabulary_size / tensor * module.hidden_size * precision.gradient_bytes)


def held_parameters(module: ModuleSpec, tensor: int = 1) -> tuple[float, float, float]:
    """Parameters that one of `tensor` devices holds: of a mean layer, of the embedding, of the projector or head."""
    entry = module.input_parameters / (tensor if module.vocabulary_size else 1)
    return module.layer_parameters / tensor, entry, module.output_parameters / tensor


def stage_parameters(
    model: ModelSpec, module: ModuleSpec, layers: tuple[int, int], tensor: int = 1
) -> tuple[float, float]:
    """Parameters that a device of a stage holds: of its layers and embedding, and of its projector or head.

    A tied head that is not on the stage of the embedding is a second copy of it, which is reduced and stepped as well.
    """
    first, end = layers
    _, entry, exit_ = held_parameters(module, tensor)
    body = module.parameters_of_layers(first, end) / tensor + (entry if first == 0 else 0.0)
    output = exit_ if end == module.num_layers else 0.0
    if end == module.num_layers and first > 0 and module.vocabulary_size and model.tied_embeddings:
        output += entry
    return body, output


def trained_parameters(model: ModelSpec, module: ModuleSpec, layers: tuple[int, int], tensor: int = 1) -> float:
    """Parameters of a stage that train: what a device reduces and steps."""
    body, output = stage_parameters(model, module, layers, tensor)
    return body * module.trained + output * module.output_trained


def replicated_layer_bytes(module: ModuleSpec) -> float:
    """Bytes per patch or token of a layer's norms and residual sums, which tensor parallelism does not divide."""
    return 4.0 * (3 if module.gated_mlp else 2) * 2 * module.hidden_size


def layer_activation_bytes(
    module: ModuleSpec, precision: Precision, tensor: int = 1, *, recompute: bool = False
) -> float:
    """Bytes that one layer keeps per patch or token for its backward pass, on one of `tensor` devices."""
    if recompute:
        return float(module.hidden_size * precision.weight_bytes)
    inner = module.intermediate_size
    query = module.num_attention_heads * module.head_size
    key_value = module.num_key_value_heads * module.head_size
    rotated = 2 if module.vocabulary_size else 1
    attention = rotated * (query + key_value) + key_value + query
    feed_forward = (4 if module.gated_mlp else 2) * inner
    # Norms are computed in float32 under every precision; so is the log-sum of each head.
    divided = 4.0 * module.num_attention_heads + precision.compute_bytes * (attention + feed_forward)
    return replicated_layer_bytes(module) + divided / tensor


def input_activation_bytes(module: ModuleSpec, precision: Precision) -> float:
    """Bytes per patch or token that the embedding keeps: the patches themselves, or the ids."""
    return float(module.input_width * precision.compute_bytes) if module.input_width else 8.0


def output_activation_bytes(module: ModuleSpec, llm: ModuleSpec, precision: Precision) -> float:
    """Bytes that the projector keeps per media token, or the head per label token besides its logits."""
    if module.vocabulary_size:
        return 4.0 * 2 * module.hidden_size
    return float(precision.compute_bytes * (2 * module.hidden_size + 3 * llm.hidden_size))


def logit_bytes(llm: ModuleSpec, precision: Precision) -> float:
    """Bytes per label token at the peak of the loss: logits, their float32 log-softmax and its gradient."""
    in_float32 = 2 * 4 + (4 if precision.compute_bytes != 4 else 0)
    return float(llm.vocabulary_size * (precision.compute_bytes + in_float32))
