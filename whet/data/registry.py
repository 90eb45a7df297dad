"""The kinds of rows that a recipe can name: the built-in kinds, and kinds of installed distributions."""

from whet.config.entry_points import EntryPoints

ROWS = EntryPoints("whet.data")
