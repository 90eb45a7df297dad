"""A task set as the argument of a command has the settings that are given and its own defaults."""

import pytest

from tests.toy import Lowercase
from whet.cli.arguments import recipe_of, warn_of_unread
from whet.cli.evaluate import recipe_of_model
from whet.config import RecipeError
from whet.tasks.math.arithmetic import Arithmetic


def test_a_task_set_has_its_own_defaults_and_not_the_settings_of_the_quickstart() -> None:
    assert recipe_of("arithmetic", []).taskset == Arithmetic()
    assert recipe_of("arithmetic", ["digits=3", "grader.require_box=false"]).taskset == Arithmetic.model_validate(
        {"digits": 3, "grader": {"require_box": False}}
    )
    assert recipe_of("tests.toy:Lowercase", ["size=4"]).taskset == Lowercase(size=4)
    assert recipe_of("quickstart", ["data.digits=3"]).taskset == Arithmetic.model_validate(
        recipe_of("quickstart", []).taskset.model_dump() | {"digits": 3}
    )


def test_a_model_as_the_argument_is_taken_whole_and_may_have_settings() -> None:
    model = recipe_of_model("acme/model", ["model.revision=abc", "sampling.top_p=0.5"], {"seed": 7}).model
    assert (model.path, model.revision, model.lora) == ("acme/model", "abc", None)


def test_settings_that_a_command_does_not_read_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    recipe_of("quickstart", ["data.digits=3", "optimizer.lr=1"])
    warn_of_unread(["generator.max_context=512", "sampling.temperature=0"], ("sampling",))
    assert caplog.messages == [
        "optimizer.lr=1 has no effect: this command does not read optimizer",
        "sampling.temperature=0 has no effect: this command does not read sampling",
    ]


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("arithmetic", ["digits=x"], "override 1 (digits=x): digits: expected a whole number, got text 'x'"),
        ("arithmetic", ["digits=2", "digit=3"], "override 2 (digit=3): digit: unknown key. Did you mean 'digits'?"),
        (
            "arithmetic",
            ["digits="],
            "override 1 (digits=): digits: the value is missing; write digits=null, or digits=",
        ),
        ("nowhere:Tasks", [], "nowhere:Tasks: data: there is no module 'nowhere'"),
    ],
)
def test_a_mistake_in_a_setting_of_a_task_set_has_the_place_where_it_was_written(
    target: str, changes: list[str], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(target, changes)
    assert str(caught.value).startswith(message)
