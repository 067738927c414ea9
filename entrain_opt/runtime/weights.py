"""Weights of one rank: its own parameters only, equal under every plan.

The whole model is built on the meta device (no memory), every parameter of other ranks is removed, and the rest is read
from safetensors by name or drawn from a generator seeded by (seed, module name). So the value of a weight depends on
the seed and its name, never on which rank holds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.experts import find_experts, read_experts
from entrain_opt.runtime.families import Family
from entrain_opt.runtime.lora import is_adapter, plain_name
from entrain_opt.runtime.shards import Shard


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def keep_only(model: nn.Module, names: set[str]) -> dict[str, nn.Parameter]:
    """Remove every parameter that is not named, and return the removed ones by name.

    Modules stay, so that the remaining names do not change.
    """
    removed = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in names}
    _put(model, dict.fromkeys(removed))
    return removed


def materialize(model: nn.Module, removed: Mapping[str, nn.Parameter], *, seed: int | None, dtype: torch.dtype) -> None:
    """Give the remaining meta parameters and all buffers CPU memory and their initial values; what trains stays so.

    Args:
        model: after `keep_only`.
        removed: what `keep_only` returned.
        seed: of the parameters; None leaves them undefined (they will be loaded) and sets the buffers only.
        dtype: of the parameters; they are drawn in float32 and rounded, so that runs differ by rounding alone.
    """
    drawn = dtype if seed is None else torch.float32
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, leaf = _parent(model, name)
        empty = torch.empty(parameter.shape, dtype=drawn, device="cpu")
        setattr(module, leaf, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    persistent = set(model.state_dict())
    for name, buffer in list(model.named_buffers()):
        module, leaf = _parent(model, name)
        empty = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        module.register_buffer(leaf, empty, persistent=name in persistent)
    _initialize(model, removed, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _initialize(model: nn.Module, removed: Mapping[str, nn.Parameter], seed: int | None) -> None:
    """Apply the model's own initialisation, module by module, children first, each from its own generator.

    A module may set parameters of its children too (Whisper's encoder does), of which other ranks hold some: those are
    here again, without memory, while modules are initialised.
    """
    from transformers import PreTrainedModel

    held = _ancestors([name for name, _ in model.named_parameters()])
    absent = _ancestors(removed) - held

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, owner)
        if name in absent or (seed is None and not list(module.buffers(recurse=False))):
            return
        drawn_as = plain_name(f"{name}.").removesuffix(".")
        number = int.from_bytes(hashlib.sha256(f"{seed}:{drawn_as}".encode()).digest()[:8], "little") >> 1
        # Not torch.manual_seed: it spends milliseconds on kinds of devices that are not in use.
        torch.default_generator.manual_seed(number)
        owner._init_weights(module)

    assert isinstance(model, PreTrainedModel)
    _put(model, removed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        visit(model, "", model)
    _put(model, dict.fromkeys(removed))


def _ancestors(names: Iterable[str]) -> set[str]:
    """Names of all modules that hold a parameter, at any depth."""
    pieces = [name.split(".")[:-1] for name in names]
    return {".".join(path[:depth]) for path in pieces for depth in range(len(path) + 1)}


def _put(model: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in parameters.items():
        module, leaf = _parent(model, name)
        setattr(module, leaf, parameter)


def tie(model: nn.Module, tied: dict[str, str]) -> None:
    """Make each tied parameter that this rank holds the same tensor as its owner."""
    held = dict(model.named_parameters(remove_duplicate=False))
    for name, owner in tied.items():
        if name in held:
            module, leaf = _parent(model, name)
            setattr(module, leaf, held[owner])


def has_safetensors(folder: Path) -> bool:
    """Whether a model folder comes with weights."""
    return bool(_weight_files(folder))


def weight_homes(model: nn.Module, family: Family, folder: Path) -> tuple[list[tuple[str | None, Path]], set[str]]:
    """Where a model's weights are read from, and which parts have to be drawn.

    Returns:
        (part, folder with its safetensors) in the order of reading, None for all parts; and the parts that no folder
        holds.
    """
    elsewhere = family.weight_folders(folder)
    homes: list[tuple[str | None, Path]] = [*elsewhere.items()]
    if has_safetensors(folder):
        return [(None, folder), *homes], set()
    parts = {family.place(name).part for name, _ in model.named_parameters(remove_duplicate=False)}
    return homes, parts - elsewhere.keys()


def load_safetensors(
    model: nn.Module,
    family: Family,
    folder: Path,
    *,
    part: str | None = None,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Read this rank's parameters from the folder's safetensors, of divided ones its part alone.

    Args:
        model: with memory for its parameters.
        family: knows the names on the disk.
        folder: with safetensors.
        part: read the parameters of this part only.
        shards: part of each divided parameter, by name.

    Raises:
        RuntimeConfigError: a parameter is missing or has another shape.
    """
    files = _weight_files(folder)
    wanted = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if not is_adapter(name) and part in (None, family.place(name).part)
    }
    divided = {plain_name(name): shard for name, shard in (shards or {}).items()}

    for name, stored in _find_on_disk(files, family, wanted, folder).items():
        shape = wanted[name].shape
        if isinstance(stored, tuple):
            value = read_experts(stored, name, shape, files)
        else:
            value = _read_tensor(files[stored], stored, name, shape, divided.get(name))
        with torch.no_grad():
            wanted[name].copy_(value)


def _weight_files(folder: Path) -> dict[str, Path]:
    """{stored tensor name: file}."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {n: folder / f for n, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as content:
        return dict.fromkeys(content.keys(), single)


def _find_on_disk(
    files: dict[str, Path], family: Family, names: Iterable[str], folder: Path
) -> dict[str, str | tuple[str, ...]]:
    """{parameter: its stored name, or those that `find_experts` finds}."""
    found: dict[str, str | tuple[str, ...]] = {}
    missing = []
    for name in names:
        candidates = family.disk_names(name)
        stored = next((candidate for candidate in candidates if candidate in files), None) or next(
            filter(None, (find_experts(candidate, files) for candidate in candidates)), None
        )
        if stored is None:
            missing.append(name)
        else:
            found[name] = stored
    if missing:
        raise RuntimeConfigError(
            f"model: {folder} lacks {len(missing)} parameters, the first is {missing[0]!r}. Save the model again with "
            "`save_pretrained` of Transformers 5."
        )
    return found


def _read_tensor(path: Path, stored: str, name: str, shape: torch.Size, part: Shard | None) -> Tensor:
    from safetensors import safe_open

    expected = shape if part is None else part.shape
    with safe_open(path, "pt") as content:
        whole = content.get_slice(stored)
        if whole.get_shape() != list(expected):
            raise RuntimeConfigError(
                f"model: {path} holds {stored!r} with shape {whole.get_shape()}, but {name!r} expects {list(expected)}."
            )
        if part is None:
            tensor: Tensor = content.get_tensor(stored)
            return tensor
        return torch.cat([whole[part.index(start, end)] for start, end in part.ranges], dim=part.dim)
