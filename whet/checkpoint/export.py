"""Export of a checkpoint to an ordinary model folder, which transformers and peft load without whet.

The run's recipe names the base model, the checkpoint has the trained weights; LoRA is merged, or written as a PEFT
adapter. A reward model becomes a sequence classifier. The folder is written completely or not at all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from whet.base.errors import ConfigError, WhetError
from whet.base.extras import require
from whet.base.files import check_writable, expanded
from whet.base.lazy import FileDtype
from whet.base.staged_folder import staged_folder
from whet.base.strict_json import JsonObject
from whet.checkpoint.card import Kind, ModelClass, model_card
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.exported_files import (
    gguf_name,
    replace_by_gguf,
    saved_dtype,
    whole_model,
    write_adapter,
    write_megatron_files,
    write_safetensors,
    write_tokenizer,
)
from whet.checkpoint.gguf_file import GgufType, check_gguf
from whet.checkpoint.megatron_file import check_megatron
from whet.checkpoint.policy import load_policy
from whet.checkpoint.reward_model import ROLE, load_reward_model
from whet.checkpoint.store import Checkpoint, CheckpointStore, Which
from whet.config import Config, parse_mapping
from whet.config.issues import SettingsError
from whet.config.tree import from_plain
from whet.config.validation import got, issues_of
from whet.lineage.exports import note_export, of_export, with_files
from whet.lineage.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from whet.models.config import ModelConfig

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    path: Path  # the folder, or the GGUF file in it
    step: int  # of the checkpoint
    lineage: Record


def export(
    run: Path,
    out: Path,
    step: Which | None = None,
    *,
    adapter_only: bool = False,
    dtype: FileDtype | None = None,
    gguf: GgufType | None = None,
    megatron: bool = False,
    force: bool = False,
    policy: str = "",
) -> Exported:
    """Write the policy or reward model of a run's checkpoint to the folder ``out``. ``policy`` is the name of one of
    its further policies.

    ``adapter_only`` writes the LoRA adapter instead of merging it. ``dtype`` is the base model's by default. ``gguf``
    writes one GGUF file with matrices of this type instead of transformers' files, ``megatron`` a checkpoint of
    Megatron Core in place of safetensors. Raises ``ConfigError`` if ``out`` is a file, a nonempty folder without
    ``force``, a folder that another process is writing, the place of the run's checkpoints or base model, or in a
    folder that can't be written, ``CheckpointError`` if there is no such intact checkpoint.
    """
    from whet.models.config import ModelConfig
    from whet.models.loading import load_model_config

    if Path.cwd().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the working folder, which an export would replace; name a folder to create")
    _check_free(out, force)
    for folder in (out, out.absolute().parent):  # a folder that is write-protected is not replaced through its parent
        check_writable(folder)
    recipe = _of_policy(_recipe(run), run, policy)
    config = _section(ModelConfig, recipe, "model", run)
    _check_kept(out, run / "checkpoints", expanded(config.path))
    if adapter_only and config.lora is None:
        raise ConfigError(f"{run} was trained without LoRA, so it has no adapter; export it without --adapter")
    settings = _section(CheckpointConfig, recipe, "checkpoints", run)

    def write(checkpoint: Checkpoint) -> Exported:
        judges = (checkpoint.folder / ROLE).is_dir()
        if judges and adapter_only:
            raise ConfigError(
                f"{run} trained a reward model, whose head is not in the adapter; export it without --adapter"
            )

        if gguf is not None or megatron:
            _check_whole(run, config, judges or adapter_only, "--megatron" if gguf is None else "--gguf")
        if gguf is not None:
            _check_gguf(config, dtype, megatron)
        elif megatron:
            check_megatron(load_model_config(config))
        lineage = of_export(run, checkpoint.folder, checkpoint.step, out)
        with staged_folder(out) as staging:
            _check_free(out, force)  # again, as another export may have ended meanwhile
            padding = write_tokenizer(config, recipe.get("chat_template"), staging, judges)
            model = load_reward_model(checkpoint.folder, config) if judges else load_policy(checkpoint, config, policy)
            if padding is not None:
                model.config.pad_token_id = model.config.get_text_config().pad_token_id = padding
            kind: Kind = (
                "reward model" if judges else "adapter" if adapter_only else "megatron" if megatron else "policy"
            )
            saved = saved_dtype(config, dtype, gguf)
            if adapter_only:
                write_adapter(model, config, saved, staging)
            else:
                whole = whole_model(model, config, run, saved, gguf)
                (write_megatron_files if megatron else write_safetensors)(whole, staging)
            saved_as = str(saved).removeprefix("torch.")
            if gguf is not None:
                saved_as, kind = gguf, "gguf"
                replace_by_gguf(staging, gguf, out.name)
            for file in staging.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors writes 0600, which locks out other users, such as a server's
            loader = _loader(model, config, kind)
            card = model_card(run, recipe, checkpoint, config.path, saved_as, kind, loader, lineage, policy)
            (staging / "README.md").write_text(card, encoding="utf-8")
            lineage = with_files(lineage, staging)
            lineage.write(staging)
        note_export(run, out)
        return Exported(out / gguf_name(gguf) if gguf else out, checkpoint.step, lineage)

    return CheckpointStore(run / "checkpoints", settings).read(write, step)


def _section(kind: type[C], recipe: JsonObject, key: str, run: Path) -> C:
    """Return the settings of a section. Raises ``SettingsError`` naming the file and each wrong key."""
    values, where = recipe.get(key) or {}, f"{run / 'recipe.yaml'}: {key}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping, got {got(values)}")
    try:
        return kind.from_values(values)
    except ValidationError as error:
        raise SettingsError(issues_of(error, kind, from_plain(values, where))) from None


def _of_policy(recipe: JsonObject, run: Path, name: str) -> JsonObject:
    """Return the recipe with the model of one of its further policies, or unchanged without a name."""
    if not name:
        return recipe
    policies = recipe.get("policies") or {}
    if not isinstance(policies, dict) or not isinstance(policies.get(name, {}), dict):
        raise ConfigError(f"{run / 'recipe.yaml'}: policies: expected a mapping whose values are mappings")
    if name not in policies:
        names = ", ".join(policies) or "none, so leave --policy out"
        raise ConfigError(f"{run} has no further policy {name!r}; there are: {names}")
    section = policies[name]
    if section.get("model") or section.get("chat_template"):
        recipe = recipe | {"chat_template": section.get("chat_template")}
    return recipe | {"model": section.get("model") or recipe["model"]}


def _loader(model: "PreTrainedModel", config: "ModelConfig", kind: Kind) -> ModelClass:
    """Return the class that loads the exported model."""
    from whet.models.sequence_classifier import family_class, in_transformers

    if kind == "reward model":
        if in_transformers(model.config):
            return ModelClass("AutoModelForSequenceClassification")
        return ModelClass(type(model).__name__, family_class(type(model)).__name__)
    if config.vision is not None:  # also of an adapter, whose base model transformers finds
        return ModelClass("AutoModelForImageTextToText")
    return ModelClass("AutoPeftModelForCausalLM" if kind == "adapter" else "AutoModelForCausalLM")


def _check_free(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder to create")
    if out.exists() and any(out.iterdir()) and not force:
        raise ConfigError(f"{out} exists and is not an empty folder; choose a new one, or replace it with --force")


def _check_kept(out: Path, checkpoints: Path, model: Path) -> None:
    """Raise ``ConfigError`` if an export would replace what it is made from."""
    place, source, what = out.resolve(), checkpoints.resolve(), ""
    if source.is_relative_to(place) or place.is_relative_to(source):
        what = "the checkpoints of the run"
    elif model.exists() and model.resolve().is_relative_to(place):
        what = "the model that the run starts from"
    if what:
        raise ConfigError(f"{out} is the place of {what}, which an export would remove; choose another folder")


def _check_whole(run: Path, config: "ModelConfig", other: bool, option: str) -> None:
    """Raise ``ConfigError`` if the run has no text policy to write by ``option``."""
    if other:
        raise ConfigError(f"{run}: what {option} writes holds a whole policy, no reward model or adapter; leave it out")
    if config.vision is not None:
        raise ConfigError(f"{run}: {option} can't write the model's vision tower; leave it out")


def _check_gguf(config: "ModelConfig", dtype: FileDtype | None, megatron: bool) -> None:
    """Raise ``ConfigError`` before weights are loaded, if they can't become a GGUF file."""
    from whet.models.loading import load_model_config

    if dtype is not None:
        raise ConfigError("--gguf names the type of the weights itself; leave out --dtype")
    if megatron:
        raise ConfigError("--gguf and --megatron are two formats; leave out one of them")
    require("quickstart", "--gguf", "gguf")
    check_gguf(load_model_config(config))


def _recipe(run: Path) -> JsonObject:
    path = run / "recipe.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{run} is not a run folder: it has no recipe.yaml") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: not UTF-8 text ({error.reason} at byte {error.start})") from None
    recipe = parse_mapping(text, str(path))
    if not isinstance(recipe.get("model"), dict):
        raise WhetError(f"{path} has no section 'model', so the base model is unknown")
    return recipe
