"""Layers divided over the devices of a tensor group.

As in Megatron-LM: a matrix that makes heads or inner values is divided by rows, the one that takes them back to hidden
rows by columns, and each device computes its own heads and inner values. The token table and the head are divided by
entries of the vocabulary. Everything else (norms, patch embeddings, projectors of one matrix) is whole on every device
and computes the same.

Plain parameters and two functions of autograd (`tensor_group`) rather than DTensors: packed attention, frozen parts,
recompute, split backward passes, float32 masters and adapters then need no case of their own, and a part of a fused
query-key-value matrix, which is no contiguous shard, is no special one.

Which matrix is which goes by its name, for every family alike; a layer with anything that the table does not know is
refused. What lies inside the divided part and is whole (norms over a head, one factor of an adapter) sees a share of
its gradient on each device: `partial` names it, and its gradient is summed once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.runtime.dropout import has_dropout
from entrain_opt.runtime.families import UNUSED, Family, read_family
from entrain_opt.runtime.lora import Lora, add_adapters
from entrain_opt.runtime.recompute import layer_of
from entrain_opt.runtime.shards import Shard
from entrain_opt.runtime.tensor_group import TensorGroup

#: Last names of the matrices that are divided by rows, and how many equal blocks lie in the rows of each.
BY_ROWS = {
    "q_proj": 1, "k_proj": 1, "v_proj": 1, "qkv": 3, "gate_proj": 1, "up_proj": 1, "fc1": 1, "linear_fc1": 1,
    "linear_1": 1, "0": 1,
}  # fmt: skip
#: Last names of those that take the result back to hidden rows.
BY_COLUMNS = ("o_proj", "out_proj", "proj", "projection_layer", "down_proj", "fc2", "linear_fc2", "linear_2", "2")
#: Norms between the two, over one head or over all heads together.
NORMS = ("q_norm", "k_norm")
#: What attention modules know of their own size.
_SIZES = ("num_heads", "num_key_value_heads", "embed_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Matrices by rows, and the one by columns that follows them.

    Attributes:
        holder: name of the module that holds them.
        by_rows: names within it, with the blocks of each.
        by_columns: name within it.
        norms: names of the norms over one head within it.
        wide_norms: names of the norms over all heads together.
        degree: devices.
    """

    holder: str
    by_rows: tuple[tuple[str, int], ...]
    by_columns: str
    norms: tuple[str, ...]
    wide_norms: tuple[str, ...]
    degree: int

    def owns(self, parameter_name: str) -> bool:
        """Whether a parameter belongs to one of its matrices or norms."""
        children = (*(name for name, _ in self.by_rows), self.by_columns, *self.norms, *self.wide_norms)
        return parameter_name.startswith(tuple(f"{self.holder}.{child}." for child in children))


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedModel:
    """How one device holds the parameters of a model.

    Attributes:
        divisions: of the layers and projectors.
        shards: part of each divided parameter, by name.
        partial: whole parameters whose gradient is the sum over the group.
        table, head: names of the token table and the head, of those that are here.
    """

    divisions: tuple[Division, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    table: str | None = None
    head: str | None = None


def check_tensor(folder: str | Path, plan: Plan, lora: Lora | None = None) -> None:
    """Raise RuntimeConfigError if the runtime cannot divide a model as a plan says.

    Raises:
        RuntimeConfigError: names the layer or setting, and what to change.
    """
    if set(plan.degrees.tensor_degrees) == {1}:
        return
    family = read_family(folder)
    with torch.device("meta"):
        model = family.build()
        if lora is not None:
            add_adapters(model, family, lora)
    divide(model, family, plan, TensorGroup(size=1))


def divide(model: nn.Module, family: Family, plan: Plan, tensor: TensorGroup) -> DividedModel:
    """What the devices of a tensor group hold each; changes nothing.

    Args:
        model: with whole parameters (meta ones do), those of other ranks left out or not.
        family: of it.
        plan: whose tensor degrees count.
        tensor: which device this is.

    Raises:
        RuntimeConfigError: a layer cannot be divided.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    divisions = tuple(_divisions(model, parameters, family, plan))
    _check_known(parameters, divisions, family, plan)
    shards: dict[str, Shard] = {}
    partial: set[str] = set()

    def share(name: str, dim: int, blocks: int = 1) -> None:
        if name in parameters:
            shape = tuple(parameters[name].shape)
            shards[name] = Shard.of(shape, dim, place=tensor.place, size=tensor.size, blocks=blocks)

    for division in divisions:
        for child, blocks in division.by_rows:
            prefix = f"{division.holder}.{child}."
            for leaf in ("weight", "bias", "base_layer.weight", "base_layer.bias", "lora_B.default.weight"):
                share(prefix + leaf, 0, blocks)
            partial.add(prefix + "lora_A.default.weight")
        prefix = f"{division.holder}.{division.by_columns}."
        for leaf in ("weight", "base_layer.weight", "lora_A.default.weight"):
            share(prefix + leaf, 1)
        partial.add(prefix + "lora_B.default.weight")
        partial |= {f"{division.holder}.{norm}.weight" for norm in division.norms}
        for norm in division.wide_norms:
            share(f"{division.holder}.{norm}.weight", 0)
    table = head = None
    if _degree(plan, "llm") > 1:
        ends = [name for name in parameters if family.place(name).module == "llm"]
        table = next((name for name in ends if name.endswith("embed_tokens.weight")), None)
        head = next((name for name in ends if name.endswith("lm_head.weight")), None)
        for name in (table, head):
            if name is not None:
                share(name, 0)
    return DividedModel(
        divisions=divisions,
        shards=shards,
        partial=frozenset(partial & set(parameters)),
        table=table,
        head=head,
    )


def _degree(plan: Plan, module: str) -> int:
    return next(plan.degrees.tensor_of(stage.rank) for stage in plan.stages if stage.module == module)


def _divisions(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], family: Family, plan: Plan
) -> Iterator[Division]:
    """Modules whose children the table knows, on devices that share them."""
    for holder, module in model.named_modules():
        children = [
            name
            for name, child in module.named_children()
            if isinstance(getattr(child, "base_layer", child), nn.Linear)
        ]
        rows = tuple((name, BY_ROWS[name]) for name in children if name in BY_ROWS)
        columns = [name for name in children if name in BY_COLUMNS]
        if not rows or len(columns) != 1:
            continue
        of_columns = f"{holder}.{columns[0]}."
        weight = next((name for name in parameters if name.startswith(of_columns)), None)
        if weight is None:
            continue  # On another rank.
        place = family.place(weight)
        degree = _degree(plan, place.module)
        if degree == 1 or place.position == UNUSED:
            continue
        head = getattr(module, "head_dim", 1)
        norms = {name: parameters.get(f"{holder}.{name}.weight") for name in NORMS}
        division = Division(
            holder=holder,
            by_rows=rows,
            by_columns=columns[0],
            norms=tuple(name for name, weight in norms.items() if weight is not None and weight.numel() == head),
            wide_norms=tuple(name for name, weight in norms.items() if weight is not None and weight.numel() != head),
            degree=degree,
        )
        _check_sizes(module, division, place.module)
        yield division


def _check_sizes(module: nn.Module, division: Division, name: str) -> None:
    """Raise RuntimeConfigError if heads or inner values do not divide, or a mask of dropout would."""
    where, degree = f"degrees.tensor: {name} has degree {division.degree}, but", division.degree
    head: Any = getattr(module, "head_dim", 1)
    for child, blocks in division.by_rows:
        linear: Any = module.get_submodule(child)
        count, rest = divmod(linear.out_features // blocks, head)
        if rest or count % degree:
            raise RuntimeConfigError(
                f"{where} {division.holder}.{child} makes {count} {'heads' if head > 1 else 'values'}, which it does "
                "not divide. Choose a degree that does."
            )
    for norm in division.wide_norms:
        if not hasattr(module.get_submodule(norm), "variance_epsilon"):
            raise RuntimeConfigError(
                f"{where} {division.holder}.{norm} ({type(module.get_submodule(norm)).__name__}) normalises over all "
                f"heads together, which is known of root mean squares only. Give module {name} tensor degree 1."
            )
    is_layer = division.holder.rpartition(".")[2].isdigit()
    rates = {one: getattr(module, one, 0.0) for one in ("attention_dropout", "activation_dropout")}
    if any(isinstance(rate, float) and rate > 0 for rate in rates.values()) or (not is_layer and has_dropout(module)):
        raise RuntimeConfigError(
            f"{where} {division.holder} has dropout inside the part that devices share, so its masks, and "
            "with them the result, would depend on the degree. Set it to 0 in the model's config, or give module "
            f"{name} degree 1."
        )


def _check_known(
    parameters: Mapping[str, nn.Parameter], divisions: tuple[Division, ...], family: Family, plan: Plan
) -> None:
    """Raise RuntimeConfigError for a parameter of a divided layer of which the table does not know what it is."""
    holders = tuple(f"{d.holder}." for d in divisions)
    for name, parameter in parameters.items():
        place = family.place(name)
        if not isinstance(place.position, int) or _degree(plan, place.module) == 1:
            continue
        if any(division.owns(name) for division in divisions if name.startswith(f"{division.holder}.")):
            continue
        inside = any(name.startswith(holder) for holder in holders if holder != f"{layer_of(name)}.")
        if parameter.ndim > 1 or inside:
            raise RuntimeConfigError(
                f"degrees.tensor: module {place.module} has degree {_degree(plan, place.module)}, but how to divide "
                f"{name!r} is not known. Give the module degree 1, or add the name to "
                "entrain_opt/runtime/tensor_layers.py."
            )


def cut_parameters(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Replace whole parameters by this device's part; those that are cut already stay. Tied ones stay one tensor."""
    cut: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        shard = shards.get(name)
        if shard is None or parameter.shape != torch.Size(shard.shape) or shard.own_shape == shard.shape:
            continue
        if id(parameter) not in cut:
            part = nn.Parameter(shard.cut(parameter.detach()), requires_grad=parameter.requires_grad)
            cut[id(parameter)] = part
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        setattr(module, leaf, cut[id(parameter)])
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            ((first, end),) = shard.ranges
            module.padding_idx = module.padding_idx - first if first <= module.padding_idx < end else None


def join_devices(model: nn.Module, divided: DividedModel, tensor: TensorGroup) -> None:
    """Make divided layers compute their part and sum what they make; before layers are recomputed or seeded."""
    for division in divided.divisions:
        holder: Any = model.get_submodule(division.holder)
        rows = [holder.get_submodule(child) for child, _ in division.by_rows]
        entry = holder if len(rows) > 1 else rows[0]
        entry.register_forward_pre_hook(_spreading(tensor), with_kwargs=True)
        _gather(holder.get_submodule(division.by_columns), tensor)
        for norm in division.wide_norms:
            shard = divided.shards[f"{division.holder}.{norm}.weight"]
            _normalize_together(holder.get_submodule(norm), shard.shape[0], tensor)
        if hasattr(holder, "head_dim"):
            for size in _SIZES:
                if hasattr(holder, size):
                    setattr(holder, size, getattr(holder, size) // division.degree)
    if divided.table is not None:
        _look_up(model.get_submodule(divided.table.removesuffix(".weight")), divided.shards[divided.table], tensor)
    if divided.head is not None:
        head = model.get_submodule(divided.head.removesuffix(".weight"))
        head.register_forward_pre_hook(_spreading(tensor), with_kwargs=True)


def _spreading(tensor: TensorGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (tensor.spread(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": tensor.spread(kwargs["hidden_states"])}

    return hook


def _gather(linear: Any, tensor: TensorGroup) -> None:
    """Sum the shares of a matrix divided by columns (and of its adapter), then add the bias once."""
    base = getattr(linear, "base_layer", linear)

    def product(rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, base.weight)

    inner = product
    if base is not linear:
        base.forward = product
        inner = linear.forward

    def run(rows: Tensor) -> Tensor:
        total = tensor.gather(inner(rows))
        return total if base.bias is None else total + base.bias.to(total.dtype)

    linear.forward = run


def _normalize_together(norm: Any, width: int, tensor: TensorGroup) -> None:
    """Divide by the root mean square over all devices' values."""

    def run(rows: Tensor) -> Tensor:
        values = rows.float()
        # Every device's result depends on every device's squares, hence both functions.
        squares = tensor.spread(tensor.gather(values.pow(2).sum(-1, keepdim=True)))
        scaled = values * torch.rsqrt(squares / width + norm.variance_epsilon)
        result: Tensor = norm.weight * scaled.to(rows.dtype)
        return result

    norm.forward = run


def _look_up(table: Any, shard: Shard, tensor: TensorGroup) -> None:
    """Look up the own entries of the token table, zeros for the others, and sum."""
    ((first, end),) = shard.ranges
    forward = table.forward

    def run(ids: Tensor) -> Tensor:
        is_own = (ids >= first) & (ids < end)
        rows = forward((ids - first).clamp(0, end - first - 1))
        return tensor.gather(rows.masked_fill(~is_own.unsqueeze(-1), 0.0))

    table.forward = run
