"""The losses beside TRL's own: they run where the ``trl`` extra is installed (``make install`` does)."""

import os

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("trl", reason='needs TRL: pip install "whet[trl]"')
