"""Classes that installed distributions offer under a name, by the entry points of their metadata. The built-in classes
of whet are found in the same way as the classes of any other distribution:

    [project.entry-points."whet.task_sets"]
    chess = "chess_tasks.puzzles:Puzzles"
"""

import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from whet.base.errors import ConfigError

DISTRIBUTION = "whet"
SOURCE = Path(__file__).parents[2] / "pyproject.toml"


class EntryPoints(Mapping[str, str]):
    """The names of a group, each with its ``"module:Class"``. The metadata are read on first use; no class is imported.

    A checkout of whet's source need not be installed again, or at all, for whet's names: they are read from its
    ``pyproject.toml``. Raises ``ConfigError`` on first use if two distributions offer the same name.
    """

    def __init__(self, group: str) -> None:
        self.group = group

    @cached_property
    def _paths(self) -> dict[str, str]:
        built_in = source_points(self.group)
        paths, owners = dict(built_in), dict.fromkeys(built_in, DISTRIBUTION)
        for point in sorted(installed().select(group=self.group), key=lambda point: point.name):
            owner = point.dist.name if point.dist is not None else "an unnamed distribution"
            if owner == DISTRIBUTION and built_in:
                continue  # an editable installation, perhaps older than the source
            if point.name in paths:
                raise ConfigError(
                    f"two installed distributions offer {point.name!r} in the group {self.group}: "
                    f"{owners[point.name]} and {owner}; uninstall one of them"
                )
            paths[point.name], owners[point.name] = point.value, owner
        return paths

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __or__(self, other: Mapping[str, str]) -> Mapping[str, str]:
        """Return the names of both, still to be read on first use."""
        maps = [cast(MutableMapping[str, str], names) for names in (other, self)]  # a ChainMap changes only the first
        return ChainMap(*maps)


@cache
def installed() -> Any:
    """Return the entry points of all installed distributions, whose type depends on the version of Python."""
    return metadata.entry_points()


def source_points(group: str) -> dict[str, str]:
    """Return the names of whet in a group if this is a checkout of its source, else none."""
    project = tomllib.loads(SOURCE.read_text(encoding="utf-8")).get("project", {}) if SOURCE.is_file() else {}
    return dict(project["entry-points"][group]) if project.get("name") == DISTRIBUTION else {}
