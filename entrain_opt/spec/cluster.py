"""The devices a plan may use, and a catalogue of common ones.

Peak rates are the vendors' dense figures (no sparsity). They serve the analytic cost model only; a measured cost
model replaces them by what the device at hand does.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator (or CPU process) as the roofline sees it."""

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """Between devices of one node, one direction."""
    network_bytes_per_second: float
    """Between nodes, one direction, per device."""
    kernel_launch_seconds: float


def _device(name: str, gib: float, tflops: float, memory_gb: float, link_gb: float, network_gb: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=int(gib * GIB),
        flops_per_second=tflops * 1e12,
        memory_bytes_per_second=memory_gb * 1e9,
        link_bytes_per_second=link_gb * 1e9,
        network_bytes_per_second=network_gb * 1e9,
        kernel_launch_seconds=5e-6,
    )


_CATALOGUE = {
    device.name: device
    for device in (
        # name, memory GiB, dense bf16 TFLOP/s, memory GB/s, link GB/s, network GB/s per device
        _device("A40-48GB", 48, 149.7, 696, 28, 6),
        _device("A100-40GB", 40, 312, 1555, 300, 25),
        _device("A100-80GB", 80, 312, 2039, 300, 25),
        _device("H100-80GB", 80, 989, 3350, 450, 50),
        _device("H200-141GB", 141, 989, 4800, 450, 50),
        _device("B200-192GB", 180, 2250, 8000, 900, 50),
        _device("L40S-48GB", 48, 362, 864, 28, 12.5),
        _device("RTX4090-24GB", 24, 165, 1008, 28, 3),
        # One process with one thread of a desktop or cloud CPU, float32.
        _device("cpu", 8, 0.05, 10, 1, 1),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """How many devices of which kind.

    Attributes:
        device: a name from `ClusterSpec.devices()`.
        num_nodes: machines.
        devices_per_node: ranks per machine.
        memory_bytes: what one rank may use; None takes the device's memory less a reserve of 8 %.
    """

    device: str = "cpu"
    num_nodes: int = 1
    devices_per_node: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.device not in _CATALOGUE:
            raise RuntimeConfigError(f"cluster.device: expected one of {self.devices()}, found {self.device!r}.")
        for field in ("num_nodes", "devices_per_node"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise RuntimeConfigError(f"cluster.{field}: expected a whole number of at least 1, found {value!r}.")

    @staticmethod
    def devices() -> list[str]:
        return sorted(_CATALOGUE)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def device_spec(self) -> DeviceSpec:
        return _CATALOGUE[self.device]

    @property
    def memory_limit_bytes(self) -> int:
        return self.memory_bytes if self.memory_bytes is not None else int(0.92 * self.device_spec.memory_bytes)
