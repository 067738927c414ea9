"""Fields of a Hugging Face config: defaults of their type filled in, values checked where they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError


class Fields:
    """A config, or a part of one, with the defaults of its type.

    A value of null counts as absent, except for the names in `nullable`, where it means "none".

    Args:
        given: what the JSON file says.
        defaults: of the model type.
        where: file and part, for messages.
        nullable: fields that may be null.
    """

    def __init__(
        self, given: Mapping[str, Any], defaults: Mapping[str, Any], where: str, nullable: Iterable[str] = ()
    ) -> None:
        keep = set(nullable)
        self.values = {**defaults, **{key: value for key, value in given.items() if value is not None or key in keep}}
        self.given = given
        self.where = where

    def first(self, *names: str) -> Any:
        """The value of a field that has several names: what the config says under any, else the default, else None."""
        for source in (self.given, self.values):
            if (found := next((source[name] for name in names if source.get(name) is not None), None)) is not None:
                return found
        return None

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def flag(self, name: str) -> bool:
        """A true or false field; false where it is absent.

        Raises:
            RuntimeConfigError: it is something else.
        """
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise RuntimeConfigError(f"{self.where}: {name}: expected true or false, found {value!r}.")
        return value

    def drops(self, *names: str) -> bool:
        """Whether any of these rates of dropout is above 0.

        Raises:
            RuntimeConfigError: a rate is not a number from 0 to below 1.
        """
        for name in names:
            rate = self.values.get(name, 0.0)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
                raise RuntimeConfigError(f"{self.where}: {name}: expected a number from 0 to below 1, found {rate!r}.")
        return any(self.values.get(name, 0.0) > 0 for name in names)

    def count(self, *names: str, minimum: int = 1) -> int:
        """A whole number, under any of its names.

        Raises:
            RuntimeConfigError: it is absent, not a whole number, or too small.
        """
        value = self.first(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise RuntimeConfigError(
                f"{self.where}: {names[0]}: expected a whole number of at least {minimum}, found {value!r}."
            )
        return value

    def share(self, name: str, whole: int, what: str) -> int:
        """`whole` divided by a count that must divide it.

        Raises:
            RuntimeConfigError: it does not.
        """
        parts = self.count(name)
        if whole % parts:
            raise RuntimeConfigError(f"{self.where}: {name}: expected a divisor of {what} {whole}, found {parts}.")
        return whole // parts

    def indices(self, name: str, total: int) -> tuple[int, ...]:
        """Layer numbers below `total`; empty where absent.

        Raises:
            RuntimeConfigError: not a list of such numbers.
        """
        value = self.values.get(name) or ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(i, int) and 0 <= i < total for i in value):
            raise RuntimeConfigError(f"{self.where}: {name}: expected layer numbers below {total}, found {value!r}.")
        return tuple(value)


def part(config: Mapping[str, Any], name: str, where: str) -> dict[str, Any] | None:
    """The object under a name, or None if it is absent or null.

    Raises:
        RuntimeConfigError: it is something else.
    """
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise RuntimeConfigError(f"{where}: {name}: expected an object, found {value!r}.")
    return value


def unknown(
    where: str,
    expected: Iterable[str],
    found: object,
    *,
    write: str = "its defaults and its formula of parameters in entrain_opt/spec/families/",
) -> RuntimeConfigError:
    """The error for a model type that nothing here knows; `write` is what somebody who adds it has to write."""
    return RuntimeConfigError(
        f"{where}: expected one of {sorted(expected)}, found {found!r}. To add it, write {write}: see {FAMILY_GUIDE}."
    )


def known_type(given: Mapping[str, Any], where: str, known: Iterable[str], *, default: str, fixed: bool = False) -> str:
    """The model type of a part.

    Args:
        given: its config.
        where: file and part, for messages.
        known: types that a reader takes.
        default: where the config has none.
        fixed: that type is the only one, whatever the config says.

    Raises:
        RuntimeConfigError: another type.
    """
    name = default if fixed else given.get("model_type", default)
    if name not in known:
        raise unknown(f"{where}.model_type", known, name)
    return str(name)
