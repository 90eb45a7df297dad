"""Runs in virtual time: under kills, pauses, failures and slow episodes nothing is lost, doubled or too old, and
learner and generator keep each other busy."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.grids import grid
from tests.rollouts.simulator import Simulation, World
from whet.base.errors import GeneratorError, WhetError
from whet.rollouts.config import RolloutConfig

AHEAD = st.sampled_from(
    [
        {"max_staleness": 0, "order": "oldest", "partial": False},
        *(
            {"max_staleness": n, "order": order, "partial": partial}
            for n in (1, 2, 4)
            for order in ("oldest", "ready")
            for partial in (False, True)
        ),
    ]
)


class AnyInterleaving(RuleBasedStateMachine):
    """A run to which anything may happen."""

    simulation: Simulation

    @initialize(
        ahead=AHEAD,
        per_step=st.integers(1, 4),
        concurrency=st.sampled_from([2, 64]),
        spread=st.sampled_from([0.0, 1.5]),
        turns=st.sampled_from([1, 3]),
        flaky=st.sampled_from([0.0, 0.2]),
        dull=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 99),
    )
    def begin(self, ahead: dict[str, Any], per_step: int, concurrency: int, seed: int, **world: Any) -> None:
        config = RolloutConfig(
            prompts_per_step=per_step,
            concurrency=concurrency,
            max_failed=1.0,
            max_sampling_rounds=50,
            retries=4,
            **ahead,
        )
        self.simulation = Simulation(config, World(tool=0.05, slots=3, **world), seed=seed)

    @rule(steps=st.integers(1, 4))
    def take_steps(self, steps: int) -> None:
        try:
            self.simulation.run(steps)
        except WhetError as error:
            if "lost to failures" not in str(error) and not isinstance(error, GeneratorError):
                raise
            self.simulation.world = replace(self.simulation.world, flaky=0.0)  # the cause is fixed
            self.simulation.kill()

    @rule()
    def save(self) -> None:
        self.simulation.save()

    @rule(seconds=st.floats(0.0, 3.0))
    def rest(self, seconds: float) -> None:
        self.simulation.rest(seconds)

    @rule()
    def an_engine_dies(self) -> None:
        self.simulation.lose_an_engine()

    @rule(seconds=st.floats(0.0, 5.0), changes=st.just({}) | AHEAD)
    def die_in_a_step_and_resume(self, seconds: float, changes: dict[str, Any]) -> None:
        with contextlib.suppress(WhetError):
            self.simulation.run_for(seconds)
        self.simulation.kill(**changes)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        try:
            self.take_steps(6)  # the run continues after any failure
            self.simulation.check()
        finally:
            self.simulation.close()


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


@pytest.mark.slow
class TestManyInterleavings(AnyInterleaving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=600, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(("order", "learning"), grid(["oldest", "ready"], [0.3, 2.0]))
def test_ahead_of_step_the_slower_of_learner_and_generator_sets_the_pace(order: str, learning: float) -> None:
    config = RolloutConfig.model_validate({"prompts_per_step": 8, "max_staleness": 4, "order": order})
    world = World(learning=learning, tokens=32, slots=8, tasks=1000)
    simulation = Simulation(config, world, group_size=4)
    simulation.run(8)
    simulation.source.tally()
    steps = 50
    seconds = simulation.run(steps) / steps
    tokens = simulation.source.tally()[0].result()["answer/tokens"] / steps
    generating = tokens / (world.engines * world.slots * world.speed)
    assert max(generating, learning) / seconds > 0.9
    assert simulation.oldest == 4, "the bound was not used"
    simulation.close()


def test_many_steps_over_many_epochs_train_each_prompt_once_in_each() -> None:
    config = RolloutConfig(prompts_per_step=2, max_staleness=2, order="ready")
    simulation = Simulation(config, World(spread=1.5, dull=0.2, tasks=9))
    simulation.run(500)
    simulation.check()
    assert len(simulation.source.ledger.marks) - len(simulation.source._tickets) > 1000
    simulation.close()


@pytest.mark.parametrize("partial", [True, False])
def test_partial_rollouts_go_on_in_a_later_step_and_rest_while_the_learner_works(partial: bool) -> None:
    config = RolloutConfig(prompts_per_step=2, max_staleness=2, order="ready", partial=partial)
    simulation = Simulation(config, World(spread=2.0, tokens=32))
    simulation.run(100)
    assert simulation.most_versions_of_a_reply == 2, "no reply continued under newer weights"
    assert (simulation.finished_while_learning == 0) == partial
    simulation.close()


def test_a_run_resumed_with_a_smaller_bound_samples_anew_what_is_too_old_and_nothing_else() -> None:
    simulation = Simulation(RolloutConfig(prompts_per_step=2, max_staleness=4), World(spread=1.5))
    simulation.run(6)
    simulation.save()
    pending = json.loads(simulation.saved[0])["pending"]
    finished = {ticket["number"] for ticket in pending if ticket["episodes"]}
    assert finished
    assert len(finished) < len(pending)
    simulation.kill(max_staleness=0)
    simulation.oldest = 0
    simulation.run(1)
    started = [entry.version for entry in simulation.source.ledger._unwritten if entry.ticket not in finished]
    assert set(started) <= {6}, "what was not finished was sampled again under the weights of the checkpoint"
    simulation.run(7)
    assert simulation.oldest == 0
    simulation.check()
    stale = simulation.source.tally()[0].result()["tokens/stale"]
    sampled = sum(
        len(span["tokens"])
        for ticket in pending
        for episode in ticket["episodes"] or []
        for branch in episode["branches"]
        for span in branch["spans"]
        if span["trained"]
    )
    assert stale > 0
    assert stale >= sampled, "finished ones of older weights, and those restarted that were not first"
    simulation.close()


def test_ready_groups_go_before_a_slow_one_which_is_waited_for_in_the_end() -> None:
    """With as many steps ahead as the slow one takes, nothing waits for it."""
    longest = {}
    for order in ("oldest", "ready"):
        config = RolloutConfig.model_validate({"prompts_per_step": 1, "max_staleness": 4, "order": order})
        simulation = Simulation(config, World(spread=1.5, tokens=32, slots=64, learning=0.1), group_size=1)
        longest[order] = max(simulation.run(1) for _ in range(200))
        simulation.check()
        simulation.close()
    assert longest["ready"] <= longest["oldest"]
