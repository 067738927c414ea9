"""Mixtures of experts on the disk: Transformers keeps the experts of a layer in one tensor and stores each by itself.

    mlp.experts.gate_up_proj [E, 2 I, H]  <-  experts.<e>.gate_proj [I, H] above experts.<e>.up_proj [I, H], for each e
    mlp.experts.down_proj    [E, H, I]    <-  experts.<e>.down_proj [H, I]

Mixtral's names differ (w1, w3, w2 under `block_sparse_moe`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entrain_opt.errors import RuntimeConfigError

#: Name in the model -> names on the disk, of which one expert's rows are made in order.
_STORED = {
    ".mlp.experts.gate_up_proj": (
        (".mlp.experts.{}.gate_proj.weight", ".mlp.experts.{}.up_proj.weight"),
        (".block_sparse_moe.experts.{}.w1.weight", ".block_sparse_moe.experts.{}.w3.weight"),
    ),
    ".mlp.experts.down_proj": ((".mlp.experts.{}.down_proj.weight",), (".block_sparse_moe.experts.{}.w2.weight",)),
}


def router_names(name: str) -> list[str]:
    """Other names of a layer's router on the disk."""
    return [name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] if name.endswith(".mlp.gate.weight") else []


def find_experts(name: str, files: Container[str]) -> tuple[str, ...] | None:
    """How the experts that a parameter joins are named on the disk, with {} for the expert; None if they are not."""
    for ending, stored in _STORED.items():
        if name.endswith(ending):
            start = name.removesuffix(ending)
            for pieces in stored:
                if start + pieces[0].format(0) in files:
                    return tuple(start + piece for piece in pieces)
    return None


def read_experts(pieces: tuple[str, ...], name: str, shape: torch.Size, files: Mapping[str, Path]) -> Tensor:
    """Join the stored experts.

    Args:
        pieces: what `find_experts` found.
        name: of the parameter.
        shape: [experts, rows, columns] that it has.
        files: {stored name: file}.

    Raises:
        RuntimeConfigError: an expert is missing or has another shape.
    """
    from safetensors import safe_open

    stored = [[piece.format(expert) for piece in pieces] for expert in range(shape[0])]
    if missing := [one for names in stored for one in names if one not in files]:
        raise RuntimeConfigError(f"model: {missing[0]!r}, a part of {name!r}, is missing. Fetch the folder again.")
    opened: dict[Path, Any] = {}
    with ExitStack() as stack:
        for path in {files[one] for names in stored for one in names}:
            opened[path] = stack.enter_context(safe_open(path, "pt"))
        joined = [torch.cat([opened[files[one]].get_tensor(one) for one in names]) for names in stored]
    for expert, rows in enumerate(joined):
        if rows.shape != shape[1:]:
            raise RuntimeConfigError(
                f"model: expert {expert} of {name!r} is stored with shape {list(rows.shape)}, expected "
                f"{list(shape[1:])}."
            )
    return torch.stack(joined)
