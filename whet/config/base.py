"""The base class of all settings."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import to_json

from whet.config.issues import ConfigIssue, SettingsError

_COMPUTE = "compute other values in a functools.cached_property"


def within(value: object) -> "Iterator[Config]":
    """Yield the value itself, if it is a config, and all nested configs."""
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
    """Typed, frozen settings without unknown keys; numbers must be finite.

    A string below a field documents it: ``whet show --explain`` prints it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    bare: ClassVar[str | None] = None
    """The field that is set by a plain string or number in place of a mapping."""

    alternatives: ClassVar[frozenset[str]] = frozenset()
    """Settings of which one is given: a file or an override that sets one replaces the others in its parents."""

    _preset: str = PrivateAttr("")  # the name of the preset in the recipe, if any

    def __init__(self, /, **settings: Any) -> None:
        """Raise ``SettingsError`` naming all wrong settings."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            from whet.config.validation import settings_error  # which imports this file

            raise settings_error(error, type(self), settings) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # settings within settings don't call it

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "__init__" not in vars(cls):
            return
        taken = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if not all(each.kind is each.VAR_KEYWORD or each.name in cls.model_fields for each in taken):
            names = ", ".join(map(str, taken))
            raise TypeError(
                f"{cls.__name__} defines __init__({names}), but its settings are fields, as in `path: str`; leave "
                f"__init__ out, and {_COMPUTE}"
            )

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __setattr__(self, name: str, value: object) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError:
                kind = type(self)
                reason = f"settings can't be changed; make new ones, as in {kind.__name__}({name}=...)"
                if name not in kind.model_fields:
                    reason = f"is not a setting: declare it as a field, or {_COMPUTE}"
                raise SettingsError([ConfigIssue(name, type(self).__name__, reason)]) from None

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Self:
        """Build from YAML or JSON values, in which tuples and sets are lists, and paths and choices are strings."""
        # Defaults are passed explicitly, because pydantic would validate a default ``Path`` as if it came from JSON.
        return cls.model_validate_json(to_json({**cls.defaults(), **values}, inf_nan_mode="constants"))

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Return the defaults of optional settings as JSON values."""
        optional = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
        values = {name: field.get_default(call_default_factory=True) for name, field in optional.items()}
        state = {"__dict__": values, "__pydantic_fields_set__": set()}
        settings = cls.__new__(cls)  # model_construct would call a model_post_init, which may read required settings
        settings.__setstate__(state | {"__pydantic_extra__": None, "__pydantic_private__": None})
        return settings.model_dump(mode="json", warnings=False)

    @classmethod
    def replaced_by(cls, given: Iterable[str]) -> frozenset[str]:
        """Return the settings that the ``given`` ones stand in place of, if one of them is an alternative."""
        chosen = cls.alternatives & set(given)
        return cls.alternatives - chosen if chosen else frozenset()

    @classmethod
    def other_name(cls, key: str) -> str | None:
        """Return the name of the setting here that corresponds to a key of another library."""
        return None

    def value_of(self, name: str) -> object:
        """Return the value of a setting by its name. Raises ``KeyError`` if there is no such setting."""
        return self.__dict__[name]

    def changed(self, names: Iterable[str]) -> dict[str, object]:
        """Return the named settings whose values are not the defaults, with these values."""
        fields = type(self).model_fields
        return {name: value for name in names if (value := self.value_of(name)) != fields[name].default}

    def check_available(self) -> None:
        """Raise ``WhetError`` if a model or an adapter that these settings name is missing here, and can't be
        downloaded. Uses no network. Nested settings are asked themselves."""

    def unused(self) -> dict[str, str]:
        """Return changed settings that no part of a run reads: dotted key -> reason."""
        return {}

    def with_implied(self, written: Callable[[str], bool]) -> tuple[Self, dict[str, str]]:
        """Return a copy with implied settings filled in, and these settings by dotted key with the setting that implies
        each. ``written(key)`` tells whether the recipe sets a key, which then stays."""
        return self, {}
