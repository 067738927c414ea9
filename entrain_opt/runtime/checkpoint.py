"""Checkpoints that outlive the plan they were made under.

A checkpoint is a folder: `torch.distributed.checkpoint` files with every tensor under its Hugging Face name
(`model.NAME`, `optimizer.NAME.STATE`), `meta.pt` with Lightning's own state, optimizer groups and the plan, and
`model/` with the model's config and processor files. Another plan, another number of ranks or none at all can read it.

Promise: written beside its final name and renamed when complete, so a crash never leaves half a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.stages import RankModel

_META, _MODEL_FILES = "meta.pt", "model"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _parameter_names(model: RankModel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.optimized_parameters().items()}


def save(
    path: Path,
    model: RankModel,
    optimizers: Sequence[Optimizer],
    *,
    meta: Mapping[str, Any],
    model_folder: Path,
    plan: Mapping[str, Any],
) -> None:
    """Write a checkpoint; every rank must call this.

    Args:
        path: the folder; an older checkpoint there is replaced when the new one is complete.
        model: this rank's stages.
        optimizers: over this rank's parameters.
        meta: what else to keep; the first rank's copy is written.
        model_folder: its config and processor files are copied into the checkpoint.
        plan: plain values of the plan, for the record.
    """
    names = _parameter_names(model)
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in model.optimized_parameters().items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{names[id(parameter)]}.{key}"] = torch.as_tensor(value)
    scratch = path.with_name(path.name + ".partial")
    if _is_first_rank():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        torch.save({**meta, "entrain": {"format": 1, "plan": plan, "optimizer_groups": groups}}, scratch / _META)
        shutil.copytree(model_folder, scratch / _MODEL_FILES, ignore=shutil.ignore_patterns(*_WEIGHTS))
    _barrier()
    dcp.save(tensors, checkpoint_id=scratch)
    _barrier()
    if _is_first_rank():
        remove(path)
        scratch.replace(path)
    _barrier()


def remove(path: Path) -> None:
    """Delete a checkpoint if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def load_meta(path: Path) -> dict[str, Any]:
    """What `save` was given as `meta`, and its own notes under `entrain`.

    Raises:
        RuntimeConfigError: there is no checkpoint of this package.
    """
    if not (path / _META).is_file():
        raise RuntimeConfigError(
            f"checkpoint: expected a folder with {_META} at {path}, found none. Checkpoints of EntrainStrategy are "
            "folders; give the path that `entrain fit` printed."
        )
    meta: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=False)
    # Lightning refuses checkpoints without these; the tensors are read by load_model and load_optimizers.
    return {**meta, "state_dict": {}, "optimizer_states": meta.get("optimizer_states", [])}


def _stored(path: Path) -> dict[str, Any]:
    return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def load_tensors(path: Path, wanted: dict[str, Tensor]) -> None:
    """Read tensors in place by their stored names.

    Raises:
        RuntimeConfigError: one is missing or has another shape.
    """
    stored = _stored(path)
    for name, tensor in wanted.items():
        found = stored.get(name)
        if found is None:
            raise RuntimeConfigError(f"checkpoint {path}: has no {name!r}. Is it a checkpoint of another model?")
        if isinstance(found, TensorStorageMetadata) and found.size != tensor.shape:
            raise RuntimeConfigError(
                f"checkpoint {path}: {name!r} has shape {list(found.size)}, the model expects {list(tensor.shape)}."
            )
    dcp.load(wanted, checkpoint_id=path, no_dist=not dist.is_initialized())


def _read(path: Path, name: str, stored: Mapping[str, Any]) -> Tensor:
    tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
    load_tensors(path, {name: tensor})
    return tensor


def load_model(path: Path, model: RankModel) -> None:
    """Read this rank's weights, whatever plan wrote them."""
    with torch.no_grad():
        load_tensors(path, {f"model.{name}": p.data for name, p in model.optimized_parameters().items()})
    model.masters.write_back()


def load_optimizers(path: Path, model: RankModel, optimizers: Sequence[Optimizer], meta: Mapping[str, Any]) -> None:
    """Read this rank's optimizer state and the settings of its groups (learning rate, betas, ...).

    Raises:
        RuntimeConfigError: the optimizer has another number of groups.
    """
    stored, names = _stored(path), _parameter_names(model)
    saved_groups = meta["entrain"]["optimizer_groups"]
    if len(saved_groups) != len(optimizers) or any(
        len(groups) != len(optimizer.param_groups) for groups, optimizer in zip(saved_groups, optimizers, strict=False)
    ):
        raise RuntimeConfigError(f"checkpoint {path}: was made with another number of optimizers or parameter groups.")
    wanted: dict[str, Tensor] = {}
    for optimizer, groups in zip(optimizers, saved_groups, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
            for parameter in group["params"]:
                prefix = f"optimizer.{names[id(parameter)]}."
                for key in (key for key in stored if key.startswith(prefix)):
                    # A parameter that never had a gradient has no state, here and in the checkpoint.
                    like = stored[key].properties
                    device = parameter.device if stored[key].size else torch.device("cpu")
                    tensor = torch.zeros(stored[key].size, dtype=like.dtype, device=device)
                    optimizer.state[parameter][key.removeprefix(prefix)] = tensor
                    wanted[key] = tensor
    load_tensors(path, wanted)


def export(path: Path, output: Path) -> None:
    """Write a checkpoint as a plain Hugging Face folder: weights, config, tokenizer and processor files.

    Raises:
        RuntimeConfigError: the checkpoint is missing or lacks a parameter of the model, or the output exists.
    """
    from entrain_opt.runtime.families import read_family
    from entrain_opt.runtime.lora import merge_adapters
    from entrain_opt.runtime.weights import materialize, tie

    meta = load_meta(path)
    if output.exists() and any(output.iterdir()):
        raise RuntimeConfigError(f"export: expected an empty or new folder, found files in {output}.")
    family = read_family(path / _MODEL_FILES)
    stored = _stored(path)
    with torch.device("meta"):
        model: Any = family.build()
    dtype = next(entry.properties.dtype for name, entry in stored.items() if name.startswith("model."))
    materialize(model, set(), seed=None, dtype=dtype)
    tie(model, family.tied())
    with torch.no_grad():
        load_tensors(path, {f"model.{name}": p.data for name, p in model.named_parameters()})
        if "lora_scale" in meta:
            names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
            weights = {name: p.data for name, p in model.named_parameters()}
            merge_adapters(weights, names, meta["lora_scale"], lambda name: _read(path, f"model.{name}", stored))
    shutil.copytree(path / _MODEL_FILES, output, dirs_exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(output)
