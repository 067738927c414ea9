"""How long a policy may search: counts of evaluations, never seconds, so that every rank finds the same answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from entrain_opt.errors import AssignmentError
from entrain_opt.schedule.orders import ORDERS

#: Placements that are played through per replica, each counted by its microbatches as a part of the samples.
EFFORTS: Mapping[str, int] = MappingProxyType({"least": 2, "brief": 12, "fast": 32, "default": 480, "thorough": 20000})


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """What a searching policy may know and do.

    Attributes:
        schedule: the order that will run the microbatches, one of `schedule.ORDERS`.
        effort: one of `EFFORTS`.
        seed: of the random moves.
    """

    schedule: str = "eager"
    effort: str = "default"
    seed: int = 0

    @property
    def evaluations(self) -> int:
        return EFFORTS[self.effort]

    def check(self) -> None:
        """Raise AssignmentError for an unknown schedule or effort."""
        if self.schedule not in ORDERS:
            raise AssignmentError(f"schedule: expected one of {sorted(ORDERS)}, found {self.schedule!r}.")
        if self.effort not in EFFORTS:
            raise AssignmentError(f"effort: expected one of {list(EFFORTS)}, found {self.effort!r}.")
