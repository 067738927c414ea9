"""Which rows of a parameter a replica updates, where the plan shards the optimizer's state over the replicas.

Every parameter is cut along its first dimension that has any length, into as many equal runs of rows as there are
replicas; where they do not divide, runs differ by one row. So no replica has more than its share by as much as a row of
each parameter, however large single parameters are (a token table), and a run is contiguous memory.

The one home of the rule: the runtime cuts by `owned_rows`, and `cost/memory.py` counts 1 / replicas of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

ALL_REDUCE, SHARDED = "all_reduce", "sharded"
#: What replicas do with gradients and optimizer state: see `Plan.data_parallel`.
DATA_PARALLELS = (ALL_REDUCE, SHARDED)
#: Gradients are summed, and parameters gathered, in messages of about this size.
BUCKET_BYTES = 32 * 2**20


def row_dim(shape: Sequence[int]) -> int:
    """The dimension along which a parameter is cut: the first of more than one row, whose runs are contiguous."""
    return next((dim for dim, size in enumerate(shape) if size > 1), 0)


def owned_rows(num_rows: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """[first, end) of the rows that a replica updates; empty where there are fewer rows than replicas."""
    return replica * num_rows // num_replicas, (replica + 1) * num_rows // num_replicas
