"""Whether a folder can become a run's, and making it. Knows nothing heavy: the command line asks before anything is
loaded."""

from pathlib import Path

from whet.errors import ConfigError

LEFT_BY_A_FAILED_START = {"recipe.yaml", "log.txt", "error.log", ".lock"}


def check_free(folder: Path) -> None:
    """Raises ``ConfigError`` where the folder holds more than a start that failed leaves behind."""
    if any(parent.is_file() for parent in (folder, *folder.parents)):
        raise ConfigError(f"--folder {folder}: a file is in the way")
    if folder.exists() and {path.name for path in folder.iterdir()} - LEFT_BY_A_FAILED_START:
        raise ConfigError(f"--folder {folder}: it exists and is not empty. To go on with a run: whet resume {folder}")


def create(folder: Path) -> None:
    """Make the folder. Raises ``ConfigError`` where it isn't free or can't be made."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: it can't be made: {error.strerror}") from error
