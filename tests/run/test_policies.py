"""Recipes with several policies: what is refused at reading, what each policy inherits, and who plays what."""

from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.test_roles import Pairs
from tests.tiny import tiny_llama
from tests.toy import read_settings, save_tiny_model, toy_settings, write_settings
from whet.base.errors import WhetError
from whet.cli.main import main
from whet.diagnose.duration import Duration
from whet.diagnose.plan import add_work, make_plan
from whet.run.policies import in_words, plays
from whet.run.recipe import Recipe

REPLACED = ("data", "policies", "algorithm")


class Three(Pairs):
    named_roles = ("a", "b", "c")


RIVAL = {"rival": {"plays": ["second"]}}


def nim(folder: Path, **changes: Any) -> dict[str, Any]:
    """Self-play of Nim on a tiny model."""
    settings = toy_settings(
        folder,
        data={"type": "nim", "stones": 5, "games": 1},
        sampling={"max_turns": 6, "max_prompt_tokens": 400, "max_observation_tokens": 64},
        generator={"max_context": 1024},
        learner={"max_tokens": 2048},
        policies=RIVAL,
    )
    for section, keys in changes.items():
        merged = section not in REPLACED and isinstance(keys, dict) and "type" not in keys
        settings[section] = settings.get(section, {}) | keys if merged else keys
    return settings


def read(folder: Path, **changes: Any) -> Recipe:
    return read_settings(nim(folder, **changes))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": (
        {"data": {"type": "supervised", "path": "rows.jsonl"}, "algorithm": {"type": "sft"}},
        "policies play the roles of episodes, and this run learns from rows",
    ),
    "one role": ({"data": {"type": "tests.toy:Lowercase"}}, "the episodes of Lowercase have one role"),
    "one seat": ({"data": {"type": "nim", "opponent": "random"}}, "the episodes of Nim have one role"),
    "unknown role": (
        {"policies": {"rival": {"plays": ["secnd"]}}},
        r"policies.rival.plays: Nim has no role 'secnd', only first, second. Did you mean 'second'\?",
    ),
    "twice": (
        {"policies": {"a": {"plays": ["second"]}, "b": {"plays": ["second"]}}},
        "policies.b.plays: another policy plays the role 'second', too",
    ),
    "named twice": ({"policies": {"a": {"plays": ["second", "second"]}}}, "the role 'second' is named twice"),
    "no role": ({"policies": {"a": {"plays": []}}}, "policies.a.plays"),
    "no name": ({"policies": {"a": {"plays": [""]}}}, "a role has a name"),
    "a bad name": ({"policies": {"a/b": {"plays": ["second"]}}}, "policies"),
    "nothing left": ({"policies": {"a": {"plays": ["first", "second"]}}}, "no role is left for the main policy"),
    "a set's name": (
        {"evaluation": {"sets": {"rival": {"data": "arithmetic"}}}},
        "evaluation.sets.rival has the name of a policy",
    ),
    "judge": (
        {
            "evaluation": {
                "sets": {"tone": {"data": {"type": "judge", "taskset": "reviews", "judge": {"model": "policy"}}}}
            }
        },
        "judge.model = policy: there are several policies",
    ),
    "filters": (
        {"algorithm": {"type": "grpo", "filters": [{"type": "overlong_shaping", "limit": 8, "buffer": 2}]}},
        "algorithm.filters: overlong_shaping reads one reward",
    ),
    "pairs": ({"algorithm": {"type": "online_dpo"}}, "algorithm.filters: best_and_worst reads one reward"),
    "rewards": ({"rewards": {"type": "length", "free": 2, "limit": 4}}, "rewards: composed rewards read one reward"),
    "ranks": ({"parallel": {"fsdp": 2}}, "parallel needs 2 ranks, but cluster = local has no processes for them"),
    "a server": (
        {"generator": {"type": "remote", "urls": ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]}},
        r"policies.rival.generator: the engine of the main policy has the server http://127.0.0.1:8000; give this "
        "policy its own generator with other urls",
    ),
    "a GPU": (
        {"generator": {"type": "vllm", "max_context": 1024, "devices": "1"}},
        "policies.rival.generator: the engine of the main policy has the GPU 1; .* with other devices",
    ),
    "its GPU": (
        {
            "data": "tests.run.test_policies:Three",
            "policies": {
                name: {"plays": [name], "generator": {"type": "vllm", "max_context": 1024, "devices": "2"}}
                for name in ("b", "c")
            },
        },
        "policies.c.generator: the engine of the policy b has the GPU 2",
    ),
    "partial": (
        {"rollouts": {"max_staleness": 1, "partial": True}},
        "rollouts.partial is not supported together with policies",
    ),
    "replay": ({"rollouts": {"replay": "run"}}, "rollouts.replay is not supported together with policies"),
    "its context": (
        {"policies": {"rival": {"plays": ["second"], "generator": {"type": "torch", "max_context": 64}}}},
        "policies.rival: sampling.max_prompt_tokens .* more than the generator holds, generator.max_context = 64",
    ),
    "its optimizer": (
        {"policies": {"rival": {"plays": ["second"], "optimizer": {"lr": -1}}}},
        "policies.rival.optimizer.lr",
    ),
}


def test_a_setting_of_a_policy_that_is_not_read_is_an_error(tmp_path: Path) -> None:
    rival = {"plays": ["second"], "optimizer": {"min_lr_ratio": 0.5}}
    with pytest.raises(WhetError, match=r"policies.rival.optimizer.min_lr_ratio: it is read only where .*schedule"):
        read(tmp_path, policies={"rival": rival})


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_combine_is_refused_at_reading(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(WhetError, match=message):
        read(tmp_path, **changes)


def test_a_teacher_and_vision_are_refused(tmp_path: Path) -> None:
    teacher = {"type": "on_policy_distillation", "teachers": {"wise": str(tmp_path)}}
    for changes, message in (
        ({"algorithm": teacher}, "teachers are for runs with one policy"),
        (
            {"model": {"path": str(tmp_path), "vision": "frozen"}},
            "model.vision is not supported together with policies",
        ),
    ):
        with pytest.raises(WhetError, match=message):
            read(tmp_path, **changes)


def test_a_policy_has_the_sections_of_the_recipe_unless_it_has_its_own(tmp_path: Path) -> None:
    common = {"chat_template": "plain", "optimizer": {"lr": 0.5}}
    recipe = read(tmp_path, **common)
    own = recipe.of_policy("rival")
    assert own == recipe.model_copy(update={"policies": {}})
    rival = {"plays": ["second"], "model": str(tmp_path / "other"), "optimizer": {"warmup_steps": 3}}
    own = read(tmp_path, **common, policies={"rival": rival}).of_policy("rival")
    assert own.model.path == str(tmp_path / "other")
    assert own.chat_template is None  # another model has its own
    assert (own.optimizer.lr, own.optimizer.warmup_steps) == (1e-6, 3)  # a section is replaced whole
    assert own.generator == recipe.generator


def test_the_main_policy_plays_what_no_other_plays(tmp_path: Path) -> None:
    recipe = read(tmp_path)
    assert [plays(recipe, name)(role) for name in ("", "rival") for role in ("first", "second", "")] == [
        True, False, True, False, True, False,
    ]  # fmt: skip
    assert in_words(recipe) == "the main policy plays first; rival plays second"


def test_the_plan_counts_all_policies(tiny_model: Path) -> None:
    one = make_plan(read(tiny_model, policies={}), runtime=1000)
    two = make_plan(read(tiny_model), runtime=1000)
    here, alone = two.processes["this process"], one.processes["this process"]
    assert set(two.models) == {"policy", "rival's policy"}
    assert sum(here.always.values()) - 1000 == 2 * (sum(alone.always.values()) - 1000)
    for phase in ("generate", "publish"):
        assert sum(here.phases[phase].values()) == 2 * sum(alone.phases[phase].values())
    assert here.phases["learn of the rival"] == here.phases["learn"]
    assert (two.refit, two.refit_tensors) == (2 * one.refit, 2 * one.refit_tensors)
    assert not two.warnings


def test_the_plan_of_ranks_counts_all_policies(tiny_model: Path) -> None:
    ranks = {"cluster": {"type": "processes"}, "parallel": {"fsdp": 2}}
    one, two = (make_plan(read(tiny_model, policies=policies, **ranks), runtime=1000) for policies in ({}, RIVAL))
    assert set(two.processes) == {"this process", "each rank of the policy", "each rank of the policy of rival"}
    for whose in ("", " of rival"):
        assert two.processes[f"each rank of the policy{whose}"] == one.processes["each rank of the policy"]
    engines = {"generator": {"type": "remote", "urls": ["http://127.0.0.1:1"]}}
    own = {"rival": {"plays": ["second"], "generator": {"type": "remote", "urls": ["http://127.0.0.1:2"]}}}
    assert "each engine of rival" in make_plan(read(tiny_model, policies=own, **engines), runtime=1000).processes


def test_each_policy_takes_the_time_of_its_share_of_the_roles(tiny_model: Path, tmp_path: Path) -> None:
    wide = save_tiny_model(tmp_path / "wide", lambda: tiny_llama(hidden_size=128, intermediate_size=256))

    def time(**changes: Any) -> Duration:
        plan = make_plan(recipe := read(tiny_model, evaluation={"every": 1, "limit": 2}, **changes), runtime=0)
        add_work(plan, recipe)
        assert plan.time is not None, plan.warnings
        return plan.time

    one, same = time(policies={}), time()
    assert same.sampling == pytest.approx(one.sampling)
    assert same.evaluations[""] == pytest.approx(2 * one.evaluations[""])  # each answers the test games in turn
    other, whole = (
        time(policies={"rival": {"plays": ["second"], "model": str(wide)}}),
        time(policies={}, model={"path": str(wide)}),
    )
    assert other.sampling == pytest.approx((one.sampling + whole.sampling) / 2)
    assert same.learning > one.learning  # by a second optimizer step


def test_a_run_of_several_policies_is_not_served(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path / "recipe.yaml", nim(tiny_model))
    with pytest.raises(SystemExit, match="2"):
        main(["serve", str(tmp_path)])
    assert "trained several policies, and `whet serve` serves one" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(tmp_path), "--out", str(tmp_path / "out"), "--policy", "rivl"])
    assert "has no further policy 'rivl'; there are: rival" in capsys.readouterr().err
