"""The inputs of a run, found in its settings: models, data, and files of the user's code."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, get_origin

from whet.base.digests import digest
from whet.base.errors import DataError, WhetError
from whet.base.files import expanded
from whet.config import Config
from whet.data.base import Data
from whet.data.files import data_files
from whet.fetch.adapter import base_of, is_adapter
from whet.fetch.megatron import METADATA, checkpoint_in
from whet.fetch.model import fetch_model
from whet.lineage.record import Input, Record, Session, maker_of, read_record
from whet.models.config import ModelConfig

log = logging.getLogger(__name__)

_WEB = ("hf:", "http://", "https://")
_OF_MODELS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def inputs_of(settings: Config, run: Path) -> tuple[Input, ...]:
    """Return everything that a run with these settings reads. ``run`` is its folder. What can't be read is logged, and
    recorded without digests."""
    inputs = [each for key, part in _parts(settings, "") for each in _of_part(key, part, run)]
    return tuple({(each.setting, each.name): each for each in inputs}.values())


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that decide its output."""
    files = {path for pattern in _OF_MODELS for path in folder.glob(pattern) if path.name != "lineage.json"}
    if (checkpoint := checkpoint_in(folder)) is not None:
        files |= {checkpoint / METADATA, *checkpoint.glob("*.distcp")}
    return sorted(files)


def _parts(value: object, key: str) -> Iterator[tuple[str, Config]]:
    """Yield all nested settings with their dotted keys."""
    if isinstance(value, Config):
        yield key, value
        for name, part in value:
            yield from _parts(part, f"{key}.{name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _parts(part, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _parts(part, f"{key}.{number}")


def _of_part(key: str, part: Config, run: Path) -> Iterator[Input]:
    if not type(part).__module__.startswith("whet."):
        yield from _code(key, type(part), run)
    settings = dict(part)
    if isinstance(part, ModelConfig):
        yield from _model(key, part.path, part.revision, run)
    elif isinstance(part, Data):
        for name, value in settings.items():
            if not isinstance(value, str) or get_origin(type(part).model_fields[name].annotation) is Literal:
                continue  # a choice names no file, as the path of gold answers
            if name == "path" or name.endswith("_path"):
                yield _data(f"{key}.{name}", value, run)
            elif name == "model":
                yield from _model(f"{key}.{name}", value, settings.get("revision"), run)
            elif (file := _file_of_function(value)) is not None:
                yield _of_files(f"{key}.{name}", value, partial(list, [file]), run, whole=True)
    replay = settings.get("replay")
    if isinstance(replay, str):
        record = maker_of([Path(replay) / "recipe.yaml"], run)
        yield Input(setting=f"{key}.replay", name=replay, maker=record)


def _data(setting: str, path: str, run: Path) -> Input:
    if path.startswith(_WEB):
        return Input(setting=setting, name=path)
    return _of_files(setting, path, lambda: [file.absolute() for file in data_files(path)], run, whole=True)


def _model(setting: str, path: str, revision: str | None, run: Path) -> Iterator[Input]:
    """Yield a model and, for an adapter, its base model. The folder of a Hub id is called after its commit."""
    folder = expanded(path)
    local = folder.is_dir()
    if not local:
        try:
            folder = fetch_model(path, revision)
        except WhetError:  # a model behind an API, which has only a name here
            yield Input(setting=setting, name=path)
            return
    elif is_adapter(folder):
        yield from _model(f"{setting} (base)", *base_of(folder), run)
    model = _of_files(setting, path, lambda: model_files(folder.absolute()), run, whole=False)
    commit = folder.name if not local and folder.parent.name == "snapshots" else ""
    yield model.model_copy(update={"revision": commit})


def _file_of_function(path: str) -> Path | None:
    """Return the file of a user's function, as ``rewards.py:length`` or ``rewards:length``, which the run has loaded;
    None for other texts."""
    module, colon, name = path.rpartition(":")
    if not colon or not name.isidentifier() or module.partition(".")[0] == "whet":
        return None
    file = module if module.endswith(".py") else getattr(sys.modules.get(module), "__file__", None)
    return Path(file).absolute() if file and Path(file).is_file() else None


def _code(setting: str, kind: type[Config], run: Path) -> Iterator[Input]:
    """Yield the file of a user's class."""
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # of a notebook or a terminal
        return
    if file is not None and Path(file).is_file():
        name = f"{kind.__module__}:{kind.__qualname__}"
        yield _of_files(setting, name, lambda: [Path(file).absolute()], run, whole=True)


def _of_files(setting: str, name: str, list_files: Callable[[], list[Path]], run: Path, *, whole: bool) -> Input:
    try:
        files = list_files()
        digests = {str(file): digest(file, whole=whole) for file in files}
    except (WhetError, OSError) as error:
        log.warning("the lineage of %s = %s is not recorded: %s", setting, name, error)
        return Input(setting=setting, name=name)
    return Input(setting=setting, name=name, files=digests, maker=maker_of(files, besides=run))


def record_run(settings: Config, folder: Path, seed: int, *, again: bool = False) -> None:
    """Write the lineage of a run into its folder. ``again``: the run is resumed, and what it read before stays in the
    record; a warning names each file that was changed since, each input that is now another one, and another seed. So
    it does for files of prepared data and exports that are
    not as they were made."""
    inputs, session = inputs_of(settings, folder), Session.now()
    for problem in (line for each in inputs for line in each.unlike_made()):
        log.warning("%s", problem)
    earlier = None
    try:
        earlier = read_record(folder) if again else None
    except DataError as error:
        log.warning("%s; the lineage begins with this process", error)
    if earlier is not None:
        for problem in (*earlier.problems(), *earlier.replaced(inputs)):
            log.warning("%s", problem)
        if earlier.seed not in (None, seed):
            text = "seed: the run began with %s, and continues with %d: this pass may repeat or leave out tasks or rows"
            log.warning(text, earlier.seed, seed)
        now = {(each.setting, each.name, tuple(each.files.items())) for each in inputs}
        before = [e for e in earlier.inputs if (e.setting, e.name, tuple(e.files.items())) not in now]
        inputs = (*before, *inputs)
    sessions = (*(earlier.sessions if earlier else ()), session)
    recipe = digest(folder / "recipe.yaml")
    record = Record(kind="run", folder=str(folder), sessions=sessions, seed=seed, recipe=recipe, inputs=inputs)
    record.write(folder)
