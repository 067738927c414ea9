"""Bytes per parameter and activation under each of Lightning's precisions. AdamW keeps two values per parameter, in
float32 under each of them, because bf16-true updates float32 masters (runtime/master.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.errors import RuntimeConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What one value takes.

    Attributes:
        weight_bytes: a parameter, and what is computed in if there is no copy.
        copy_bytes: a parameter's copy in the compute type, made for each pass (autocast).
        gradient_bytes: a gradient.
        optimizer_bytes: AdamW's state of one parameter, and its float32 master if there is one.
        compute_bytes: a value that matrix products take, and leave for their backward.
    """

    name: str
    weight_bytes: int
    copy_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    compute_bytes: int

    @property
    def step_bytes(self) -> int:
        """What AdamW moves per parameter: gradients are read, its state is read and written, and so are weights.

        A weight beside a float32 master, which is part of the state, is written from it; counted like the others.
        """
        return self.gradient_bytes + 2 * self.optimizer_bytes + 2 * self.weight_bytes


def _precision(name: str, weight: int, copy: int, gradient: int, optimizer: int, compute: int) -> Precision:
    return Precision(
        name=name,
        weight_bytes=weight,
        copy_bytes=copy,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        compute_bytes=compute,
    )


_PRECISIONS = {
    precision.name: precision
    for precision in (
        _precision("32-true", 4, 0, 4, 8, 4),
        _precision("bf16-mixed", 4, 2, 4, 8, 2),
        # float32 gradients, and a float32 master beside AdamW's two values.
        _precision("bf16-true", 2, 0, 4, 12, 2),
    )
}


def precisions() -> list[str]:
    """Names of the precisions that plans can be made for."""
    return list(_PRECISIONS)


def find_precision(name: str) -> Precision:
    """The precision of that name.

    Raises:
        RuntimeConfigError: there is none; the message lists the known ones.
    """
    if name not in _PRECISIONS:
        raise RuntimeConfigError(f"precision: expected one of {precisions()}, found {name!r}.")
    return _PRECISIONS[name]
