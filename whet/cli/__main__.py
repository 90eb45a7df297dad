"""``python -m whet.cli`` is ``whet``."""

from whet.cli.main import main

main()
