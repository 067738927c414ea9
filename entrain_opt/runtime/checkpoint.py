"""Checkpoints that outlive the plan they were made under.

A checkpoint is a folder: `torch.distributed.checkpoint` files with every tensor under its Hugging Face name
(`model.NAME`, `optimizer.NAME.STATE`), `meta.pt` with Lightning's own state, optimizer groups and the plan, and
`model/` with the model's config and processor files. Another plan, another number of ranks or none at all can read it.
Every rank writes its own file; what replicas hold alike is written once, and of what devices share each writes its
part of the whole.

Promise: written beside its final name, forced to the disk and renamed when complete, so a kill at any moment leaves the
checkpoints that were there; see `checkpoint_files`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from entrain_opt.errors import CheckpointError, RuntimeConfigError
from entrain_opt.runtime import checkpoint_files as files
from entrain_opt.runtime.checkpoint_shards import ShardLoadPlanner, ShardSavePlanner
from entrain_opt.runtime.shards import Shard
from entrain_opt.runtime.stages import RankModel
from entrain_opt.units import format_bytes

_META, _MODEL_FILES = "meta.pt", "model"
_METADATA = (".metadata",)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")


def _parameter_names(model: RankModel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.optimized_parameters().items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What one rank has to write.

    Attributes:
        tensors: by stored name.
        notes: what goes into `meta.pt`; the first rank's copy is written.
        model_folder: its config and processor files are copied into the checkpoint.
        shards: which part of the whole a tensor is, of those that are not whole, by stored name.
    """

    tensors: dict[str, Tensor]
    notes: dict[str, Any]
    model_folder: Path
    shards: Mapping[str, Shard] = field(default_factory=dict)


def take_snapshot(
    model: RankModel,
    optimizers: Sequence[Optimizer],
    *,
    meta: Mapping[str, Any],
    model_folder: Path,
    plan: Mapping[str, Any],
    copy: bool = False,
) -> Snapshot:
    """Collect what a checkpoint holds.

    Args:
        model: this rank's stages.
        optimizers: over this rank's parameters.
        meta: what else to keep.
        model_folder: in Hugging Face format.
        plan: plain values of the plan, for the record.
        copy: copy everything to host memory, so that training may go on while it is written.
    """
    names, parts = _parameter_names(model), model.shards()
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in model.optimized_parameters().items()}
    shards = {f"model.{name}": shard for name, shard in parts.items() if f"model.{name}" in tensors}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                stored = f"optimizer.{name}.{key}"
                tensors[stored] = torch.as_tensor(value)
                if name in parts and tensors[stored].shape == parameter.shape:
                    shards[stored] = parts[name]
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    notes = {**meta, "entrain": {"format": 2, "plan": plan, "optimizer_groups": groups}}
    if copy:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        notes = deepcopy(notes)
    return Snapshot(tensors=tensors, notes=notes, model_folder=model_folder, shards=shards)


def write(path: Path, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint; every rank of the group must call this, and all return or raise alike.

    Args:
        path: the folder; an older checkpoint there is replaced when the new one is complete.
        snapshot: this rank's part.
        group: for the messages between the ranks; the default group if None.

    Raises:
        CheckpointError: a rank could not write; names the rank and the reason. What it wrote is deleted, an older
            checkpoint of that name is still there.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    scratch = files.scratch_of(path)

    def begin() -> list[str]:
        if rank != 0:
            return []
        files.remove_folder(scratch)
        scratch.mkdir(parents=True)
        torch.save(snapshot.notes, scratch / _META)
        shutil.copytree(
            snapshot.model_folder,
            scratch / _MODEL_FILES,
            ignore=shutil.ignore_patterns(*_WEIGHTS),
            copy_function=shutil.copy,
        )
        return [
            _META,
            *(str(item.relative_to(scratch)) for item in (scratch / _MODEL_FILES).rglob("*") if item.is_file()),
        ]

    def write_tensors() -> None:
        try:
            planner = ShardSavePlanner(snapshot.shards)
            dcp.save(snapshot.tensors, checkpoint_id=scratch, process_group=group, planner=planner)
        except CheckpointException as error:
            raise CheckpointError(_first_failure(error)) from error

    def list_own() -> list[files.FileRecord]:
        own = [item.name for item in scratch.glob(f"__{rank}_*")]
        return files.record(scratch, [*own, *(_METADATA if rank == 0 else ()), *others])

    what = f"writing checkpoint {path}"
    try:
        others = files.together(what, begin, group)[rank]
        files.together(what, write_tensors, group)
        records = [item for part in files.together(what, list_own, group) for item in part]
        files.together(what, lambda: files.finish(scratch, path, records) if rank == 0 else None, group)
    except CheckpointError as error:
        free = _free_bytes(path.parent)
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(f"{error}. {free}An older checkpoint is as it was.") from error


def _first_failure(error: CheckpointException) -> str:
    """The reason of a failed save, without the tracebacks."""
    rank, (reason, _) = min(error.failures.items())
    return f"rank {rank}: {type(reason).__name__}: {reason}"


def _free_bytes(folder: Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} are free in {folder}. "
    except OSError:
        return ""  # The folder itself cannot be reached, which the error already says.


def load_meta(path: Path) -> dict[str, Any]:
    """What `save` was given as `meta`, and its own notes under `entrain`.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete or damaged.
    """
    files.verify(path)
    meta: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=False)
    # Lightning refuses checkpoints without these; the tensors are read by load_model and load_optimizers.
    return {**meta, "state_dict": {}, "optimizer_states": meta.get("optimizer_states", [])}


def _stored(path: Path) -> dict[str, Any]:
    return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def load_tensors(path: Path, wanted: dict[str, Tensor], shards: Mapping[str, Shard] | None = None) -> None:
    """Read tensors in place by their stored names; of those in `shards`, their part.

    Raises:
        CheckpointError: one is missing or has another shape.
    """
    stored, parts = _stored(path), shards or {}
    for name, tensor in wanted.items():
        found, expected = stored.get(name), parts[name].shape if name in parts else tensor.shape
        if found is None:
            raise CheckpointError(f"checkpoint {path}: has no {name!r}. Is it a checkpoint of another model?")
        if isinstance(found, TensorStorageMetadata) and found.size != torch.Size(expected):
            raise CheckpointError(
                f"checkpoint {path}: {name!r} has shape {list(found.size)}, the model expects {list(expected)}."
            )
    dcp.load(wanted, checkpoint_id=path, planner=ShardLoadPlanner(parts), no_dist=not dist.is_initialized())


def _read(path: Path, name: str, stored: Mapping[str, Any]) -> Tensor:
    tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
    load_tensors(path, {name: tensor})
    return tensor


def load_model(path: Path, model: RankModel) -> None:
    """Read this rank's weights, whatever plan wrote them."""
    with torch.no_grad():
        wanted = {f"model.{name}": p.data for name, p in model.optimized_parameters().items()}
        parts = {f"model.{name}": shard for name, shard in model.shards().items()}
        load_tensors(path, wanted, {name: part for name, part in parts.items() if name in wanted})
    model.masters.write_back()


def load_optimizers(path: Path, model: RankModel, optimizers: Sequence[Optimizer], meta: Mapping[str, Any]) -> None:
    """Read this rank's optimizer state and the settings of its groups (learning rate, betas, ...).

    Raises:
        CheckpointError: the optimizer has another number of groups.
    """
    stored, names, parts = _stored(path), _parameter_names(model), model.shards()
    saved_groups = meta["entrain"]["optimizer_groups"]
    if optimizers and not saved_groups:
        raise CheckpointError(
            f"checkpoint {path}: holds weights only (save_weights_only), so training cannot go on from it. Export it "
            "and start from that folder, or use a whole checkpoint."
        )
    if len(saved_groups) != len(optimizers) or any(
        len(groups) != len(optimizer.param_groups) for groups, optimizer in zip(saved_groups, optimizers, strict=False)
    ):
        raise CheckpointError(f"checkpoint {path}: was made with another number of optimizers or parameter groups.")
    wanted: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    for optimizer, groups in zip(optimizers, saved_groups, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
            for parameter in group["params"]:
                name = names[id(parameter)]
                prefix = f"optimizer.{name}."
                for key in (key for key in stored if key.startswith(prefix)):
                    # A parameter that never had a gradient has no state, here and in the checkpoint.
                    like = stored[key].properties
                    device, shape = parameter.device if stored[key].size else torch.device("cpu"), stored[key].size
                    if name in parts and shape == torch.Size(parts[name].shape):
                        shards[key], shape = parts[name], parameter.shape
                    tensor = torch.zeros(shape, dtype=like.dtype, device=device)
                    optimizer.state[parameter][key.removeprefix(prefix)] = tensor
                    wanted[key] = tensor
    load_tensors(path, wanted, shards)


def export(path: Path, output: Path) -> None:
    """Write a checkpoint as a plain Hugging Face folder: weights, config, tokenizer and processor files.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or lacks a parameter of the model.
        RuntimeConfigError: the output exists.
    """
    from entrain_opt.runtime.families import read_family
    from entrain_opt.runtime.lora import merge_adapters
    from entrain_opt.runtime.weights import materialize, tie

    path = files.find(path)
    meta = load_meta(path)
    if output.exists() and any(output.iterdir()):
        raise RuntimeConfigError(f"export: expected an empty or new folder, found files in {output}.")
    family = read_family(path / _MODEL_FILES)
    stored = _stored(path)
    with torch.device("meta"):
        model: Any = family.build()
    dtypes = {entry.properties.dtype for name, entry in stored.items() if name.startswith("model.")}
    dtype = max(dtypes, key=lambda one: one.itemsize)  # Masters are float32 beside frozen weights in bfloat16.
    materialize(model, {}, seed=None, dtype=dtype)
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
