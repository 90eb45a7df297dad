"""The losses and TRL's on the same data. They run where the ``trl`` extra is installed (``make install`` does)."""

import os

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("trl", reason='needs TRL: pip install "whet[trl]"')
