"""What the user has: a model (from its Hugging Face config, no weights) and a cluster."""

from entrain_opt.spec.cluster import ClusterSpec
from entrain_opt.spec.model import ModelSpec, ModuleSpec

__all__ = ["ClusterSpec", "ModelSpec", "ModuleSpec"]
