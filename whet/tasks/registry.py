"""The task sets that a recipe can name: the built-in task sets, and task sets of installed distributions."""

from whet.config.entry_points import EntryPoints

TASK_SETS = EntryPoints("whet.task_sets")
