"""The devices a plan may use: how many of which kind, from the catalogue or described by the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.devices import CATALOGUE, DeviceSpec, find_device, read_device
from entrain_opt.units import GIB

__all__ = ["ClusterSpec", "DeviceSpec", "find_cluster_device"]

_FILE_KEYS = ("device", "num_nodes", "devices_per_node", "memory_gib")
#: Part of the device's memory that plans leave free: the driver's context, fragments, the allocator's rounding.
MEMORY_RESERVE = 0.08


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """How many devices of which kind.

    Attributes:
        device: a name from `ClusterSpec.devices()`, or that of `custom_device`.
        num_nodes: machines.
        devices_per_node: ranks per machine.
        memory_bytes: what one rank may use; None takes the device's memory less a reserve of 8 %.
        custom_device: a device that is not in the catalogue.
    """

    device: str = "cpu"
    num_nodes: int = 1
    devices_per_node: int = 1
    memory_bytes: int | None = None
    custom_device: DeviceSpec | None = None

    def __post_init__(self) -> None:
        if self.custom_device is None and self.device not in CATALOGUE:
            raise RuntimeConfigError(
                f"cluster.device: expected one of {self.devices()}, found {self.device!r}. Describe another device in "
                "a cluster file."
            )
        if self.custom_device is not None and self.custom_device.name != self.device:
            raise RuntimeConfigError(
                f"cluster.device: expected {self.custom_device.name!r}, the custom device's name, found "
                f"{self.device!r}."
            )
        for field in ("num_nodes", "devices_per_node"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RuntimeConfigError(f"cluster.{field}: expected a whole number of at least 1, found {value!r}.")

    @staticmethod
    def devices() -> list[str]:
        """Names of the catalogue."""
        return sorted(CATALOGUE)

    @classmethod
    def read(cls, content: str | Path | Mapping[str, Any], *, where: str = "cluster") -> ClusterSpec:
        """A cluster from a YAML file or an inline mapping.

        Keys: `device` (a catalogue name, or a mapping as in `spec/devices.py`), `num_nodes`, `devices_per_node` and
        `memory_gib`.

        Raises:
            RuntimeConfigError: the file is missing or not YAML, a key is unknown, or a value cannot be.
        """
        if not isinstance(content, Mapping):
            content, where = _load(Path(content)), str(content)
        if unknown := sorted(str(key) for key in set(content) - set(_FILE_KEYS)):
            raise RuntimeConfigError(f"{where}: unknown key {unknown[0]!r}; expected some of {list(_FILE_KEYS)}.")
        device = content.get("device")
        try:
            found = find_device(device) if isinstance(device, str) else read_device(device, "device")
            memory_gib = content.get("memory_gib")
            if memory_gib is not None and (
                isinstance(memory_gib, bool) or not isinstance(memory_gib, (int, float)) or not memory_gib > 0
            ):
                raise RuntimeConfigError(f"memory_gib: expected GiB above 0, found {memory_gib!r}.")
            return cls(
                device=found.name,
                num_nodes=content.get("num_nodes", 1),
                devices_per_node=content.get("devices_per_node", 1),
                memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
                custom_device=None if found.name in CATALOGUE else found,
            )
        except RuntimeConfigError as error:
            raise RuntimeConfigError(f"{where}: {error}") from error

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def device_spec(self) -> DeviceSpec:
        return self.custom_device if self.custom_device is not None else CATALOGUE[self.device]

    @property
    def memory_limit_bytes(self) -> int:
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int((1 - MEMORY_RESERVE) * self.device_spec.memory_bytes)


def find_cluster_device(value: str | Mapping[str, Any]) -> tuple[str, DeviceSpec | None, ClusterSpec | None]:
    """What a recipe's `device:` names: a catalogue name, a cluster file (`.yaml`), or a device described inline.

    Returns:
        The device's name, the device if it is not in the catalogue, and the cluster if a file described one.

    Raises:
        RuntimeConfigError: none of these.
    """
    if isinstance(value, Mapping):
        device = read_device(value, "device")
        return device.name, device, None
    if value.endswith((".yaml", ".yml")):
        cluster = ClusterSpec.read(value)
        return cluster.device, cluster.custom_device, cluster
    return find_device(value).name, None, None


def _load(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RuntimeConfigError(
            f"cluster: expected a device of the catalogue ({', '.join(sorted(CATALOGUE))}) or a YAML file, found no "
            f"file {path}."
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RuntimeConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise RuntimeConfigError(f"{path}: expected a mapping of keys {list(_FILE_KEYS)}, found {content!r}.")
    return content
