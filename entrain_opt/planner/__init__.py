"""Which configuration: `solve_plan`."""

from entrain_opt.planner.options import PlanOptions
from entrain_opt.planner.solve import solve_plan

__all__ = ["PlanOptions", "solve_plan"]
