"""Which sample in which microbatch: `assign_microbatches` and the policies behind it."""

from entrain_opt.assigner.assign import assign_microbatches, place_replica, split_replicas
from entrain_opt.assigner.registry import POLICIES, Policy
from entrain_opt.assigner.work import Placement, SampleWork, sample_work

__all__ = [
    "POLICIES",
    "Placement",
    "Policy",
    "SampleWork",
    "assign_microbatches",
    "place_replica",
    "sample_work",
    "split_replicas",
]
