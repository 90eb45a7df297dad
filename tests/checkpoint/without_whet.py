"""Runs scripts in a process that can't import whet, to read exported models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCK = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "whet":
            raise ImportError("whet is blocked")

sys.meta_path.insert(0, Blocked())
"""


def run_without_whet(script: str, *arguments: Any, folder: Path) -> Any:
    """Run the script in ``folder``, with its arguments as JSON in ``sys.argv``; return the JSON that it prints."""
    command = [sys.executable, "-c", BLOCK + script, *map(json.dumps, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
