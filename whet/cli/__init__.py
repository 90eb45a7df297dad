"""The command line. Each command is one file that turns words into one call of the library; ``main`` runs them.

Nothing heavy is imported before a command needs it, so that ``whet --help`` answers at once.
"""

from whet.cli.main import main

__all__ = ["main"]
