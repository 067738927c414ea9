"""What `entrain plan` is asked for: a recipe, or the same in flags."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from entrain_opt.cli.recipe import Recipe, read_recipe
from entrain_opt.errors import PlanError, RuntimeConfigError
from entrain_opt.planner.options import DATA_PARALLEL_CHOICES, RECOMPUTES, PlanOptions, device_options
from entrain_opt.spec.cluster import find_cluster_device
from entrain_opt.units import GIB

_NEEDED = ("model", "data", "cluster", "devices", "global_batch_size")
_DEVICES_PER_NODE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to plan."""
    parser.add_argument("--config", metavar="RECIPE", help="recipe (YAML); or give the next five")
    parser.add_argument("--model", metavar="FOLDER", help="model folder in Hugging Face format")
    parser.add_argument("--data", metavar="FILE", help="JSONL in chat form, or a trace (Parquet)")
    parser.add_argument("--cluster", metavar="DEVICE", help="device of the catalogue, or a cluster file (YAML)")
    parser.add_argument("--devices", type=int, metavar="N", help="devices in all (default: the cluster file's)")
    parser.add_argument("--global-batch-size", type=int, metavar="B", help="samples per optimizer step")
    parser.add_argument(
        "--devices-per-node", type=int, metavar="N", help="default: the cluster file's, else at most eight"
    )
    parser.add_argument("--frozen", type=_names, metavar="PART,...", help="parts that do not train")
    parser.add_argument("--precision", help="32-true, bf16-mixed or bf16-true (default with flags: bf16-mixed)")
    parser.add_argument("--method", help="cp-sat, ilp, ilp-highs, ilp-cbc, search or proportional")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of the solver (default: 20)")
    parser.add_argument("--policy", help="of the assigner")
    parser.add_argument("--schedule", help="order that will run the plan (default: auto, eager or eager_split)")
    parser.add_argument("--tensor-degrees", type=_numbers, metavar="N,...", help="degrees to consider (default: 1)")
    parser.add_argument(
        "--context-degrees",
        type=_numbers,
        metavar="N,...",
        help="degrees to plan for; above 1 they cannot be trained yet (default: 1)",
    )
    parser.add_argument("--recompute", choices=RECOMPUTES, help="of activations (default: never)")
    parser.add_argument(
        "--data-parallel",
        choices=DATA_PARALLEL_CHOICES,
        help="of optimizer state over replicas (default: search)",
    )
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="what one rank may use")
    parser.add_argument("--bad-samples", choices=("error", "skip"), help="default: error")


def asked_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe given, or one made of the flags; either way with the options given as flags.

    Raises:
        RuntimeConfigError: both or neither are given, or a value cannot be.
    """
    if arguments.config is not None:
        both = [name for name in (*_NEEDED, "devices_per_node") if getattr(arguments, name) is not None]
        if both:
            raise RuntimeConfigError(
                f"--{both[0].replace('_', '-')}: the recipe {arguments.config} says this. Give a recipe or flags."
            )
        recipe = read_recipe(arguments.config)
    else:
        recipe = _from_flags(arguments)
    changed = {
        name: getattr(arguments, name)
        for name in (
            "precision",
            "method",
            "policy",
            "schedule",
            "tensor_degrees",
            "context_degrees",
            "recompute",
            "data_parallel",
        )
        if getattr(arguments, name) is not None
    }
    if arguments.memory_gib is not None:
        if not arguments.memory_gib > 0:
            raise RuntimeConfigError(f"--memory-gib: expected GiB above 0, found {arguments.memory_gib}.")
        changed["memory_bytes"] = int(arguments.memory_gib * GIB)
    if arguments.time_limit is not None:
        changed["time_limit_seconds"] = arguments.time_limit
    options = replace(recipe.options, **changed)
    try:
        options.check()
    except PlanError as error:
        raise RuntimeConfigError(str(error)) from error
    return replace(
        recipe,
        options=options,
        frozen=recipe.frozen if arguments.frozen is None else arguments.frozen,
        bad_samples=arguments.bad_samples or recipe.bad_samples,
    )


def _from_flags(arguments: argparse.Namespace) -> Recipe:
    missing = [name for name in _NEEDED if getattr(arguments, name) is None and name != "devices"]
    if missing:
        raise RuntimeConfigError(
            "plan: expected --config RECIPE, or --model --data --cluster --devices --global-batch-size; missing "
            f"{', '.join('--' + name.replace('_', '-') for name in missing)}."
        )
    _, _, cluster = find_cluster_device(arguments.cluster)
    devices = arguments.devices if arguments.devices is not None else (cluster.num_devices if cluster else None)
    if devices is None:
        raise RuntimeConfigError("plan: --devices is missing; --cluster names a device, not how many.")
    per_node = arguments.devices_per_node
    if per_node is None:
        per_node = cluster.devices_per_node if cluster is not None else min(devices, _DEVICES_PER_NODE)
    if devices < 1 or per_node < 1 or arguments.global_batch_size < 1:
        raise RuntimeConfigError(
            "plan: expected at least 1 for --devices, --devices-per-node and --global-batch-size, found "
            f"{devices}, {per_node} and {arguments.global_batch_size}."
        )
    num_nodes, per_node = split_into_nodes(devices, per_node, where="--devices")
    found: dict[str, Any] = device_options(arguments.cluster)
    return Recipe(
        path=Path(f"{Path(arguments.model).name}-{found['device']}-{devices}.yaml"),
        model_folder=arguments.model,
        dataset=arguments.data,
        global_batch_size=arguments.global_batch_size,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        options=PlanOptions(cost_model="analytic", **{"precision": "bf16-mixed"} | found),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between, found {text!r}") from error


def split_into_nodes(devices: int, per_node: int, *, where: str) -> tuple[int, int]:
    """(nodes, devices of each); a node is no larger than the whole.

    Raises:
        RuntimeConfigError: the last node would not be full.
    """
    per_node = min(per_node, devices)
    if devices % per_node:
        raise RuntimeConfigError(
            f"{where}: expected a multiple of {per_node} devices per node, found {devices}. Give --devices-per-node."
        )
    return devices // per_node, per_node
