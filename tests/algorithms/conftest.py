"""Tiny workers that are the models of an algorithm."""

from typing import Any

import pytest

from tests.learner.parts import SMALL, VOCABULARY, save_model, worker
from tests.tiny import tiny_llama


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model that learns, with either head, and another model that serves as the reference and the old policy."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "own").mkdir()
    (folder / "other").mkdir()
    (folder / "tutor").mkdir()
    own = save_model(folder / "own", tiny_llama(VOCABULARY, **SMALL))
    other = save_model(folder / "other", tiny_llama(VOCABULARY, seed=1, **SMALL))
    tutor = save_model(folder / "tutor", tiny_llama(VOCABULARY, seed=2, **SMALL))
    return {
        "language": worker(own),
        "value": worker(own, head="value"),
        "other": worker(other, optimizer=None),
        "tutor": worker(tutor, optimizer=None),
        "critic": worker(other, head="value", optimizer=None),
    }
