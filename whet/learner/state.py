"""A learner's state on disk: safetensors files and ``learner.json``. Loading is bit-exact, and checks every name, shape
and dtype before it changes anything.

A single rank writes ``model.safetensors`` and ``optimizer.safetensors``; with several ranks, each writes its pieces of
every tensor (``whet.learner.sharded_files``). Both can be read by any number of ranks, with any sharding of the model.
"""

import copy
import json
import socket
from collections.abc import Mapping, Set
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from whet.base.errors import DeadlineError, WhetError
from whet.base.files import save_tensors, write_atomically
from whet.base.strict_json import JsonObject
from whet.learner.balance import BIAS
from whet.learner.config import LearnerConfig
from whet.learner.model import LearnerModel
from whet.learner.optimizer_state import (
    changed_settings,
    check_settings,
    group_settings,
    pieces,
    replace_states,
    restore_settings,
    restored,
    state_of,
    stored_state,
)
from whet.learner.sharded_files import described, fill, write_pieces
from whet.models.fit import match
from whet.parallel.mesh import Ranks, fail_together
from whet.parallel.parameters import first_not_finite, persistent_buffers
from whet.processes.threads import JobThread

FACTS = "learner.json"


@dataclass(slots=True)
class Progress:
    """A learner's state other than its tensors."""

    matmul_precision: str  # torch's setting for float32 products
    step: int = 0  # optimizer steps done; skipped ones don't count
    skipped: int = 0
    skipped_in_a_row: int = 0
    optimizer: str = "adamw"  # its type
    groups: list[JsonObject] = field(default_factory=list)  # what it has changed in its parameter groups
    adapter: JsonObject = field(default_factory=dict)  # LoRA's ``unseen`` settings; empty in older files


class LearnerState:
    """The part of a worker that is saved and loaded. With several ranks all call each method together, with folders
    that all of them see; an error on one rank is raised on each."""

    def __init__(
        self,
        model: LearnerModel,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        config: LearnerConfig,
        ranks: Ranks | None,
        made_to_train: Set[str],
    ) -> None:
        """``made_to_train``: the parameters that require a gradient before ``optimizer.groups`` freezes some. With LoRA
        they are the adapter, whose frozen parts have no other file than the saved one."""
        self.progress = progress
        self._made_to_train = made_to_train
        self._model, self._optimizer, self._config, self._ranks = model, optimizer, config, ranks
        self._made = [] if optimizer is None else copy.deepcopy(group_settings(optimizer))
        self._saving: _Saving | None = None
        self._writer = JobThread("save")

    def save(self, folder: Path) -> None:
        """Write weights, moments and progress into an existing folder."""
        self._check_there(folder)
        self._write(folder, *self._tensors(), None if self._ranks is None else self._ranks.messages)
        self._write_facts(folder, self._facts())

    def begin_save(self, folder: Path) -> None:
        """Start a background save: return once there is a copy. Only one at a time; ``finish_save`` ends it."""
        if self._saving is not None:
            raise WhetError("a save is already in progress; finish it first")
        self._check_there(folder)
        weights, moments = (
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in some.items()} for some in self._tensors()
        )
        # Writing threads use a separate process group, so that their messages don't mix with messages of training.
        group = None if self._ranks is None else self._ranks.background
        written = self._writer.submit(self._write, folder, weights, moments, group)
        self._saving = _Saving(folder, self._facts(), written)

    def save_written(self) -> bool:
        """Return whether ``finish_save`` would return without waiting on this rank."""
        return self._saving is None or self._saving.written.done()

    def finish_save(self) -> None:
        """Wait until the background save is written. Raises ``DeadlineError`` after the learner's deadline."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with fail_together(self._ranks, "saving"):
            try:
                saving.written.result(self._config.deadline)
            except TimeoutError:
                raise DeadlineError(f"writing {saving.folder} took over {self._config.deadline:g} s") from None
            finally:
                self._writer.end()
        self._write_facts(saving.folder, saving.facts)

    def load(self, folder: Path) -> None:
        """Copy into the model and the optimizer in place, to resume exactly where ``save`` was called; a matmul
        precision that was chosen by measuring is restored too. Raises ``WhetError`` if the files are missing or belong
        to another model; then nothing is changed on any rank."""
        tensors = self._changing()
        trained = [name for name, tensor in tensors.items() if tensor.requires_grad and self._optimizer is not None]
        weights, of_trained = self._stored(tensors), self._stored({name: tensors[name] for name in trained})
        # in files, a weight is a name without "/", and a trained parameter's state is KIND/NAME
        names = {*weights, *(f"/{name}" for name in of_trained)}
        # each pipeline stage has other layers
        everywhere = names if self._ranks is None else names.union(*self._ranks.all_gather(names))
        with fail_together(self._ranks, "loading"):
            progress = _read_facts(folder)
            _check_adapter(folder, progress, self.progress.adapter)
            stored = described(folder)
            states: dict[str, dict[str, Any]] = {}
            of_optimizer = any(progress.groups) or any("/" in name for name in stored)
            if self._optimizer is not None and of_optimizer:
                if progress.optimizer != self.progress.optimizer:
                    raise WhetError(
                        f"{folder} was saved with optimizer.type = {progress.optimizer}, not "
                        f"{self.progress.optimizer}; resume with the type that it was saved with"
                    )
                check_settings(self._optimizer, progress.groups)
                states = {name: stored_state(self._optimizer, tensors[name], name, stored) for name in trained}
            moments = {piece: tensor for name in states for piece, tensor in pieces(states[name], name).items()}
            filled = weights | self._stored(moments)
            of_others = {name for name in stored if {name, f"/{name.rpartition('/')[2]}"} & everywhere}
            if mismatch := match(stored, filled, of_others):
                raise WhetError(
                    f"{folder} does not fit this learner: {mismatch}. Resume with the settings of model, LoRA, "
                    "precision and optimizer.moments that it was saved with"
                )
        filled = {name: tensor.detach() for name, tensor in filled.items()}
        fill(filled, folder, self._ranks)
        for name, tensor in [*tensors.items(), *moments.items()]:
            self._model.shards.parameters.restore(name, tensor, filled)
        if self._optimizer is not None:
            replace_states(self._optimizer, ((tensors[name], restored(state)) for name, state in states.items()))
            restore_settings(self._optimizer, progress.groups)
        if self._config.matmul_precision != "auto":
            progress.matmul_precision = self._config.matmul_precision
        torch.set_float32_matmul_precision(progress.matmul_precision)
        progress.adapter = self.progress.adapter
        self.progress = progress

    def _facts(self) -> dict[str, Any]:
        if self._optimizer is not None:
            with fail_together(self._ranks, "saving"):
                changed = changed_settings(self._optimizer, self._made)
            if self._model.pipeline is not None:  # of each group, the settings on a stage with its parameters
                used = [bool(group["params"]) for group in self._optimizer.param_groups]
                stages = self._model.pipeline.all_gather((used, changed))
                changed = [
                    next((theirs[number] for used, theirs in stages if used[number]), settings)
                    for number, settings in enumerate(changed)
                ]
            self.progress.groups = changed
        return asdict(self.progress)

    def _changing(self) -> dict[str, Tensor]:
        """Return the tensors that training changes, by name: all, without duplicates of tied weights; if some are
        frozen (LoRA, a model that only scores), on any rank, the trained parameters, and the adapter's other ones."""
        tensors: dict[str, Tensor] = {}
        for prefix, module in (("", self._model.model), ("value_head.", self._model.value_head)):
            if module is None:
                continue
            parameters = dict(module.named_parameters())
            # parameters that optimizer.groups freezes are saved with the trained ones; LoRA's base model is not
            whole = self._optimizer is not None and not hasattr(self._model.model, "peft_config")
            for name, parameter in parameters.items():
                if whole or parameter.requires_grad or prefix + name in self._made_to_train:
                    tensors[prefix + name] = parameter
            buffers = dict(persistent_buffers(module))
            if not (whole or self._model.fully_trainable):  # routers' biases change even if only LoRA is trained
                buffers = {name: buffer for name, buffer in buffers.items() if self._config.balance and BIAS in name}
            tensors |= {prefix + name: buffer for name, buffer in buffers.items()}
        return tensors

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return weights and AdamW's moments, by name."""
        weights, moments = self._changing(), []
        if self._optimizer is not None:
            moments = [pieces(state_of(self._optimizer, tensor), name) for name, tensor in weights.items()]
        stored = self._stored(weights)
        self._check_finite(stored)
        return stored, self._stored({name: piece for state in moments for name, piece in state.items()})

    def _check_finite(self, weights: Mapping[str, Tensor]) -> None:
        """Raise if the last optimizer step damaged the weights; the loss of the next one would only show it later."""
        with fail_together(self._ranks, "saving"):
            if name := first_not_finite(weights.items()):
                raise WhetError(
                    f"after optimizer step {self.progress.step} the weights have NaN or infinite numbers, first in "
                    f"{name}, so they are not saved; lower optimizer.lr, and resume from the last checkpoint"
                )

    def _stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as they are in files."""
        stored = self._model.shards.parameters.stored
        return {name: part for parameter, tensor in tensors.items() for name, part in stored(parameter, tensor).items()}

    def _write(
        self, folder: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], group: ProcessGroup | None
    ) -> None:
        if group is None:
            save_tensors(folder / "model.safetensors", weights)
            save_tensors(folder / "optimizer.safetensors", moments)
        else:
            write_pieces(folder, {**weights, **moments}, group)

    def _write_facts(self, folder: Path, facts: Mapping[str, object]) -> None:
        """Write the facts last: if they exist, the save is complete."""
        with fail_together(self._ranks, "saving"):
            if self._ranks is None or self._ranks.info.rank == 0:
                write_atomically(folder / FACTS, json.dumps(dict(facts), indent=1))

    def _check_there(self, folder: Path) -> None:
        """Raise if the folder is missing: a folder created here would not be visible on other nodes."""
        with fail_together(self._ranks, "saving"):
            if not folder.is_dir():
                raise WhetError(
                    f"{folder} doesn't exist on {socket.gethostname()}, where a learner has to save; the run folder "
                    "must be visible on all nodes"
                )


def load_weights(folder: Path, adapter: JsonObject | None = None) -> dict[str, Tensor]:
    """Return the whole tensors of a saved learner, without its optimizer's. Raises ``WhetError`` if its adapter was
    trained with others than these ``unseen`` settings of LoRA."""
    if adapter is not None:
        _check_adapter(folder, _read_facts(folder), adapter)
    stored = {name: tensor for name, tensor in described(folder).items() if "/" not in name}
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in stored.items()}
    fill(weights, folder)
    return weights


@dataclass(slots=True, frozen=True)
class _Saving:
    """A save in progress."""

    folder: Path
    facts: dict[str, Any]
    written: Future[None]


def _check_adapter(folder: Path, saved: Progress, adapter: JsonObject) -> None:
    for name in saved.adapter.keys() & adapter.keys():
        if saved.adapter[name] != adapter[name]:
            raise WhetError(
                f"{folder} was saved with model.lora.{name} = {saved.adapter[name]}, not {adapter[name]}: its adapter "
                "would compute something else. Use the setting that it was saved with"
            )


def _read_facts(folder: Path) -> Progress:
    try:
        return Progress(**json.loads((folder / FACTS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise WhetError(f"no learner can be loaded from {folder}: {error}") from error
