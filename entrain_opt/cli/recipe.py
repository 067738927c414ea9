"""A recipe (LightningCLI YAML) as the planner reads it: without torch, and with our own keys checked.

Keys of `EntrainStrategy`, `MultimodalModule` and `MultimodalDataModule` are compared with the arguments of these
classes, which are read from their source: a misspelled one is named before any process starts. Everything else in the
file belongs to Lightning, which checks it in `entrain fit`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from entrain_opt.errors import PlanError, RuntimeConfigError
from entrain_opt.planner.options import PlanOptions, device_options
from entrain_opt.units import GIB

_STRATEGY, _MODULE, _DATA = "EntrainStrategy", "MultimodalModule", "MultimodalDataModule"
_OPTION_NAMES = {item.name for item in fields(PlanOptions)} - {"memory_bytes", "precision", "custom_device"}
_STRATEGY_KEYS = _OPTION_NAMES | {"plan", "memory_gib", "timeout_seconds", "cache_dir"}
_MODULE_KEYS = {"model", "frozen"}
_DATA_KEYS = {"dataset", "validation_dataset", "global_batch_size", "bad_samples"}
_SHORTHAND = "trainer:\n  strategy:\n    class_path: entrain_opt.EntrainStrategy\n    init_args: {plan: auto}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a recipe says to the planner.

    Attributes:
        path: of the file.
        model_folder, frozen: of the model.
        dataset, validation_dataset, global_batch_size, bad_samples: of the data.
        num_nodes, devices_per_node: ranks.
        plan: `auto`, or the path of a plan file.
        options: of the planner.
        seed: of the run; None if the recipe sets none.
        cache_dir: of indexes, profiles and plans.
    """

    path: Path
    model_folder: str
    dataset: str
    global_batch_size: int
    num_nodes: int = 1
    devices_per_node: int = 1
    frozen: tuple[str, ...] = ()
    validation_dataset: str | None = None
    bad_samples: str = "error"
    plan: str = "auto"
    options: PlanOptions = field(default_factory=PlanOptions)
    seed: int | None = None
    cache_dir: str = "runs/cache"

    @property
    def name(self) -> str:
        """File name without its ending: the folder of its runs."""
        return self.path.stem


def read_recipe(path: str | Path) -> Recipe:
    """Read what the planner needs of a recipe.

    Raises:
        RuntimeConfigError: the file is missing or not YAML, a key of ours is misspelled, or a value cannot be.
    """
    import yaml

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RuntimeConfigError(f"recipe: expected a YAML file at {path}, found none.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RuntimeConfigError(f"recipe {path}: not valid YAML: {error}") from error
    reader = _Reader(path)
    content = reader.mapping(content, "recipe")
    trainer = reader.mapping(content.get("trainer") or {}, "trainer")
    strategy = reader.strategy(trainer.get("strategy"))
    module = reader.init_args(content.get("model"), "model", _MODULE, _MODULE_KEYS)
    data = reader.init_args(content.get("data"), "data", _DATA, _DATA_KEYS)
    for name, section, key in (
        ("model", module, "model"),
        ("data", data, "dataset"),
        ("data", data, "global_batch_size"),
    ):
        if section.get(key) is None:
            raise RuntimeConfigError(f"{path}: {name}.init_args.{key} is missing.")
    seed = content.get("seed_everything")
    return Recipe(
        path=path,
        model_folder=str(module["model"]),
        dataset=str(data["dataset"]),
        global_batch_size=reader.count(data["global_batch_size"], "data.init_args.global_batch_size"),
        num_nodes=reader.count(trainer.get("num_nodes") or 1, "trainer.num_nodes"),
        devices_per_node=reader.devices(trainer.get("devices", 1)),
        frozen=reader.names(module.get("frozen"), "model.init_args.frozen"),
        validation_dataset=None if data.get("validation_dataset") is None else str(data["validation_dataset"]),
        bad_samples=str(data.get("bad_samples", "error")),
        plan=str(strategy.get("plan") or "auto"),
        options=reader.options(strategy, trainer.get("precision") or "32-true"),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        cache_dir=str(strategy.get("cache_dir") or "runs/cache"),
    )


#: Lightning's older names of precisions.
_PRECISION_NAMES = {"32": "32-true", "bf16": "bf16-mixed"}


class _Reader:
    """Reads values of one file and names the file in every error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise RuntimeConfigError(f"{self.path}: {where}: expected a mapping of keys, found {value!r}.")
        return dict(value)

    def init_args(self, section: Any, where: str, class_name: str, keys: set[str]) -> dict[str, Any]:
        """Arguments of a `class_path` section (or of a section without one); ours are checked."""
        if section is None:
            raise RuntimeConfigError(f"{self.path}: {where} is missing; expected class_path entrain_opt.{class_name}.")
        section = self.mapping(section, where)
        if "class_path" not in section:
            raise RuntimeConfigError(
                f"{self.path}: {where}.class_path is missing; write class_path: entrain_opt.{class_name} and its "
                "arguments under init_args."
            )
        self.known(section, {"class_path", "init_args", "dict_kwargs"}, where)
        arguments = self.mapping(section.get("init_args") or {}, f"{where}.init_args")
        where_arguments = f"{where}.init_args"
        if str(section["class_path"]).rpartition(".")[2] != class_name:
            return arguments  # A class of the user's own, with arguments of its own.
        declared, takes_any = declared_arguments(class_name)
        if not takes_any or class_name == _STRATEGY:
            self.known(arguments, keys | declared, where_arguments)
        return arguments

    def strategy(self, value: Any) -> dict[str, Any]:
        """Arguments of our strategy; `entrain` alone has none."""
        if isinstance(value, Mapping):
            section = self.init_args(value, "trainer.strategy", _STRATEGY, _STRATEGY_KEYS)
            if "class_path" in value and str(value["class_path"]).rpartition(".")[2] == _STRATEGY:
                return section
        elif value == "entrain":
            return {}
        raise RuntimeConfigError(
            f"{self.path}: trainer.strategy: expected `entrain` or a class_path with init_args, found {value!r}. "
            f"Write\n{_SHORTHAND}"
        )

    def known(self, section: Mapping[str, Any], keys: set[str], where: str) -> None:
        for key in section:
            if key not in keys:
                near = difflib.get_close_matches(str(key), sorted(keys), n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {sorted(keys)}."
                raise RuntimeConfigError(f"{self.path}: {where}: unknown key {key!r}; {hint}")

    def count(self, value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RuntimeConfigError(f"{self.path}: {where}: expected a whole number of at least 1, found {value!r}.")
        return value

    def devices(self, value: Any) -> int:
        """Lightning takes a number, a list of device indices, or `auto`, which a plan cannot be made for."""
        if isinstance(value, list) and value:
            return len(value)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        return self.count(value, "trainer.devices")

    def names(self, value: Any, where: str) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RuntimeConfigError(f"{self.path}: {where}: expected a list of names, found {value!r}.")
        return tuple(value)

    def device(self, value: Any) -> dict[str, Any]:
        """Options of a device: a catalogue name, a cluster file, or a device described in place."""
        if value is None:
            return {}
        try:
            return device_options(value)
        except RuntimeConfigError as error:
            where = "trainer.strategy.init_args.device"
            raise RuntimeConfigError(f"{self.path}: {where}: {error}") from error

    def options(self, strategy: Mapping[str, Any], precision: Any) -> PlanOptions:
        values = {name: value for name, value in strategy.items() if name in _OPTION_NAMES and value is not None}
        values |= self.device(strategy.get("device"))
        memory_gib = strategy.get("memory_gib")
        if memory_gib is not None:
            if isinstance(memory_gib, bool) or not isinstance(memory_gib, (int, float)) or memory_gib <= 0:
                raise RuntimeConfigError(
                    f"{self.path}: trainer.strategy.init_args.memory_gib: expected GiB above 0, found {memory_gib!r}."
                )
            values["memory_bytes"] = int(memory_gib * GIB)
        for name in ("tensor_degrees", "context_degrees"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        values["precision"] = _PRECISION_NAMES.get(str(precision), str(precision))
        options = PlanOptions(**values)
        try:
            options.check()
        except PlanError as error:
            raise RuntimeConfigError(f"{self.path}: {error}") from error
        return options


def declared_arguments(class_name: str) -> tuple[set[str], bool]:
    """Arguments of a class of `entrain_opt.lightning`, from its source, and whether it takes others as well.

    Importing the class would import torch.
    """
    folder = Path(__file__).parent.parent / "lightning"
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name != class_name:
                continue
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    found = {a.arg for a in (*item.args.args, *item.args.kwonlyargs)} - {"self"}
                    return found, item.args.kwarg is not None
    return set(), True
