"""Rewards compared with real servers of nemo-gym 0.7.0, on its example rows and on adversarial answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.gym.play import over, play, says
from tests.tasks.gym.real import gym_folder, needs_gym, resources, running
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.structured.task_set import StructuredOutput

pytestmark = needs_gym
ROWS = {"mcqa": "example.jsonl", "structured_outputs": "structured_outputs_v3_example.jsonl"}


@pytest.fixture(scope="module", params=list(ROWS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """The name of a real server, its URL and its example rows."""
    name = request.param
    with running(tmp_path_factory.mktemp(name), {name: resources(name)}) as urls:
        yield name, urls[name], gym_folder() / f"resources_servers/{name}/data/{ROWS[name]}"


def answers(row: dict[str, Any]) -> dict[str, str]:
    """Answers to a row, by what they try."""
    if "options" in row:
        right, letters = row["expected_answer"], [letter for option in row["options"] for letter in option]
        wrong = next(letter for letter in letters if letter != right)
        return {
            "right": f"So \\boxed{{{right}}}",
            "wrong": f"\\boxed{{{wrong}}}",
            "last box": f"\\boxed{{{wrong}}} no, \\boxed{{{right}}}",
            "both": f"\\boxed{{{right}, {wrong}}}",
            "in text": f"\\boxed{{\\text{{{right}}}}}",
            "no box": right,
            "nothing": "",
        }
    whole = instance(json.loads(row["schema_str"]))
    return {
        "right": json.dumps(whole),
        "fenced": f"```json\n{json.dumps(whole)}\n```",
        "extra": json.dumps(whole | {"zzz": 1}),
        "a field less": json.dumps(dict(list(whole.items())[1:])),
        "empty object": "{}",
        "no JSON": "yes",
        "an array": "[]",
    }


def instance(schema: dict[str, Any]) -> Any:
    """Something that the schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    kind = next(k for k in kind if k != "null") if isinstance(kind, list) else kind
    if kind == "object":
        return {name: instance(part) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema["items"])] * max(1, schema.get("minItems", 1))
    return {"string": "2020-01-01", "integer": 1, "number": 1.5, "boolean": True}.get(str(kind))


# A schema whose branches theirs does not make strict: an object with none of the fields, or with another, passes.
LOOSE = {
    "responses_create_params": {"input": [{"role": "user", "content": "As JSON, please."}]},
    "schema_type": "json",
    "schema_str": json.dumps({"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]}),
}


def test_rewards_equal_the_rewards_of_real_servers(server: tuple[str, str, Path], tmp_path: Path) -> None:
    name, url, examples = server
    different, compared = [], 0
    lines = examples.read_text().splitlines() + ([] if name == "mcqa" else [json.dumps(LOOSE)])
    for number, line in enumerate(lines):
        row = json.loads(line)
        if row.get("response_mode", "text") != "text":
            continue  # an answer by a tool call is not graded as text
        loose = "anyOf" in json.loads(row.get("schema_str", "{}"))
        tried = {"no fields": "{}", "another field": '{"zzz": 1}', "right": '{"a": 1}'} if loose else answers(row)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line + "\n")
        tasks: Any = (
            MultipleChoice(path=str(path), test_size=0)
            if name == "mcqa"
            else StructuredOutput(path=str(path), test_size=0, content="filled", fence=False)
        )
        for kind, answer in tried.items():

            async def both(tasks: Any = tasks, path: Path = path, answer: str = answer) -> tuple[float, float]:
                gym = over(str(path), url, None)
                theirs, _ = await play(gym, gym.tasks.tasks("train")[0], [says(answer)])
                await gym.close()
                mine, _ = await play(tasks.open(), tasks.tasks("train")[0], [says(answer)])
                return theirs, mine

            theirs, mine = asyncio.run(both())
            compared += 1
            if loose and kind != "right":
                assert (theirs, mine) == (1.0, 0.0), "theirs does not make branches strict"
            elif theirs != mine:
                different.append((number, kind, theirs, mine))
    assert different == []
    assert compared > 20
