"""Trackers follow metrics.jsonl: each step is sent once, whatever the tracker does; and the real packages, offline."""

import json
import socket
import threading
import urllib.request
from typing import ClassVar

import pytest

from whet.base.errors import ConfigError
from whet.cluster.rendezvous import LOOPBACK, Reservation
from whet.metrics.rollout_file import RolloutRecord, write_rollouts
from whet.metrics.sinks import OpenSinks
from whet.metrics.sinks.jsonl import FILE, JSONLSink
from whet.metrics.sinks.mlflow import MlflowSink
from whet.metrics.sinks.prometheus import PrometheusSink
from whet.metrics.sinks.swanlab import SwanlabSink
from whet.metrics.sinks.tracker import COLUMNS, Tracker, TrackerConfig
from whet.metrics.sinks.trackio import TrackioSink
from whet.metrics.sinks.wandb import WandbSink

RECIPE = {"steps": 3, "optimizer": {"lr": 0.1}, "sinks": [{"type": "jsonl"}]}


class Memory(TrackerConfig):
    """Keeps what it gets; ``fails`` and ``hangs`` make it a bad one."""

    label: ClassVar[str] = "memory"
    logged: ClassVar[list] = []
    begun: ClassVar[list] = []
    closed: ClassVar[list] = []
    attached: ClassVar[list] = []
    fails: ClassVar[set] = set()
    hangs: ClassVar[threading.Event | None] = None
    hanging: ClassVar[threading.Event] = threading.Event()

    def load(self):
        pass

    def begin(self, run):
        self.begun.append((run.id, run.resumed))
        return Kept(run.id)


class Kept(Tracker):
    def __init__(self, identity):
        self.id = identity

    def log(self, step, values, rollouts):
        if Memory.hangs is not None:
            Memory.hanging.set()
            Memory.hangs.wait()
        if step in Memory.fails:
            raise OSError("no route to http://me:secret@host.")
        Memory.logged.append((step, dict(values), rollouts))

    def attach(self, files):
        Memory.attached.append([path.name for path in files])

    def close(self, complete):
        Memory.closed.append(complete)


@pytest.fixture(autouse=True)
def _fresh():
    Memory.logged.clear(), Memory.begun.clear(), Memory.closed.clear(), Memory.fails.clear()
    Memory.attached.clear(), Memory.hanging.clear()
    Memory.hangs = None


def run(sink, folder, steps, resume_step=None, recipe=RECIPE):
    """Write what a run writes: a step's metrics, its rollouts, its evaluation, and its times."""
    sinks = OpenSinks.of([sink, JSONLSink()], folder, recipe, resume_step)
    for step in steps:
        sinks.write(step, {"loss": float(step), "loss/kl": 0.5, "kl": float("nan"), "run/device": "cpu"})
        write_rollouts(folder, step, [RolloutRecord(step, task=f"t{n}", answer="yes", reward=1.0) for n in range(20)])
        sinks.write(step, {"evaluation/accuracy": 0.5}, "evaluation")
        sinks.write(step, {"time/step": 1.0})
        sinks.finish_step(step)
    if Memory.hangs is not None:
        assert Memory.hanging.wait(60)
    sinks.close()


def test_a_step_is_sent_once_with_all_that_was_written_for_it(tmp_path):
    run(Memory(rollouts=2), tmp_path, [1, 2, 3])
    assert [step for step, _, _ in Memory.logged] == [1, 2, 3]
    _, values, rollouts = Memory.logged[1]
    assert {k: v for k, v in values.items() if k != "time/written"} == {
        "loss": 2.0,
        "loss/kl": 0.5,
        "time/step": 1.0,
        "evaluation/accuracy": 0.5,
    }
    assert [dict(zip(COLUMNS, row, strict=True))["task"] for row in rollouts] == ["t0", "t1"]
    assert Memory.closed == [True]


def test_the_recipe_and_the_lineage_are_attached_at_the_end(tmp_path):
    run(Memory(), tmp_path, [1])
    for name in ("recipe.yaml", "lineage.json"):
        (tmp_path / name).write_text("{}")
    run(Memory(), tmp_path, [2], 1)
    assert Memory.attached == [["recipe.yaml", "lineage.json"]]


def test_a_resumed_run_keeps_its_id_and_sends_no_step_twice(tmp_path):
    run(Memory(), tmp_path, [1, 2])
    run(Memory(), tmp_path, [2, 3], resume_step=1)
    assert [step for step, _, _ in Memory.logged] == [1, 2, 3]
    (first, known), (second, known_then) = Memory.begun
    assert (first, known, known_then) == (second, False, True)
    assert Memory.closed == [False, True]


def test_a_step_that_did_not_finish_is_not_sent(tmp_path):
    sinks = OpenSinks.of([Memory(), JSONLSink()], tmp_path, RECIPE)
    sinks.write(1, {"loss": 1.0})
    sinks.finish_step(1)
    sinks.write(2, {"loss": 2.0})
    sinks.close()
    assert [step for step, _, _ in Memory.logged] == [1]
    assert Memory.closed == [False]


def test_a_tracker_that_fails_is_warned_of_once_and_gets_the_steps_later(tmp_path, caplog):
    Memory.fails.update({2})
    run(Memory(), tmp_path, [1, 2, 3])
    assert [step for step, _, _ in Memory.logged] == [1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "memory does not take the metrics of this run: no route to http://...@host. It gets them" in warnings[0]
    Memory.fails.clear()
    run(Memory(), tmp_path, [], resume_step=3)  # nothing more is finished
    assert [step for step, _, _ in Memory.logged] == [1]
    run(Memory(), tmp_path, [4], resume_step=3)
    assert [step for step, _, _ in Memory.logged] == [1, 2, 3, 4]


def test_a_tracker_that_hangs_delays_the_end_of_a_run_by_its_deadline_only(tmp_path, caplog):
    Memory.hangs = threading.Event()
    run(Memory(deadline=0.05), tmp_path, [1, 2, 3])
    assert "memory did not answer within 0.05 s" in caplog.text
    assert not Memory.logged
    Memory.hangs.set()
    for thread in threading.enumerate():
        if thread.name == "tracker-memory":
            thread.join()
    assert [step for step, _, _ in Memory.logged] == [1]  # the call that hung was the last one


def test_a_tracker_added_when_a_run_is_resumed_gets_all_its_steps(tmp_path):
    sinks = OpenSinks.of([JSONLSink()], tmp_path, RECIPE)
    for step in (1, 2):
        sinks.write(step, {"loss": float(step)})
    sinks.close()
    run(Memory(), tmp_path, [3], resume_step=2)
    assert [step for step, _, _ in Memory.logged] == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "[]", '{"id": "x"}'])
def test_a_damaged_state_begins_a_new_run_with_a_warning(tmp_path, caplog, text):
    run(Memory(), tmp_path, [1])
    (tmp_path / "trackers" / "memory.json").write_text(text)
    run(Memory(), tmp_path, [2], resume_step=1)
    assert "memory.json is damaged" in caplog.text
    assert [known for _, known in Memory.begun] == [False, False]


@pytest.fixture
def _no_network(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("looked up a host"))


@pytest.mark.usefixtures("_no_network")
def test_wandb_works_offline_without_login_and_keeps_its_run_when_resumed(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    for steps, resume_step in (([1, 2], None), ([2, 3], 1)):
        run(WandbSink(deadline=300), folder, steps, resume_step)
        (folder / "lineage.json").write_text("{}")
    state = json.loads((folder / "trackers" / "wandb.json").read_text())
    assert state["sent"] == 3
    assert list((folder / "wandb").glob(f"offline-run-*/run-{state['id']}.wandb"))
    assert list((folder / "wandb").glob("offline-run-*/files/media/table/rollouts_*.table.json"))


def test_mlflow_has_metrics_settings_and_tables_and_keeps_its_run(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed (whet[mlflow])")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its database is in the whole package only
    uri = (tmp_path / "mlruns").as_uri()
    for steps, resume_step in (([1, 2], None), ([2, 3], 1)):
        run(MlflowSink(uri=uri), tmp_path / "mine", steps, resume_step)
        (tmp_path / "mine" / "lineage.json").write_text("{}")
    client = tracking.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("whet").experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.1"
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")] == [(1, 1), (2, 2), (3, 3)]
    assert "lineage.json" in [file.path for file in client.list_artifacts(found.info.run_id)]
    tables = [file.path for file in client.list_artifacts(found.info.run_id, "rollouts")]
    assert tables == [f"rollouts/step-00000{step}.json" for step in (1, 2, 3)]
    assert [listed["path"] for listed in json.loads(found.data.tags["mlflow.loggedArtifacts"])] == tables


def test_mlflow_that_can_not_be_reached_is_a_warning(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow.tracking", reason="MLflow is not installed (whet[mlflow])")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    run(MlflowSink(), tmp_path, [1])
    assert "mlflow does not take the metrics of this run" in caplog.text
    assert "secret" not in caplog.text
    assert (tmp_path / FILE).exists()


def test_mlflow_without_an_address_says_what_to_set(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="MLflow is not installed (whet[mlflow])")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="needs uri"):
        MlflowSink().open(tmp_path, RECIPE)


def test_trackio_keeps_its_run_in_a_local_database(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed (whet[trackio])")
    from trackio import sqlite_storage

    for steps, resume_step in (([1, 2], None), ([2, 3], 1)):
        run(TrackioSink(project=f"whet-{tmp_path.parent.name}"), tmp_path / "mine", steps, resume_step)
    name = json.loads((tmp_path / "mine" / "trackers" / "trackio.json").read_text())["id"]
    logs = sqlite_storage.SQLiteStorage.get_logs(f"whet-{tmp_path.parent.name}", name)
    assert [(line["step"], line["loss"]) for line in logs] == [(1, 1), (2, 2), (3, 3)]
    assert len(logs[0]["rollouts"]["_value"]) == 16


@pytest.mark.usefixtures("_no_network")
def test_swanlab_works_offline_and_keeps_its_run(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="SwanLab is not installed (whet[swanlab])")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for steps, resume_step in (([1, 2], None), ([2, 3], 1)):
        run(SwanlabSink(), tmp_path / "mine", steps, resume_step)
    state = json.loads((tmp_path / "mine" / "trackers" / "swanlab.json").read_text())
    assert state["sent"] == 3
    assert list((tmp_path / "mine" / "swanlog").glob(f"run-*/run-{state['id']}.swanlab"))
    assert list((tmp_path / "mine" / "swanlog").glob("run-*/media/echarts/*.json"))


def test_prometheus_reads_the_newest_values_from_this_machine(tmp_path, caplog):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (whet[prometheus])")
    reserved, folder = Reservation(LOOPBACK), tmp_path / "mine"
    port = int(reserved.address.rpartition(":")[2])
    sink = PrometheusSink(port=port).open(folder, RECIPE)
    sink.write(1, {"reward/mean": 0.25, "run/device": "cpu"})
    sink.write(2, {"reward/mean": 0.5, "kl": float("nan")})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'whet_reward_mean{run="mine"} 0.5' in text
    assert 'whet_step{run="mine"} 2.0' in text
    second = PrometheusSink(port=port).open(folder, RECIPE)
    second.write(1, {"loss": 1.0})
    second.close()
    assert f"127.0.0.1:{port} can't be listened on" in caplog.text
    sink.close()
    PrometheusSink(port=port).open(folder, RECIPE).close()


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ValueError, match="port"):
        PrometheusSink(port=port)
