"""Measured costs: points timed on a device, the lines fitted to them, and the file that keeps them.

Fitting weighs every point by one over its seconds, so that short passes count as much as long ones: relative errors are
what a plan suffers from. The measuring itself is `entrain_opt.runtime.measure`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.nnls import non_negative_least_squares
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import write_yaml
from entrain_opt.spec.folder import find_model_folder
from entrain_opt.spec.model import ModelSpec

_COLUMNS = ("square_seconds", "token_seconds", "segment_seconds", "fixed_seconds")
#: Part of the cache key; grows when measuring or fitting changes.
PROFILE_VERSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPass:
    """One timed pass: what it computed on, and how long it took."""

    squares: float
    tokens: float
    segments: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCosts:
    """What the device at hand does with the layers of one model.

    Attributes:
        modules: lines of each module.
        message_latency_seconds, message_bytes_per_second: between two processes; None where messages were not measured.
        step_seconds_per_parameter: AdamW.
        action_seconds: spent around each forward or backward, besides the layers.
        residuals: name of the piece -> root mean square of its relative errors.
        device: what it ran on.
        num_threads: per process.
        num_processes_busy: processes that measured at the same time, as they do in training.
        precision: of the run.
        frozen: parts that did not train.
        torch_version: that measured.
        model: name of the model.
        seconds_spent: by the measurement.
    """

    modules: dict[str, ModuleCosts]
    message_latency_seconds: float | None
    message_bytes_per_second: float | None
    step_seconds_per_parameter: float
    action_seconds: float
    residuals: dict[str, float] = field(default_factory=dict)
    device: str = ""
    num_threads: int = 1
    num_processes_busy: int = 1
    precision: str = "32-true"
    frozen: tuple[str, ...] = ()
    torch_version: str = ""
    model: str = ""
    seconds_spent: float = 0.0

    def check(self, model: ModelSpec) -> None:
        """Raise RuntimeConfigError unless every module of a model was measured."""
        if missing := [module.name for module in model.modules if module.name not in self.modules]:
            raise RuntimeConfigError(
                f"measured costs: expected modules {[m.name for m in model.modules]} of {model.name}, missing "
                f"{missing} (measured for {self.model}). Measure again with `entrain profile`."
            )

    def write(self, path: str | Path) -> None:
        """Write YAML, whole or not at all."""
        write_yaml(self, path)

    @classmethod
    def read(cls, path: str | Path) -> MeasuredCosts:
        """Read a file that `write` made.

        Raises:
            RuntimeConfigError: the file is missing, or is not a profile.
        """
        import yaml

        path = Path(path)
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RuntimeConfigError(f"profile {path}: {error}. Measure again with `entrain profile`.") from error
        if not isinstance(content, Mapping) or not isinstance(content.get("modules"), Mapping):
            raise RuntimeConfigError(
                f"profile {path}: expected a mapping with `modules`. Measure with `entrain profile`."
            )
        values = dict(content)
        values["modules"] = {
            name: _record(ModuleCosts, module, f"{path}: modules.{name}") for name, module in values["modules"].items()
        }
        values["frozen"] = tuple(values.get("frozen", ()))
        return _record(cls, values, str(path))


_NESTED: dict[str, type] = {
    **dict.fromkeys(("input", "layer", "output"), PartCosts),
    **dict.fromkeys(("forward", "backward", "input_backward", "split_backward"), Line),
}


def _record(record: Any, content: Any, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise RuntimeConfigError(f"{where}: expected a mapping of fields, found {content!r}.")
    known = {item.name for item in fields(record)}
    if unknown := sorted(set(content) - known):
        raise RuntimeConfigError(f"{where}: unknown field {unknown[0]!r}; expected one of {sorted(known)}.")
    values = {
        name: _record(_NESTED[name], value, f"{where}.{name}")
        if name in _NESTED and value is not None and not is_dataclass(value)
        else value
        for name, value in content.items()
    }
    try:
        return record(**values)
    except TypeError as error:
        raise RuntimeConfigError(f"{where}: {error}") from error


def fit_line(passes: Sequence[TimedPass], *, columns: Sequence[str] = _COLUMNS) -> tuple[Line, float]:
    """The line through timed passes, with no negative coefficient.

    Args:
        passes: at least one, each of more than 0 seconds.
        columns: coefficients to fit; the others stay 0.

    Returns:
        The line, and the root mean square of the relative errors.

    Raises:
        RuntimeConfigError: no pass, or one without a positive time.
    """
    if not passes or min(timed.seconds for timed in passes) <= 0:
        raise RuntimeConfigError(f"fit: expected at least one pass of positive seconds, found {list(passes)[:3]}.")
    values = np.array([[timed.squares, timed.tokens, timed.segments, 1.0] for timed in passes])
    seconds = np.array([timed.seconds for timed in passes])
    chosen = [_COLUMNS.index(name) for name in columns]
    weighted = values[:, chosen] / seconds[:, None]
    solution = non_negative_least_squares(weighted, np.ones(len(seconds)))
    errors = weighted @ solution - 1
    line = Line(**{name: float(value) for name, value in zip(columns, solution, strict=True)})
    return line, float(np.sqrt(np.mean(errors**2)))


def profile_path(
    cache_dir: str | Path,
    model_folder: str | Path,
    *,
    frozen: Sequence[str] = (),
    precision: str = "32-true",
    device: str = "cpu",
    num_processes_busy: int = 1,
) -> Path:
    """Where the measured costs of a model on this machine are kept.

    The name covers the model's config, what is frozen, the machine and its processor, the threads per process (one on
    CPU), the processes that measure at once, and the precision.
    """
    digest = hashlib.sha256((find_model_folder(model_folder) / "config.json").read_bytes())
    parts = (PROFILE_VERSION, sorted(frozen), precision, device, num_processes_busy, machine_name())
    digest.update(repr(parts).encode())
    return Path(cache_dir) / f"profile-{Path(model_folder).name}-{digest.hexdigest()[:16]}.yaml"


def machine_name() -> str:
    """Host, architecture, processor model and cores: what makes another machine's measurement wrong here."""
    import os
    import platform

    model = platform.processor()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{platform.node()} {platform.machine()} {model} {os.cpu_count()}"
