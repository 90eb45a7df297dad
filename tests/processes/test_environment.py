"""Variables are set for what is started inside, and this process goes back to its own."""

import os
from contextlib import suppress

import pytest

from whet.processes.environment import environment


def test_variables_are_as_they_were_whatever_happens_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_OLD", "before")
    monkeypatch.delenv("WHET_NEW", raising=False)
    with suppress(ValueError), environment({"WHET_OLD": "within", "WHET_NEW": "within"}):
        assert (os.environ["WHET_OLD"], os.environ["WHET_NEW"]) == ("within", "within")
        raise ValueError("inside")
    assert os.environ["WHET_OLD"] == "before"
    assert "WHET_NEW" not in os.environ
