"""Which sample in which microbatch: `assign_microbatches` and the policies behind it."""

from entrain_opt.assigner.assign import (
    ReplicaAssignment,
    assign_microbatches,
    assign_replica,
    place_replica,
    split_replicas,
)
from entrain_opt.assigner.registry import POLICIES, Policy
from entrain_opt.assigner.work import Placement, SampleWork, sample_work

__all__ = [
    "POLICIES",
    "Placement",
    "Policy",
    "ReplicaAssignment",
    "SampleWork",
    "assign_microbatches",
    "assign_replica",
    "place_replica",
    "sample_work",
    "split_replicas",
]
