"""Prometheus: the newest value of each metric, served to a Prometheus server that asks for them."""

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from whet.base.extras import extra
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value, numbers

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

log = logging.getLogger(__name__)


class PrometheusSink(SinkConfig):
    """Serves ``http://HOST:PORT/metrics`` while the run lasts: gauges such as ``whet_reward_mean{run="mine"}``."""

    host: str = Field("127.0.0.1", min_length=1)
    """The address to listen on; by default this machine alone can read it."""
    port: int = Field(9464, ge=1, le=65535)
    """A port for each run of a machine."""

    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> Sink:
        with extra("prometheus", "the sink prometheus"):
            from prometheus_client import CollectorRegistry, start_http_server
        writer = _Writer(folder.resolve().name)
        registry = CollectorRegistry()
        registry.register(writer)
        try:
            writer.server, _ = start_http_server(self.port, self.host, registry)
        except OSError as error:
            text = "no metrics for Prometheus: %s:%d can't be listened on (%s); set the sink's port"
            log.warning(text, self.host, self.port, error.strerror or error)
        return writer


class _Writer(Sink):
    """A collector of prometheus_client: its server asks for the values in a thread."""

    def __init__(self, run: str) -> None:
        self._run, self._lock = run, threading.Lock()
        self._values: dict[str, float] = {}
        self.server: Any = None

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        with self._lock:
            self._values |= {**numbers(values), "step": float(step)}

    def collect(self) -> "Iterator[GaugeMetricFamily]":
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            named = {"whet_" + re.sub(r"\W", "_", key, flags=re.ASCII): (key, v) for key, v in self._values.items()}
        for name, (key, value) in named.items():
            gauge = GaugeMetricFamily(name, key, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
