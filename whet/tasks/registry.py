"""The task sets that a recipe can name: those of whet and of every installed distribution."""

from whet.config.entry_points import EntryPoints

TASK_SETS = EntryPoints("whet.task_sets")
