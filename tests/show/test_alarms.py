import json

import pytest

from whet.show.alarms import alarms
from whet.show.history import History


def history_of(folder, name="reward/mean", values=(), seconds=1.0):
    lines = [
        {"step": step, name: value, "time/step": seconds, "time/written": 1000.0 + step}
        for step, value in enumerate(values, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History(folder)
    history.read()
    return history


def raised(history, state="running", steps=None, now=0.0):
    return [what for what, _ in alarms(history, state, steps, now)]


def test_a_healthy_run_raises_none(tmp_path):
    rising = [0.01 * step + 0.2 * (step % 3) for step in range(100)]
    assert raised(history_of(tmp_path, values=rising), now=1101.0) == []
    assert raised(history_of(tmp_path)) == []
    assert raised(history_of(tmp_path, values=rising), "finished", 100, now=9e9) == []


def test_a_stopped_and_a_vanished_run_say_so(tmp_path):
    history = history_of(tmp_path, values=[0.0] * 7)
    assert alarms(history, "stopped", 20, 0.0) == [
        ("stopped", "no process trains this run any more; it ended at step 7 of 20")
    ]
    assert raised(history, "gone") == ["gone"]


@pytest.mark.parametrize(
    ("seconds", "waited", "stalled"), [(1.0, 59, False), (1.0, 61, True), (60.0, 599, False), (60.0, 601, True)]
)
def test_a_run_stalls_after_ten_median_steps_and_a_minute(tmp_path, seconds, waited, stalled):
    history = history_of(tmp_path, values=[0.5] * 9, seconds=seconds)
    assert raised(history, now=1009.0 + waited) == (["stalled"] if stalled else [])


def test_a_reward_that_loses_half_of_its_gain_is_named_and_noise_is_not(tmp_path):
    gained = [min(1.0, 0.02 * step) for step in range(80)]
    assert raised(history_of(tmp_path, values=[*gained, *[0.3] * 30])) == ["the reward has fallen"]
    assert raised(history_of(tmp_path, values=[*gained, *[0.8] * 30])) == []
    noise = [0.5 + 0.5 * (-1) ** (step // 2) for step in range(81)]
    assert raised(history_of(tmp_path, values=noise)) == []


def test_kl_and_gradient_norm_have_bounds(tmp_path):
    assert raised(history_of(tmp_path, "kl", [0.1] * 50 + [0.9] * 20)) == ["the KL divergence is high"]
    assert raised(history_of(tmp_path, "kl", [0.1] * 50 + [0.9] * 5)) == []
    assert raised(history_of(tmp_path, "gradient_norm", [1.0] * 50 + [30.0] * 5)) == ["the gradient norm has grown"]
    assert raised(history_of(tmp_path, "gradient_norm", [1.0] * 50 + [30.0])) == []


def test_numbers_that_are_not_finite_are_named_while_they_are_recent(tmp_path):
    assert raised(history_of(tmp_path, "loss", [1.0, None, 1.0])) == ["loss is not finite"]
    assert raised(history_of(tmp_path, "loss", [None, *[1.0] * 30])) == []


def test_skipped_steps_are_named_while_they_are_recent(tmp_path):
    assert raised(history_of(tmp_path, "learner/skipped", [1.0] + [0.0] * 30)) == []
    assert raised(history_of(tmp_path, "learner/skipped", [0.0, 1.0, 0.0])) == ["steps are skipped"]


def test_a_mirror_that_fails_is_named_while_that_is_recent(tmp_path):
    assert raised(history_of(tmp_path, "checkpoint/mirror_failed", [float("nan")] * 3)) == []
    assert raised(history_of(tmp_path, "checkpoint/mirror_failed", [1.0] + [0.0] * 30)) == []
    assert alarms(history_of(tmp_path, "checkpoint/mirror_failed", [0.0, 1.0, 1.0]), "running", None, 0.0) == [
        ("the mirror fails", "2 checkpoints of the last 20 steps are not in checkpoints.mirror; read log.txt")
    ]
