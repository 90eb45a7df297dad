"""A task set as the argument of a command has the settings that are given and its own defaults."""

from tests.toy import Lowercase
from whet.cli.arguments import recipe_of
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
