"""Which packages this one needs, and which of them are there; read from metadata, nothing is imported.

The list is that of pyproject.toml: the file itself in a checkout, else what the installation recorded of it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from entrain_opt.errors import RuntimeConfigError

DISTRIBUTION = "entrain-opt"
#: Releases that were published by somebody else with malicious code: importing them is what must not happen.
COMPROMISED = {"pytorch-lightning": ("2.6.2", "2.6.3")}
#: What the optional packages are for.
NEEDED_FOR = {
    "av": "videos: their lengths and frames",
    "peft": "LoRA adapters (lora: ...)",
    "ray": "entrain index --engine ray",
    "soundfile": "audio files other than PCM WAV",
    "soxr": "audio with another sampling rate than the model's",
}
#: Names to import, where they differ from the distribution's.
_MODULES = {"pillow": "PIL", "pyyaml": "yaml", "pytorch-lightning": "pytorch_lightning"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that is needed always, or by an extra.

    Attributes:
        name: of the distribution.
        specifier: versions that will do, such as `>=2.11`; empty for any.
        version: installed; None if it is missing.
        fits: whether that version will do.
        optional: whether only some uses need it.
    """

    name: str
    specifier: str
    version: str | None
    fits: bool
    optional: bool

    @property
    def module(self) -> str:
        """The name to import."""
        return _MODULES.get(self.name, self.name.replace("-", "_"))

    @property
    def fix(self) -> str:
        """The command that installs it."""
        return f'{sys.executable} -m pip install "{self.name}{self.specifier}"'


def installed_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compromised_packages() -> list[str]:
    """Sentences that name every installed release that must not be used; empty if there is none."""
    found = {name: installed_version(name) for name in COMPROMISED}
    return [
        f"{name} {version} is a compromised release: it was published with malicious code, which runs when it is "
        "imported. Remove it now, and change the passwords and tokens that this machine could read."
        for name, version in found.items()
        if version in COMPROMISED[name]
    ]


def refuse_compromised() -> None:
    """Raise RuntimeConfigError if a compromised release is installed, before it is imported."""
    for sentence in compromised_packages():
        raise RuntimeConfigError(f"{sentence} `pip install 'pytorch-lightning>=2.6.4'` replaces it.")


def read_packages() -> list[Package]:
    """Every package of the list, required ones first; development tools are left out.

    Raises:
        RuntimeConfigError: this package itself is not installed, so nothing says what it needs.
    """
    from packaging.requirements import Requirement

    required, optional = [], {}
    for line, extra in _requirement_lines():
        requirement = Requirement(line)
        if extra is not None and requirement.name not in NEEDED_FOR:
            continue
        version = installed_version(requirement.name)
        package = Package(
            name=requirement.name,
            specifier=str(requirement.specifier),
            version=version,
            fits=version is not None and requirement.specifier.contains(version, prereleases=True),
            optional=extra is not None,
        )
        if extra is None:
            required.append(package)
        else:
            optional[package.name] = package
    return [*required, *(optional[name] for name in sorted(optional))]


def _requirement_lines() -> list[tuple[str, str | None]]:
    """(requirement, name of the extra that asks for it)."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            extras = project["optional-dependencies"].items()
            of_extras = [(line, extra) for extra, lines in extras for line in lines]
            return [*((line, None) for line in project["dependencies"]), *of_extras]
    try:
        recorded = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise RuntimeConfigError(
            f"{DISTRIBUTION} is not installed, it only lies on the path. Run `pip install -e .` in its folder."
        ) from error
    found = [(line, re.search(r"extra == ['\"](\w+)", line)) for line in recorded]
    return [(line.partition(";")[0], match and match[1]) for line, match in found]
