"""Plan, balance and run multimodal LLM training.

Names are imported on first use, so that planning needs neither torch nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entrain_opt.assigner import assign_microbatches
    from entrain_opt.assigner.sampler import BalancedBatchSampler
    from entrain_opt.assignment import Assignment, BatchCosts
    from entrain_opt.cost import CostModel
    from entrain_opt.lightning import EntrainStrategy, MultimodalDataModule, MultimodalModule
    from entrain_opt.plan import PipelineShape, Plan
    from entrain_opt.planner import solve_plan
    from entrain_opt.runtime.families.composed_model import ComposedModel
    from entrain_opt.simulator import Timeline, simulate
    from entrain_opt.spec import ClusterSpec, ModelSpec
    from entrain_opt.workload import SampleTable

__version__ = "0.1.0"

_HOMES = {
    "SampleTable": "workload",
    "ModelSpec": "spec",
    "ClusterSpec": "spec",
    "CostModel": "cost",
    "BatchCosts": "assignment",
    "Assignment": "assignment",
    "PipelineShape": "plan",
    "Plan": "plan",
    "Timeline": "simulator",
    "simulate": "simulator",
    "solve_plan": "planner",
    "assign_microbatches": "assigner",
    "BalancedBatchSampler": "assigner.sampler",
    "ComposedModel": "runtime.families.composed_model",
    "EntrainStrategy": "lightning",
    "MultimodalModule": "lightning",
    "MultimodalDataModule": "lightning",
}

__all__ = [
    "Assignment",
    "BalancedBatchSampler",
    "BatchCosts",
    "ClusterSpec",
    "ComposedModel",
    "CostModel",
    "EntrainStrategy",
    "ModelSpec",
    "MultimodalDataModule",
    "MultimodalModule",
    "PipelineShape",
    "Plan",
    "SampleTable",
    "Timeline",
    "assign_microbatches",
    "simulate",
    "solve_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'entrain_opt' has no attribute {name!r}")
    return getattr(import_module(f"entrain_opt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
