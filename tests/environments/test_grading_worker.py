"""Workers are killed for real: answers that hang, crash or eat memory cost themselves their reward and nothing else."""

import asyncio
import os
import pickle
import subprocess
import sys
import time

import pytest

from tests.environments import workers
from whet.environments.grading_worker import GradingCrash, GradingLimits, GradingPool, GradingTimeout
from whet.errors import WhetError


def run(calls, prepare=None, **limits):
    """The result of ``calls(pool)`` and the pool, closed."""
    settings = {"workers": 1, "cpu_s": 1, "deadline_s": 20.0, "memory_gib": 2.0, **limits}
    pool = GradingPool(prepare, GradingLimits(**settings))
    try:
        return asyncio.run(calls(pool)), pool
    finally:
        pool.close()


def gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_worker_is_reused_and_its_printing_does_not_reach_the_protocol():
    async def calls(pool):
        first = await pool.call(workers.process_id)
        noisy = await pool.call(workers.chatter, {"a": [1, 2.5, "x\n"]})
        return first, noisy, await pool.call(workers.process_id)

    (first, noisy, again), pool = run(calls)
    assert noisy == {"a": [1, 2.5, "x\n"]}
    assert first == again != os.getpid()
    assert pool.restarts == 0
    assert gone(first)


def test_large_requests_and_results_pass():
    text = "x" * 3_000_000
    result, _ = run(lambda pool: pool.call(workers.echo, text))
    assert result == text


@pytest.mark.parametrize("function", [workers.hang, workers.hold_the_interpreter])
def test_a_computation_that_never_ends_is_killed_and_the_next_call_works(function):
    async def calls(pool):
        with pytest.raises(GradingTimeout):
            await pool.call(function)
        return await pool.scores(function), await pool.call(workers.echo, 1)

    (scores, after), pool = run(calls)
    assert scores["reward"] == scores["correct"] == 0
    assert scores["grading_timeout"] == 1
    assert after == 1
    assert pool.restarts == 2


def test_waiting_past_the_deadline_is_a_timeout_after_one_retry():
    async def calls(pool):
        with pytest.raises(GradingTimeout, match="deadline"):
            await pool.call(workers.sleep, 60)

    _, pool = run(calls, deadline_s=0.3)
    assert pool.restarts == 2


@pytest.mark.parametrize("function", [workers.die, workers.eat_memory, workers.recurse])
def test_what_kills_two_workers_is_a_hostile_answer(function):
    async def calls(pool):
        with pytest.raises(GradingCrash):
            await pool.call(function)
        return await pool.call(workers.echo, "healthy")

    result, pool = run(calls)
    assert result == "healthy"
    assert pool.restarts == 2


def test_a_worker_that_dies_once_costs_nobody_a_reward(tmp_path):
    result, pool = run(lambda pool: pool.call(workers.die_once, str(tmp_path / "died")))
    assert result == "survived"
    assert pool.restarts == 1


def test_a_bug_of_the_grader_is_an_error_with_its_traceback_and_no_reward():
    async def calls(pool):
        with pytest.raises(WhetError, match="a bug of the grader") as caught:
            await pool.scores(workers.raise_bug)
        assert not isinstance(caught.value, GradingCrash)
        return await pool.call(workers.echo, 2)

    assert run(calls)[0] == 2


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (workers.broken_prepare, "no such library here"),
        (workers.exit_in_prepare, "exit status 5"),
        (workers.slow_prepare, "no reply within"),
    ],
)
def test_a_worker_that_cannot_start_is_an_infrastructure_failure(prepare, says):
    async def calls(pool):
        with pytest.raises(WhetError, match=says) as caught:
            await pool.scores(workers.echo, 1)
        assert not isinstance(caught.value, GradingTimeout | GradingCrash)

    run(calls, prepare=prepare, start_s=2.0 if prepare is workers.slow_prepare else 60.0)


def test_calls_run_side_by_side():
    async def calls(pool):
        await asyncio.gather(*[pool.call(workers.echo, 0) for _ in range(2)])
        started = time.monotonic()
        await asyncio.gather(*[pool.call(workers.sleep, 1.5) for _ in range(2)])
        return time.monotonic() - started

    assert run(calls, workers=2)[0] < 2.9


def test_closing_ends_calls_under_way_and_leaves_no_process():
    async def calls(pool):
        pid = await pool.call(workers.process_id)
        call = asyncio.create_task(pool.call(workers.sleep, 60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        with pytest.raises(WhetError, match="closed"):
            await call
        return pid

    assert gone(run(calls)[0])


def test_workers_die_with_a_parent_that_is_killed():
    script = (
        "import asyncio, os, sys\n"
        "from tests.environments import workers\n"
        "from whet.environments.grading_worker import GradingPool\n"
        "async def main():\n"
        "    pool = GradingPool()\n"
        "    print(await pool.call(workers.process_id), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9
    assert gone(int(done.stdout))


def test_a_function_the_worker_cannot_import_is_refused():
    async def calls(pool):
        with pytest.raises(WhetError, match="top-level function"):
            await pool.call(lambda: 1)

    run(calls)


def test_a_pool_survives_pickling_and_serves_several_event_loops():
    pool = GradingPool(limits=GradingLimits(workers=1))
    try:
        assert asyncio.run(pool.call(workers.echo, 1)) == 1
        assert asyncio.run(pool.call(workers.echo, 2)) == 2
        copy = pickle.loads(pickle.dumps(pool))
        assert copy.limits == pool.limits
        assert copy is not pool
    finally:
        pool.close()
