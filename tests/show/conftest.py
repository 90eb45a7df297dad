from pathlib import Path

import pytest

from tests.show.runs import small_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return small_run(tmp_path / "tiny")
