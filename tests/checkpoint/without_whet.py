"""Runs scripts in a process that can't import whet, to read exported models."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.ancestor import Ancestor

BLOCK = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "whet":
            raise ImportError("whet is blocked")

sys.meta_path.insert(0, Blocked())
"""
# Imported once: each script would need seconds for them.
LIBRARIES = """
import torch, transformers
try:
    import peft
except ImportError:
    pass
assert "whet" not in sys.modules
"""


@cache
def ancestor() -> Ancestor:
    return Ancestor(BLOCK + LIBRARIES)


def run_without_whet(script: str, *arguments: Any, folder: Path) -> Any:
    """Run the script in ``folder``, with its arguments as JSON in ``sys.argv``; return the JSON that it prints."""
    done = ancestor().run("import json, sys\n" + script, *map(json.dumps, arguments), folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
