"""``python -m whet`` is ``whet``."""

from whet.cli.main import main

main()
