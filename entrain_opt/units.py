"""Conversions between user units and solver integers, and numbers as people write them."""

from __future__ import annotations

import math

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def seconds_to_ticks(seconds: float, tick_seconds: float) -> int:
    """Round up: a plan may promise less speed than real, never more."""
    return math.ceil(seconds / tick_seconds - 1e-9)


def format_bytes(num_bytes: float) -> str:
    """`31.0 GiB`, `512 MiB`, `12 KiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`1.25 s`, `31.0 ms`, `80 us`."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
