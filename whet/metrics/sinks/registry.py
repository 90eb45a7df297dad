"""The sinks that a recipe can name: the sinks of whet and of every installed distribution."""

from whet.config.entry_points import EntryPoints

SINKS = EntryPoints("whet.sinks")
