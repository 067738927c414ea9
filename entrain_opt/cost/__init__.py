"""How long and how big: `CostModel`, measured or analytic."""

from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.model import CostModel
from entrain_opt.cost.profile import MeasuredCosts

__all__ = ["CostModel", "Line", "MeasuredCosts", "ModuleCosts", "PartCosts"]
