"""Rewards compared with real servers of nemo-gym 0.7.0, on its example rows and on adversarial answers.

Needs a separate interpreter with nemo-gym (`make install-gym`), named by WHET_GYM_PYTHON; not part of CI."""

import asyncio
import json
import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tasks.gym.play import over, play, says
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.structured.task_set import StructuredOutput

PYTHON = os.environ.get("WHET_GYM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="WHET_GYM_PYTHON names no interpreter with nemo-gym (make install-gym)"),
]
ROWS = {"mcqa": "example.jsonl", "structured_outputs": "structured_outputs_v3_example.jsonl"}
CONFIG = """
dry_run: false
profiling_enabled: false
head_server: {{host: 127.0.0.1, port: 11999}}
policy_model: {{responses_api_models: {{vllm_model: {{entrypoint: app.py, host: 127.0.0.1, port: 11998}}}}}}
{name}: {{resources_servers: {{{name}: {{entrypoint: app.py, domain: knowledge, host: 127.0.0.1, port: {port}}}}}}}
"""


def folder() -> Path:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([PYTHON, "-c", where], capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture(scope="module", params=list(ROWS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """The name of a real server, its URL and its example rows."""
    assert sysconfig.get_paths()["purelib"] != str(folder()), "nemo-gym's pins are not ours: it has its own interpreter"
    name, port = request.param, 12100 + len(request.param)
    environment = os.environ | {
        "NEMO_GYM_CONFIG_DICT": CONFIG.format(name=name, port=port), "NEMO_GYM_CONFIG_PATH": name,
        "PYTHONPATH": str(folder()),
    }  # fmt: skip
    log = (tmp_path_factory.mktemp(name) / "log.txt").open("wb")
    with subprocess.Popen(
        [PYTHON, f"resources_servers/{name}/app.py"], cwd=folder(), env=environment, stdout=log, stderr=log
    ) as process:
        try:
            for _ in range(240):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/reverify_mode")
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, Path(log.name).read_text()[-2000:]
                    time.sleep(0.5)
            yield name, f"http://127.0.0.1:{port}", folder() / f"resources_servers/{name}/data/{ROWS[name]}"
        finally:
            process.terminate()


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
