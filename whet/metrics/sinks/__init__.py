"""Destinations of metrics. A sink is a config that opens into an object with ``write`` and ``close``."""

from whet.metrics.sinks.base import Kind, OpenSinks, Sink, SinkConfig, Value

__all__ = ["Kind", "OpenSinks", "Sink", "SinkConfig", "Value"]
