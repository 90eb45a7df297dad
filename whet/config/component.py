"""Fields whose class is chosen by ``type:``, a built-in name or the dotted path of a user-defined class.

A mapping such as ``{type: gsm8k, limit: 10}`` or a bare name is converted to an instance of the named ``Config``. Only
the chosen class is imported. Independent of YAML and files.

    data: Annotated[TaskSet, Component({"gsm8k": "whet.tasks.math.dataset:GSM8K"})]
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, SerializationInfo, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from whet.base.errors import WhetError
from whet.base.extras import MissingExtraError
from whet.config.base import Config
from whet.config.issues import did_you_mean
from whet.config.moved import MOVED
from whet.processes.user_code import user_frames

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
"""Suffixes of data files."""


class ComponentError(ValueError):
    """The name given as ``type`` does not resolve to a usable class."""


@dataclass(frozen=True, eq=False)
class Component:
    """Marks a field, by ``Annotated[Base, Component(registry)]``, as chosen by ``type``.

    The field accepts an instance of ``Config``, a mapping with ``type``, or a bare name, and is serialised as a mapping
    with ``type``. The default may be any of the three; a name (``Field(default="ppo")``) is imported only when it is
    used. A name may also refer to a preset, an instance whose settings are then the defaults.
    """

    registry: Mapping[str, str]  # built-in name -> "module:Class", or "module:VALUE" for a preset
    removed_names: Mapping[str, str] = field(default_factory=dict)  # former name -> what to write instead

    @property
    def names(self) -> str:
        return ", ".join(self.registry) or "none"

    def resolve(self, name: str, base: object = Config) -> tuple[type[Config], Config | None]:
        """Return the class called ``name``, and the instance if it names a preset. Raises ComponentError if the name
        does not resolve to a class derived from ``base``."""
        if name in self.removed_names:
            raise ComponentError(f"the type {name} was removed: {self.removed_names[name]}")
        dotted = self.registry.get(name, name)
        if dotted == name and name.lower().endswith(DATA_FILES):
            readers = self.alternatives_with("path")
            how = f"; name a type that reads files, as in {{type: {readers[-1]}, path: {name}}}" if readers else ""
            raise ComponentError(
                f"{name!r} is a file, not a type{how}. Types with a path: {', '.join(readers) or 'none'}"
            )
        if dotted == name and "." not in name and ":" not in name:
            raise ComponentError(
                f"unknown type {name!r}.{did_you_mean(name, self.registry)} Known: {self.names}; "
                "or the dotted path of a class, as in my_module:MyClass"
            )
        target = import_path(dotted)
        preset, cls = (target, type(target)) if isinstance(target, Config) else (None, target)
        if not (isinstance(cls, type) and issubclass(cls, Config)):
            raise ComponentError(f"{dotted} is not a class derived from whet.config.Config")
        if "type" in cls.model_fields:
            raise ComponentError(f"{dotted} has a field called 'type', which names the class in a recipe; rename it")
        _check_base(cls, base)
        if inspect.isabstract(cls):
            raise ComponentError(f"{component_path(cls)} must define {', '.join(sorted(cls.__abstractmethods__))}")
        return cls, preset

    def alternatives_with(self, key: str) -> list[str]:
        """Return the names of the types that have a setting ``key``."""
        alternatives = []
        for name in self.registry:
            with suppress(ComponentError):
                alternatives += [name] if key in self.resolve(name)[0].model_fields else []
        return alternatives

    def name_of(self, cls: type) -> str:
        """Return the ``type`` of a class: its built-in name, or its path."""
        path = component_path(cls)
        return next((name for name, target in self.registry.items() if target == path), path)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            partial(self._validate, source),
            serialization=core_schema.plain_serializer_function_ser_schema(self._serialise, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, core: "CoreSchema", handler: GetJsonSchemaHandler) -> dict[str, object]:
        return {"component": self.names}

    def _validate(self, source: object, value: object, info: ValidationInfo) -> Config:
        if isinstance(value, Config):
            _check_base(type(value), source)
            return value
        settings = dict(value) if isinstance(value, Mapping) else {"type": value}
        name = settings.pop("type", None)
        if not isinstance(name, str):
            raise PydanticCustomError("component", "'type' is missing; known: {names}", {"names": self.names})
        try:
            cls, preset = self.resolve(name, source)
        except ComponentError as error:
            reason = PydanticCustomError("component", "{reason}", {"reason": str(error)})
            details = InitErrorDetails(type=reason, loc=("type",), input=name)
            raise ValidationError.from_exception_data("component", [details]) from None
        try:
            if info.mode == "json":
                chosen = cls.from_values((preset.model_dump(mode="json") if preset is not None else {}) | settings)
            else:
                chosen = cls.model_validate(({} if preset is None else dict(preset)) | settings)
        except (ValueError, AssertionError, WhetError):  # these say which setting is wrong
            raise
        except Exception as error:
            failed = f"{component_path(cls)} can't be made: {_reason(error)}"
            raise PydanticCustomError("component", "{reason}", {"reason": failed}) from error
        if preset is not None:
            chosen._preset = name
        return chosen

    def _serialise(self, value: object, info: SerializationInfo) -> object:
        if not isinstance(value, Config):
            return value
        return {"type": value._preset or self.name_of(type(value)), **value.model_dump(mode=info.mode)}


def component_path(cls: type | Callable[..., object]) -> str:
    """Return ``"module:Class"``, from which the class can be imported again, or ``"/path/to/script.py:Class"`` for a
    class in the running script."""
    module = cls.__module__
    if module == "__main__":
        script = getattr(sys.modules[module], "__file__", None)
        module = os.path.abspath(script) if script and script.endswith(".py") else module
    return f"{module}:{cls.__qualname__}"


def cannot_be_found(cls: type) -> bool:
    """Return whether no other process can import the class, because it is defined in a notebook or a function."""
    path = component_path(cls)
    return path.startswith("__main__:") or "<locals>" in path


def import_path(path: str) -> object:
    """Import ``"module:name"`` or ``"module.name"`` from installed packages or the current folder.

    Raises ComponentError with file and line if the module itself fails.
    """
    if ".py:" in path:
        return _attribute(*_import_file(path.rpartition(":")[0]), path.rpartition(":")[2])
    if path.endswith(".py"):
        raise ComponentError(f"{path!r} names a file; name what it holds, as in {path}:NAME")
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute or module_name.startswith("."):
        raise ComponentError(f"{path!r} is not a dotted path such as my_module:MyClass")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # At the end: a file called random.py in the current folder must not shadow a library.
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except MissingExtraError as error:
        raise ComponentError(str(error)) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and module_name in MOVED:
            raise ComponentError(f"{path} has moved: write {MOVED[module_name]}:{attribute}") from error
        raise ComponentError(_failure(module_name, error)) from error
    where = getattr(module, "__file__", None) or "a folder without modules"
    return _attribute(f"{module_name} ({where})", module, attribute)


_importing = list[str]()


def importing() -> bool:
    """Return whether a script is being imported for its definitions."""
    return bool(_importing)


def _attribute(where: str, module: ModuleType, path: str) -> object:
    value: Any = module
    for name in path.split("."):
        if not hasattr(value, name):
            public = [other for other in vars(value) if not other.startswith("_")]
            raise ComponentError(f"{where} has no {name!r}.{did_you_mean(name, public)}")
        value = getattr(value, name)
    return value


def _import_file(file: str) -> tuple[str, ModuleType]:
    """Import a file as a module named by its path, or return ``__main__`` if it is the running script."""
    full = os.path.abspath(os.path.expanduser(file))
    main = sys.modules.get("__main__")
    if main is not None and os.path.abspath(getattr(main, "__file__", None) or os.sep) == full:
        return full, main
    if full not in sys.modules:
        if not os.path.isfile(full):
            raise ComponentError(f"there is no file {full}")
        spec = importlib.util.spec_from_file_location(full, full)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        sys.path.append(os.path.dirname(full))  # a script can import modules in its folder
        _importing.append(full)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[full]
            raise ComponentError(_failure(full, error)) from error
        finally:
            _importing.remove(full)
    return full, sys.modules[full]


def _failure(module: str, error: BaseException) -> str:
    """Return why a module can't be imported, and where."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing and f"{module}.".startswith(f"{missing}."):
        return f"there is no module {missing!r}: searched {os.getcwd()} and the installed packages"
    if missing:
        return f"module {module!r} needs {missing!r}, which is not installed{_place(error)}"
    return f"module {module!r} can't be imported: {_reason(error)}"


def _reason(error: BaseException) -> str:
    """Return the kind of an exception, its text in one line, and where it was raised."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} at {error.filename}:{error.lineno}"
    text = " ".join(str(error).partition("\n\nFor further information visit")[0].split())  # of pydantic
    return f"{type(error).__name__}{': ' if text else ''}{text}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the last frame of an exception outside the import system and this file."""
    frames = user_frames(error)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _check_base(cls: type[Config], base: object) -> None:
    if not isinstance(base, type):
        return
    if getattr(base, "_is_protocol", False):
        required = {*vars(base), *inspect.get_annotations(base)}
        members = {name for parent in cls.__mro__ for name in vars(parent)} | set(cls.model_fields)
        missing = sorted(name for name in required - members if name == "__call__" or not name.startswith("_"))
        if missing:
            raise ComponentError(f"{component_path(cls)} is not a {base.__name__}: it lacks {', '.join(missing)}")
    elif not issubclass(cls, base):
        raise ComponentError(f"{component_path(cls)} is not a {base.__name__}: derive it from {component_path(base)}")
