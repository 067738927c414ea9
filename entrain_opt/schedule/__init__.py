"""Who does what when: pure, deterministic lists of actions that the simulator and the runtime both replay.

A replica's schedule is made in three steps: `replica_work` (what there is to do), `schedule_replica` (which rank
computes what in which order), `with_messages` (what crosses between ranks, reductions and optimizer steps). A pass
without gradients, as in validation, is the same with a shape whose `stage_has_backward` is False everywhere.
"""

from entrain_opt.schedule.check import check_schedule
from entrain_opt.schedule.messages import with_messages
from entrain_opt.schedule.orders import FIXED_ORDERS, ORDERS, ReplicaSchedule, schedule_replica
from entrain_opt.schedule.work import ReplicaWork, replica_work

__all__ = [
    "FIXED_ORDERS",
    "ORDERS",
    "ReplicaSchedule",
    "ReplicaWork",
    "check_schedule",
    "replica_work",
    "schedule_replica",
    "with_messages",
]
