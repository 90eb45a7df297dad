"""Ranks leave nothing behind."""

import tempfile
from pathlib import Path

from tests.parallel.ranks import on_ranks


def temporary_folder(rendezvous: str, rank: int) -> str:
    return tempfile.mkdtemp()


def test_temporary_files_of_ranks_go_with_them() -> None:
    made = on_ranks(2, temporary_folder)
    assert len(set(made)) == 2
    assert not any(Path(folder).parent.exists() for folder in made)
