"""MLflow: a tracking server, or a database that the whole package of MLflow opens."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from whet.base.addresses import check_no_password
from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.metrics.sinks.tracker import COLUMNS, TrackedRun, Tracker, TrackerConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow finds them
_LISTED = 50  # tables that the run's page lists: MLflow cuts a longer tag, which makes all of them unreadable


class MlflowSink(TrackerConfig):
    """One MLflow run per run folder: metrics, the recipe as parameters, rollouts as tables among its artifacts."""

    label: ClassVar[str] = "mlflow"

    uri: str | None = None
    """The tracking server or database, as in ``http://127.0.0.1:5000``; by default ``$MLFLOW_TRACKING_URI``."""
    experiment: str = "whet"
    name: str | None = None
    """Default: the name of the run folder."""
    tags: dict[str, str] = Field(default={})

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, uri: str | None) -> str | None:
        check_no_password(uri or "", "leave uri out, and put it into the environment variable MLFLOW_TRACKING_URI")
        return uri

    def load(self) -> None:
        with extra("mlflow", "the sink mlflow"):
            import mlflow.tracking  # noqa: F401
        if not (self.uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ConfigError(
                "the sink mlflow needs uri: that of `mlflow server`, as in http://127.0.0.1:5000, or with MLflow's "
                "whole package a database, as in sqlite:///mlflow.db; or set MLFLOW_TRACKING_URI"
            )

    def begin(self, run: TrackedRun) -> Tracker:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        in_folder = urlsplit(client.tracking_uri).scheme in ("", "file")
        if run.resumed:
            client.update_run(run.id, status="RUNNING")
            tables = json.loads(client.get_run(run.id).data.tags.get(_TABLES, "[]"))
            return _Writer(client, run.id, in_folder, tables)
        experiment = client.get_experiment_by_name(self.experiment)
        where = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        identity = client.create_run(where, run_name=self.name or run.name, tags=self.tags).info.run_id
        parameters = [Param(key, value) for key, value in _parameters(run.recipe)]
        for first in range(0, len(parameters), 100):  # the most that MLflow takes at once
            client.log_batch(identity, params=parameters[first : first + 100])
        return _Writer(client, identity, in_folder, [])


class _Writer(Tracker):
    def __init__(self, client: "MlflowClient", identity: str, in_folder: bool, tables: list[dict[str, str]]) -> None:
        self._client, self.id, self._tables = client, identity, tables
        self._separator = "." if in_folder else "/"  # a folder can't hold both "loss" and "loss/surrogate"

    def log(self, step: int, values: Mapping[str, float], rollouts: list[list[object]]) -> None:
        from mlflow.entities import Metric

        when = int(1000 * values["time/written"])  # so that a step that is sent again is the same to a database
        names = {key: _name(key).replace("/", self._separator) for key in values}
        metrics = [Metric(names[key], value, when, step) for key, value in values.items()]
        if rollouts:  # in the format of log_table, which would want pandas and read the table back to extend it
            path = f"rollouts/step-{step:06d}.json"
            self._client.log_dict(self.id, {"columns": list(COLUMNS), "data": rollouts}, path)
            others = [table for table in self._tables if table["path"] != path]  # a step may be sent again
            self._tables = [*others, {"path": path, "type": "table"}][-_LISTED:]
            self._client.set_tag(self.id, _TABLES, json.dumps(self._tables))
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self.id, metrics=metrics[first : first + 1000])

    def attach(self, files: list[Path]) -> None:
        for path in files:
            self._client.log_artifact(self.id, str(path))

    def close(self, complete: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if complete else "KILLED")


def _parameters(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a recipe by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _parameters(value, f"{prefix}{key}.")
        elif value is not None:
            yield _name(f"{prefix}{key}")[:250], str(value)[:6000]


def _name(key: str) -> str:
    """Return a name that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key)
