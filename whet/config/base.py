"""The base class of everything that can be configured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic_core import to_json


def within(value: object) -> "Iterator[Config]":
    """Return the configs in a value, itself and those at any depth."""
    parts: Iterable[object] = ()
    if isinstance(value, Config):
        yield value
        parts = [part for _, part in value]
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts:
        yield from within(part)


class Config(BaseModel):
    """Frozen, typed, without unknown keys; numbers must be finite. A component is a Config with one verb.

    A string below a field documents it: ``whet show --explain`` prints it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    bare: ClassVar[str | None] = None
    """The setting that a text or number in the place of the whole stands for."""

    _preset: str = PrivateAttr("")  # the name of the preset that a recipe chose it by

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build from values of YAML or JSON, in which tuples and sets are lists, and paths and choices are texts."""
        # The defaults are written out, because pydantic would check a ``Path`` among them as if it came from JSON.
        return cls.model_validate_json(to_json({**cls.defaults(), **values}, inf_nan_mode="constants"))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the settings that need not be given, in JSON values."""
        return cls.model_construct().model_dump(mode="json", warnings=False)

    @classmethod
    def other_name(cls, key: str) -> str | None:
        """Return where an unknown key, which other libraries have, is set here."""
        return None

    def unread(self) -> dict[str, str]:
        """Return the settings, by dotted key, that differ from their defaults and that nothing reads, and why."""
        return {}

    def completed(self, written: Callable[[str], bool]) -> tuple[Self, dict[str, str]]:
        """Return it with the settings that follow from others where they are not ``written``; and these, by dotted key,
        with the setting that each follows from."""
        return self, {}
