"""Accelerators as the roofline sees them, and a catalogue of common ones.

Rates are the vendors' dense figures (no sparsity); memory is what the driver reports. They serve the analytic cost
model only: measured costs replace them by what the device at hand does. Link rates are one direction. Where the vendor
gives no figure (PCIe under load, the network of a machine) the entry's source says what was assumed; state your own
machine's in a cluster file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.units import GIB

#: Types of value that rates are kept for.
DTYPES = ("bfloat16", "float16", "tensorfloat32", "float32", "float8")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator (or CPU process).

    Attributes:
        name: unique.
        memory_bytes: as the driver reports it.
        flops_per_second: dense matrix products in bfloat16; of a CPU, in float32.
        memory_bytes_per_second: of the device's own memory.
        link_bytes_per_second: between devices of one node, one direction.
        network_bytes_per_second: between nodes, one direction, per device.
        kernel_launch_seconds: of one kernel.
        float16_flops_per_second, tensorfloat32_flops_per_second, float32_flops_per_second, float8_flops_per_second:
            dense matrix products in other types; 0 where the device has no such unit.
        source: where the figures are from.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    kernel_launch_seconds: float = 5e-6
    float16_flops_per_second: float = 0.0
    tensorfloat32_flops_per_second: float = 0.0
    float32_flops_per_second: float = 0.0
    float8_flops_per_second: float = 0.0
    source: str = ""

    def rate(self, dtype: str) -> float:
        """Dense operations per second in a type.

        Raises:
            RuntimeConfigError: the type is unknown, or the device has no rate for it.
        """
        if dtype not in DTYPES:
            raise RuntimeConfigError(f"dtype: expected one of {list(DTYPES)}, found {dtype!r}.")
        found = self.flops_per_second if dtype == "bfloat16" else getattr(self, f"{dtype}_flops_per_second")
        if not found > 0:
            known = [name for name in DTYPES if name == "bfloat16" or getattr(self, f"{name}_flops_per_second") > 0]
            raise RuntimeConfigError(
                f"device {self.name}: no rate for {dtype} is known, only for {known}. Use another precision, or state "
                f"{dtype}_tflops in a cluster file."
            )
        return float(found)


def _device(
    name: str, *, mib: int, tflops: tuple[float, float, float, float], gb: tuple[float, float, float], source: str
) -> DeviceSpec:
    """`tflops`: bfloat16 (float16 is the same), tensorfloat32, float32, float8; `gb`: memory, link, network GB/s."""
    return DeviceSpec(
        name=name,
        memory_bytes=mib << 20,
        flops_per_second=tflops[0] * 1e12,
        float16_flops_per_second=tflops[0] * 1e12,
        tensorfloat32_flops_per_second=tflops[1] * 1e12,
        float32_flops_per_second=tflops[2] * 1e12,
        float8_flops_per_second=tflops[3] * 1e12,
        memory_bytes_per_second=gb[0] * 1e9,
        link_bytes_per_second=gb[1] * 1e9,
        network_bytes_per_second=gb[2] * 1e9,
        source=source,
    )


_PCIE4 = "link: PCIe 4.0 x16, 28 of 32 GB/s reached"
_DEVICES = (
    _device(
        "A40-48GB", mib=46_068, tflops=(149.7, 74.8, 37.4, 0), gb=(696, 28, 6.25),
        source=f"NVIDIA A40 data sheet; {_PCIE4} (NVLink joins pairs only); network: 200 Gb/s shared by 4",
    ),
    _device(
        "A100-40GB", mib=40_960, tflops=(312, 156, 19.5, 0), gb=(1555, 300, 25),
        source="NVIDIA A100 data sheet (SXM); link: NVLink 600 GB/s both ways; network: 200 Gb/s each",
    ),
    _device(
        "A100-80GB", mib=81_920, tflops=(312, 156, 19.5, 0), gb=(2039, 300, 25),
        source="NVIDIA A100 data sheet (SXM); link: NVLink 600 GB/s both ways; network: 200 Gb/s each",
    ),
    _device(
        "H100-80GB", mib=81_559, tflops=(989.4, 494.7, 66.9, 1978.9), gb=(3350, 450, 50),
        source="NVIDIA H100 data sheet (SXM5); link: NVLink 900 GB/s both ways; network: 400 Gb/s each",
    ),
    _device(
        "H200-141GB", mib=143_771, tflops=(989.4, 494.7, 66.9, 1978.9), gb=(4800, 450, 50),
        source="NVIDIA H200 data sheet (SXM5); link: NVLink 900 GB/s both ways; network: 400 Gb/s each",
    ),
    _device(
        "B200-192GB", mib=183_359, tflops=(2250, 1100, 75, 4500), gb=(7700, 900, 50),
        source="NVIDIA HGX B200 data sheet (half of its sparse figures); link: NVLink 1.8 TB/s both ways; network: "
        "400 Gb/s each",
    ),
    _device(
        "L40S-48GB", mib=46_068, tflops=(362.05, 183, 91.6, 733), gb=(864, 28, 12.5),
        source=f"NVIDIA L40S data sheet; {_PCIE4}; network: 100 Gb/s each",
    ),
    _device(
        "RTX4090-24GB", mib=24_564, tflops=(165.2, 82.6, 82.6, 330.3), gb=(1008, 28, 3),
        source=f"NVIDIA Ada GPU architecture white paper, appendix A (float32 sums); {_PCIE4}; network: 25 Gb/s each",
    ),
    DeviceSpec(
        name="cpu", memory_bytes=8 * GIB, flops_per_second=0.05e12, float32_flops_per_second=0.05e12,
        memory_bytes_per_second=10e9, link_bytes_per_second=1e9, network_bytes_per_second=1e9,
        source="nominal: one process with one thread of a desktop or cloud CPU, float32; no data sheet",
    ),
)  # fmt: skip
CATALOGUE: Mapping[str, DeviceSpec] = {device.name: device for device in _DEVICES}

#: Keys of a device in a cluster file -> field and factor.
_KEYS: Mapping[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "bfloat16_tflops": ("flops_per_second", 1e12),
    "float16_tflops": ("float16_flops_per_second", 1e12),
    "tensorfloat32_tflops": ("tensorfloat32_flops_per_second", 1e12),
    "float32_tflops": ("float32_flops_per_second", 1e12),
    "float8_tflops": ("float8_flops_per_second", 1e12),
    "memory_gb_per_second": ("memory_bytes_per_second", 1e9),
    "link_gb_per_second": ("link_bytes_per_second", 1e9),
    "network_gb_per_second": ("network_bytes_per_second", 1e9),
    "kernel_launch_microseconds": ("kernel_launch_seconds", 1e-6),
}
_NEEDED = ("memory_gib", "bfloat16_tflops", "memory_gb_per_second", "link_gb_per_second", "network_gb_per_second")


def find_device(name: str) -> DeviceSpec:
    """The catalogue's device of that name.

    Raises:
        RuntimeConfigError: there is none; the message lists the known ones.
    """
    if name not in CATALOGUE:
        raise RuntimeConfigError(
            f"device: expected one of {sorted(CATALOGUE)}, found {name!r}. Describe another device in a cluster file."
        )
    return CATALOGUE[name]


def read_device(content: Any, where: str) -> DeviceSpec:
    """A device of the user's own: the keys of a cluster file's `device` mapping.

    Args:
        content: `name` and either `based_on` (a catalogue name, whose figures hold where none is given) or at least
            memory_gib, bfloat16_tflops, memory_gb_per_second, link_gb_per_second and network_gb_per_second.
        where: said in errors.

    Raises:
        RuntimeConfigError: a key is unknown or missing, or a value is not a number above 0.
    """
    if not isinstance(content, Mapping):
        raise RuntimeConfigError(f"{where}: expected a catalogue name or a mapping of keys, found {content!r}.")
    known = ("name", "based_on", "source", *_KEYS)
    if unknown := sorted(str(key) for key in set(content) - set(known)):
        raise RuntimeConfigError(f"{where}: unknown key {unknown[0]!r}; expected some of {list(known)}.")
    name = content.get("name")
    if not isinstance(name, str) or not name or name in CATALOGUE:
        raise RuntimeConfigError(f"{where}.name: expected a name that is not in the catalogue, found {name!r}.")
    values: dict[str, Any] = {"name": name, "source": str(content.get("source", "the user's cluster file"))}
    for key, (field, factor) in _KEYS.items():
        value = content.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise RuntimeConfigError(f"{where}.{key}: expected a number above 0, found {value!r}.")
        values[field] = int(value * factor) if field == "memory_bytes" else float(value * factor)
    if content.get("based_on") is not None:
        try:
            base = find_device(str(content["based_on"]))
        except RuntimeConfigError as error:
            raise RuntimeConfigError(f"{where}.based_on: {error}") from error
        return replace(base, **values)
    if missing := [key for key in _NEEDED if content.get(key) is None]:
        raise RuntimeConfigError(
            f"{where}: {missing} missing. State them, or name a device of the catalogue in based_on: "
            f"{sorted(CATALOGUE)}."
        )
    values.setdefault("float16_flops_per_second", values["flops_per_second"])
    assert set(values) <= {item.name for item in fields(DeviceSpec)}
    return DeviceSpec(**values)
