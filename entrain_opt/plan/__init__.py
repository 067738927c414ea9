"""The records every later part shares: which ranks exist, which layers each holds, what was promised.

A `Plan` is a YAML file that a human can read and edit; `Plan.check()` validates the edits. A `PipelineShape` is the
little that the assigner and simulator need of it, and can be written by hand without any plan.
"""

from entrain_opt.plan.files import to_plain, write_yaml
from entrain_opt.plan.records import ParallelDegrees, Plan, Prediction, Provenance, StagePlan
from entrain_opt.plan.shape import PipelineShape

__all__ = [
    "ParallelDegrees",
    "PipelineShape",
    "Plan",
    "Prediction",
    "Provenance",
    "StagePlan",
    "to_plain",
    "write_yaml",
]
