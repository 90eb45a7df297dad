"""Fields whose class is chosen by ``type:``, a built-in name or the dotted path of a user's own class.

A mapping such as ``{type: gsm8k, limit: 10}`` or a bare name comes in; an instance of the named ``Config`` comes out.
Only the chosen class is imported. It doesn't know YAML, files or what the component does.

    data: Annotated[TaskSet, Component({"gsm8k": "whet.environments.gsm8k:GSM8K"})]
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from whet.config.base import Config
from whet.config.nearest import did_you_mean


class ComponentError(ValueError):
    """The name given as ``type`` leads to no usable class."""


@dataclass(frozen=True, eq=False)
class Component:
    """Marks a field, by ``Annotated[Base, Component(registry)]``, as chosen by ``type``.

    The field accepts an instance of ``Config``, a mapping with ``type``, or a bare name, and is written back as a
    mapping with ``type``. A field's default may be any of the three; a name (``Field(default="ppo")``) is imported only
    when it is used.
    """

    registry: Mapping[str, str]  # built-in name -> "module:Class"
    base: str | None = None  # "module:Class" checked instead of the annotated type, where importing that would be heavy

    def resolve(self, name: str) -> type[Config]:
        """The class called ``name``. Raises ComponentError saying why there is none."""
        dotted = self.registry.get(name, name)
        if dotted == name and "." not in name and ":" not in name:
            known = ", ".join(self.registry) or "none"
            raise ComponentError(
                f"unknown type {name!r}.{did_you_mean(name, self.registry)} Known: {known}; "
                "or the dotted path of a class, as in my_module:MyClass"
            )
        found = import_path(dotted)
        if not (isinstance(found, type) and issubclass(found, Config)):
            raise ComponentError(f"{dotted} is not a class derived from whet.config.Config")
        if "type" in found.model_fields:
            raise ComponentError(f"{dotted} has a field called 'type', which names the class in a recipe; rename it")
        return found

    def name_of(self, cls: type) -> str:
        """What to write as ``type`` for a class."""
        path = component_path(cls)
        return next((name for name, target in self.registry.items() if target == path), path)

    def as_mapping(self, value: BaseModel) -> dict[str, Any]:
        """The instance as a mapping with ``type``, in JSON values."""
        return {"type": self.name_of(type(value)), **value.model_dump(mode="json")}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            partial(self._validate, source),
            serialization=core_schema.plain_serializer_function_ser_schema(self._serialise, info_arg=True),
        )

    def _validate(self, source: Any, value: Any, info: ValidationInfo) -> Config:
        base = import_path(self.base) if self.base else source
        if isinstance(value, Config):
            _check_base(type(value), base)
            return value
        if isinstance(value, str):
            name, settings = value, {}
        elif isinstance(value, Mapping):
            settings = dict(value)
            name = settings.pop("type", None)
        else:
            name = None
        if not isinstance(name, str):
            known = ", ".join(self.registry) or "none"
            raise PydanticCustomError("component", "{reason}", {"reason": f"'type' is missing; known: {known}"})
        try:
            cls = self.resolve(name)
            _check_base(cls, base)
            _check_complete(cls)
        except ComponentError as error:
            reason = PydanticCustomError("component", "{reason}", {"reason": str(error)})
            details = InitErrorDetails(type=reason, loc=("type",), input=name)
            raise ValidationError.from_exception_data("component", [details]) from None
        return cls.model_validate(settings, context=info.context)

    def _serialise(self, value: Any, info: SerializationInfo) -> Any:
        if not isinstance(value, Config):
            return value
        return {"type": self.name_of(type(value)), **value.model_dump(mode=info.mode)}


def component_path(cls: type) -> str:
    """``"module:Class"``, from which the class can be imported again."""
    return f"{cls.__module__}:{cls.__qualname__}"


def import_path(path: str) -> Any:
    """What ``"module:name"`` or ``"module.name"`` names. The current folder is importable, after installed packages.

    Raises ComponentError with the file and line when the module itself fails.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute or module_name.startswith("."):
        raise ComponentError(f"{path!r} is not a dotted path such as my_module:MyClass")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # At the end: a file called random.py in the current folder must not hide a library.
        sys.path.append(here)
        importlib.invalidate_caches()
    module = _guarded(partial(importlib.import_module, module_name), module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            where = getattr(module, "__file__", None) or module_name
            raise ComponentError(f"{module_name} ({where}) has no {part!r}.{did_you_mean(part, public)}")
        found = getattr(found, part)
    return found


def _guarded(importing: Callable[[], Any], module: str) -> Any:
    try:
        return importing()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(missing + "."):
            raise ComponentError(
                f"there is no module {missing!r}: looked in {os.getcwd()} and in the installed packages"
            ) from None
        raise ComponentError(f"module {module!r} needs {missing!r}, which is not installed{_at(error)}") from error
    except SyntaxError as error:
        where = f" at {error.filename}:{error.lineno}" if error.filename else ""
        raise ComponentError(f"module {module!r} can't be imported: {error.msg}{where}") from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ComponentError(f"module {module!r} can't be imported: {reason}{_at(error)}") from error


def _at(error: BaseException) -> str:
    """Where the user's code failed: the last frame outside the import machinery and this file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _check_base(cls: type, base: Any) -> None:
    if not isinstance(base, type):
        return
    if getattr(base, "_is_protocol", False):
        fields = getattr(cls, "model_fields", {})
        wanted = {name for name in {**vars(base), **vars(base).get("__annotations__", {})} if _is_member(name)}
        has = {name for parent in cls.__mro__ for name in vars(parent)} | set(fields)
        missing = sorted(wanted - has)
        if missing:
            raise ComponentError(f"{component_path(cls)} is not a {base.__name__}: it lacks {', '.join(missing)}")
    elif not issubclass(cls, base):
        raise ComponentError(f"{component_path(cls)} is not a {base.__name__}: derive it from {component_path(base)}")


def _check_complete(cls: type[Config]) -> None:
    if inspect.isabstract(cls):
        raise ComponentError(f"{component_path(cls)} must define {', '.join(sorted(cls.__abstractmethods__))}")


def _is_member(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")
