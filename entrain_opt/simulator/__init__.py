"""What would happen: schedules played through with predicted costs, without a device."""

from entrain_opt.simulator.simulate import simulate
from entrain_opt.simulator.timeline import Timeline

__all__ = ["Timeline", "simulate"]
