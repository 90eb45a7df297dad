"""The kinds of rows that a recipe can name: those of whet and of every installed distribution."""

from whet.config.entry_points import EntryPoints

ROWS = EntryPoints("whet.data")
