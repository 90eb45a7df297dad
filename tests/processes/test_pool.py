"""Workers are killed for real: calls that hang, crash or exhaust the memory fail without affecting other calls."""

import asyncio
import os
import subprocess
import sys

import psutil
import pytest

from tests.contracts.fault_contract import eventually
from tests.processes import functions
from whet.base.errors import CallError, WhetError
from whet.processes.pool import CallCrash, CallTimeout, WorkerLimits
from whet.tasks.grading import GradingPool


def run(calls, prepare=None, **limits):
    """Return the result of ``calls(pool)`` and the closed pool."""
    settings = {"workers": 1, "cpu_s": 1, "deadline_s": 60.0, "memory_gib": 2.0, **limits}
    pool = GradingPool(prepare, WorkerLimits(**settings))
    try:
        return asyncio.run(calls(pool)), pool
    finally:
        pool.close()


def gone(pid):
    return eventually(lambda: not psutil.pid_exists(pid))


def test_a_worker_is_reused_and_its_printing_does_not_reach_the_protocol():
    async def calls(pool):
        first = await pool.call(functions.process_id)
        noisy = await pool.call(functions.chatter, {"a": [1, 2.5, "x\n"]})
        return first, noisy, await pool.call(functions.process_id)

    (first, noisy, again), pool = run(calls)
    assert noisy == {"a": [1, 2.5, "x\n"]}
    assert first == again != os.getpid()
    assert pool.restarts == 0
    assert gone(first)


def test_large_requests_and_results_pass():
    text = "x" * 3_000_000
    result, _ = run(lambda pool: pool.call(functions.echo, text))
    assert result == text


@pytest.mark.parametrize(
    "function", [pytest.param(functions.hang, marks=pytest.mark.slow), functions.hold_the_interpreter]
)
def test_a_computation_that_never_ends_is_killed_and_the_next_call_works(function):
    async def calls(pool):
        with pytest.raises(CallTimeout):
            await pool.call(function)
        return await pool.scores(function), await pool.call(functions.echo, 1)

    (scores, after), pool = run(calls)
    assert scores["reward"] == scores["correct"] == 0
    assert scores["grading_timeout"] == 1
    assert after == 1
    assert pool.restarts == 2


def test_waiting_past_the_deadline_is_a_timeout_after_one_retry():
    async def calls(pool):
        with pytest.raises(CallTimeout, match="deadline"):
            await pool.call(functions.sleep, 60)

    _, pool = run(calls, deadline_s=0.3)
    assert pool.restarts == 2


@pytest.mark.parametrize("function", [functions.die, functions.eat_memory, functions.recurse])
def test_what_kills_two_workers_is_a_hostile_answer(function):
    async def calls(pool):
        with pytest.raises(CallCrash):
            await pool.call(function)
        return await pool.call(functions.echo, "healthy")

    result, pool = run(calls)
    assert result == "healthy"
    assert pool.restarts == 2


def test_a_call_is_repeated_if_its_worker_dies_once(tmp_path):
    result, pool = run(lambda pool: pool.call(functions.die_once, str(tmp_path / "died")))
    assert result == "survived"
    assert pool.restarts == 1


def test_a_bug_of_the_grader_is_an_error_with_its_traceback_and_no_reward():
    async def calls(pool):
        with pytest.raises(CallError, match="a bug in the function") as caught:
            await pool.scores(functions.raise_bug)
        assert not isinstance(caught.value, CallCrash)
        return await pool.call(functions.echo, 2)

    assert run(calls)[0] == 2


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (functions.broken_prepare, "no such library here"),
        (functions.exit_in_prepare, "exited with status 5"),
        (functions.slow_prepare, "no reply within"),
    ],
)
def test_a_worker_that_cannot_start_is_an_infrastructure_failure(prepare, says):
    async def calls(pool):
        with pytest.raises(WhetError, match=says) as caught:
            await pool.scores(functions.echo, 1)
        assert not isinstance(caught.value, CallError)

    run(calls, prepare=prepare, start_s=2.0 if prepare is functions.slow_prepare else 60.0)


def test_a_worker_that_can_not_start_after_others_did_costs_a_call_and_not_the_run():
    async def calls(pool):
        assert await pool.call(functions.echo, 1) == 1
        with pytest.raises(CallCrash):
            await pool.call(functions.die)
        os.environ["WHET_TEST_BROKEN"] = "1"
        try:
            for child in list(pool.children):
                child.kill()
            with pytest.raises(CallError, match=r"could not start: .*exited with status 5"):
                await pool.call(functions.echo, 1)
        finally:
            del os.environ["WHET_TEST_BROKEN"]
        assert await pool.call(functions.echo, 2) == 2

    run(calls, prepare=functions.exit_in_prepare_where_asked)


def test_calls_run_side_by_side(tmp_path):
    def meet(pool, *names):
        return pool.call(functions.meet, str(tmp_path), *names)

    async def calls(pool):
        return await asyncio.gather(meet(pool, "one", "two"), meet(pool, "two", "one"))

    assert run(calls, workers=2, deadline_s=120.0)[0] == ["one", "two"]


def test_closing_ends_calls_in_progress_and_leaves_no_process():
    async def calls(pool):
        pid = await pool.call(functions.process_id)
        call = asyncio.create_task(pool.call(functions.sleep, 60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        with pytest.raises(WhetError, match="closed"):
            await call
        return pid

    assert gone(run(calls)[0])


def test_workers_die_with_a_parent_that_is_killed():
    script = (
        "import asyncio, os, sys\n"
        "from tests.processes import functions\n"
        "from whet.processes.pool import Pool\n"
        "async def main():\n"
        "    pool = Pool()\n"
        "    print(await pool.call(functions.process_id), flush=True)\n"
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


def test_a_pool_serves_several_event_loops():
    pool = GradingPool(limits=WorkerLimits(workers=1))
    try:
        assert asyncio.run(pool.call(functions.echo, 1)) == 1
        assert asyncio.run(pool.call(functions.echo, 2)) == 2
    finally:
        pool.close()


def test_an_exit_in_a_function_is_a_mistake_of_the_function_and_no_reward():
    async def calls(pool):
        with pytest.raises(WhetError, match=r"a bug in the function:\n(.*\n)*SystemExit: 0"):
            await pool.scores(functions.leave, 0)
        return await pool.call(functions.echo, 1)

    assert run(calls)[0] == 1


def test_a_copy_that_a_function_makes_of_its_worker_ends_and_its_reply_is_not_taken_for_the_workers():
    async def calls(pool):
        pids = [await pool.call(functions.fork) for _ in range(3)]
        return pids, await pool.call(functions.process_id)

    (copies, worker), pool = run(calls)
    assert worker not in copies
    assert len(set(copies)) == 3
    assert pool.restarts == 0
    assert all(map(gone, copies))
