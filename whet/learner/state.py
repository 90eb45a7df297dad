"""A learner's state on disk: safetensors and ``learner.json``. Loading is bit-exact, and checks every name, shape and
type before it changes anything. Knows parameters and files, no loss and no batch.

One rank writes ``model.safetensors`` and ``optimizer.safetensors``; of several, each writes its pieces of every tensor
(``whet.learner.sharded_files``). Either can be read by any number of ranks, however they share the model.
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import DeadlineError, WhetError
from whet.files import save_tensors, write_atomically
from whet.learner.sharded_files import described, fill, write_pieces
from whet.models.fit import match
from whet.parallel.mesh import Ranks

FACTS = "learner.json"
WEIGHTS = "model.safetensors"
MOMENTS = "optimizer.safetensors"
_KINDS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW's state, as "KIND/PARAMETER"


def changing(modules: Mapping[str, nn.Module | None], everything: bool = True) -> dict[str, Tensor]:
    """What training changes, by name: everything, without the repetition of tied weights; where some of it is frozen
    (LoRA, a model that only scores), the trained parameters. Keys of ``modules`` are prefixes. ``everything`` is false
    where some of it is frozen on another rank."""
    found: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        if module is None:
            continue
        parameters = dict(module.named_parameters())
        found.update({prefix + name: p for name, p in parameters.items() if p.requires_grad})
        if everything and all(p.requires_grad for p in parameters.values()):
            persistent = module.state_dict(keep_vars=True)
            buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
            found.update({prefix + name: buffer for name, buffer in buffers.items()})
    return found


def save_state(
    folder: Path,
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    ranks: Ranks | None = None,
) -> None:
    """Write into an existing folder, which all ranks see; the facts (JSON values) come last. Raises on every rank where
    one of them fails."""
    _check_there(folder, ranks)
    moments = _moments(tensors, optimizer)
    if ranks is None:
        _save_whole(folder, tensors, moments)
        _save_facts(folder, facts)
        return
    write_pieces(folder, {**tensors, **moments}, ranks.messages)
    with ranks.together("saving"):
        if ranks.seat.rank == 0:
            _save_facts(folder, facts)


class SaveUnderWay:
    """``save_state`` behind training's back: what is written is a copy, made while this is built. Of several ranks the
    writing threads speak in a process group of their own, because their messages would mix with training's."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        facts: Mapping[str, Any],
        ranks: Ranks | None = None,
    ) -> None:
        _check_there(folder, ranks)
        self._folder, self._facts, self._ranks = folder, dict(facts), ranks
        weights, moments = (
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in some.items()}
            for some in (tensors, _moments(tensors, optimizer))
        )
        self._result: Future[Any]
        if ranks is None:
            self._result = _in_thread(_save_whole, folder, weights, moments)
        else:
            self._result = _in_thread(write_pieces, folder, {**weights, **moments}, ranks.background)

    @property
    def written(self) -> bool:
        """Whether this rank is done, well or not."""
        return self._result.done()

    def finish(self, deadline: float) -> None:
        """Wait for the end, up to ``deadline`` seconds. Raises on every rank where one of them failed."""
        error: Exception | None = None
        try:
            self._result.result(deadline)
        except TimeoutError:
            error = DeadlineError(f"writing {self._folder} took longer than {deadline:g} s")
        except Exception as caught:
            error = caught
        with self._ranks.together("saving") if self._ranks is not None else nullcontext():
            if error is not None:
                raise error
            if self._ranks is None or self._ranks.seat.rank == 0:
                _save_facts(self._folder, self._facts)


def _check_there(folder: Path, ranks: Ranks | None) -> None:
    """Files written into a folder that is made here would be seen by nobody else."""
    with ranks.together("saving") if ranks is not None else nullcontext():
        if not folder.is_dir():
            raise WhetError(
                f"{folder} is not there on {socket.gethostname()}, where a learner has to save; the run folder must be "
                "one that all nodes see"
            )


def _in_thread(work: Callable[..., Any], *args: Any) -> Future[Any]:
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work(*args))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()  # a disk that hangs must not keep a process alive
    return result


def load_state(
    folder: Path,
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Copy into the tensors and the optimizer in place; returns the facts. Raises ``WhetError`` where the files belong
    to another model, or are missing; then nothing is changed on any rank."""
    names = _names(tensors, optimizer)
    everywhere = names if ranks is None else names.union(*ranks.all(names))
    with ranks.together("loading") if ranks is not None else nullcontext():
        facts, moments = _check_state(folder, tensors, optimizer, everywhere)
    fill({name: tensor.detach() for name, tensor in tensors.items()} | moments, folder, ranks)
    if optimizer is not None:
        optimizer.state.clear()
        for name in (key.removeprefix("step/") for key in moments if key.startswith("step/")):
            optimizer.state[tensors[name]] = {kind: moments[f"{kind}/{name}"] for kind in _KINDS}
    return facts


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a saved learner, without its optimizer's."""
    found = described(folder)
    weights = {
        name: torch.empty_like(tensor, device="cpu")
        for name, tensor in found.items()
        if name.partition("/")[0] not in _KINDS
    }
    fill(weights, folder)
    return weights


def _check_state(
    folder: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, everywhere: Set[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts, and the moments to be filled. Raises where the files don't fit; they may hold what is ``everywhere``,
    which is more than ``tensors`` where other ranks have other layers."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise WhetError(f"no learner can be loaded from {folder}: {error}") from error
    found = described(folder)
    moments: dict[str, Tensor] = {}
    if optimizer is not None and any(name.startswith("step/") for name in found):
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                moments[f"step/{name}"] = torch.zeros((), device=tensor.device)
                moments |= {f"{kind}/{name}": torch.zeros_like(tensor.detach()) for kind in _KINDS[1:]}
    if mismatch := match(found, {**tensors, **moments}, everywhere):
        raise WhetError(
            f"{folder} does not fit this learner: {mismatch}. Resume with the model, LoRA and precision settings that "
            "it was saved with"
        )
    return facts, moments


def _names(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> set[str]:
    """Of the tensors, and of the moments that there may be."""
    trained = [name for name, tensor in tensors.items() if tensor.requires_grad] if optimizer is not None else []
    return {*tensors, *(f"{kind}/{name}" for kind in _KINDS for name in trained)}


def _save_whole(folder: Path, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    save_tensors(folder / WEIGHTS, tensors)
    save_tensors(folder / MOMENTS, moments)


def _save_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    write_atomically(folder / FACTS, json.dumps(dict(facts), indent=1).encode())


def _moments(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {
        f"{kind}/{name}": value
        for name, tensor in tensors.items()
        if tensor in optimizer.state
        for kind, value in optimizer.state[tensor].items()
    }
