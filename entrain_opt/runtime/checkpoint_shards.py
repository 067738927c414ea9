"""Divided tensors in a checkpoint: each device writes and reads its ranges of the whole.

`torch.distributed.checkpoint` keeps a tensor as chunks with offsets, and reads any region from whatever chunks hold it.
These planners name the chunks of a `Shard`, of which one tensor may have several, so a checkpoint written under one
tensor degree is read under any other, or whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.default_planner import (
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from entrain_opt.runtime.shards import Shard


class ShardSavePlanner(DefaultSavePlanner):
    """Writes the ranges of divided tensors, and everything else as usual.

    Args:
        shards: part of each divided tensor, by stored name.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__()
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        whole = {name: value for name, value in self.state_dict.items() if name not in self._shards}
        plan = create_default_local_save_plan(whole, self.is_coordinator)
        divided = [item for name in self.state_dict if name in self._shards for item in self._items(name)]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *divided], planner_data=self.mappings)
        return self.plan

    def _items(self, name: str) -> list[WriteItem]:
        shard = self._shards[name]
        properties = TensorProperties.create_from_tensor(self.state_dict[name])
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.shape)),
            )
            for chunk in _chunks(shard)
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._shards:
            return _chunk(self.state_dict[index.fqn], self._shards[index.fqn], index)
        return super().lookup_object(index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Reads the ranges of divided tensors, and everything else as usual; see `ShardSavePlanner`."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__()
        self._shards = shards

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        whole = {name: value for name, value in self.state_dict.items() if name not in self._shards}
        items = list(create_default_local_load_plan(whole, self.metadata).items)
        for name in self.state_dict:
            if name in self._shards:
                stored = self.metadata.state_dict_metadata[name]
                assert isinstance(stored, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, stored, _chunks(self._shards[name]))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self._shards:
            return _chunk(self.state_dict[index.fqn], self._shards[index.fqn], index)
        return super().lookup_tensor(index)


def _chunks(shard: Shard) -> list[ChunkStorageMetadata]:
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, sizes, _ in shard.chunks()
    ]


def _chunk(part: Tensor, shard: Shard, index: MetadataIndex) -> Tensor:
    """The range of a device's part that begins at an offset in the whole."""
    for offsets, sizes, own in shard.chunks():
        if torch.Size(offsets) == index.offset:
            return part.narrow(shard.dim, own, sizes[shard.dim])
    raise AssertionError(f"{index} is no range of {shard}")
