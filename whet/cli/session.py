"""What the error handling of one command line must know from the command: the run folder, and whether to debug."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Session:
    """Filled in by the command under way."""

    debug: bool = False
    run: Path | None = None  # the run folder, once it is known


session = Session()
