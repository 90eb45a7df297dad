"""Write rows on which a model learns to use mini-swe-agent: the messages of its episodes on toy repositories, repaired.

python examples/mini/repairs.py repairs.jsonl
"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from whet.core.types import FunctionCall, Message, Task
from whet.tasks.shell.repositories import Repositories, Repository

RECIPE = YAML(typ="safe").load(Path(__file__).parent / "grpo.yaml")
# What mini-swe-agent sends: the first message of its mini.yaml, and its only tool. The recipe sets the other templates.
SYSTEM = "You are a helpful assistant that can interact with a computer."
SET = [word for flag, word in pairwise(RECIPE["data"]["program"]) if flag == "-c"]
ASKED = next(word.partition("=")[2] for word in SET if word.startswith("agent.instance_template="))
COMMAND = {"type": "string", "description": "The bash command to execute"}
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": COMMAND}, "required": ["command"]},
    },
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def repair(repository: Repository) -> str:
    """Return a command of sed that replaces the line with the bug."""
    broken, right = repository.before[repository.path].split("\n"), repository.repaired.split("\n")
    if len(broken) != len(right):
        raise ValueError(f"{repository.path}: the bug changes the number of lines")
    [(old, new)] = [(old, new) for old, new in zip(broken, right, strict=True) if old != new]
    pattern = re.sub(r"([].*^$\\[|])", r"\\\1", old)
    return f"sed -i 's|{pattern}|{new}|' {repository.path}"


def messages(task: Task[Repository]) -> list[Message]:
    """Return an episode that looks at the file, repairs it and submits, as mini-swe-agent sends its messages."""
    repository = task.data
    asked = ASKED.replace("{{task}}", str(task.prompt[-1]["content"]))
    conversation: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    shown = (f"cat {repository.path}", repository.before[repository.path]), (repair(repository), "")
    for command, output in shown:
        conversation += [_call(command), {"role": "tool", "content": f"<returncode>0</returncode>\n{output}"}]
    return [*conversation, _call(SUBMIT)]


def _call(command: str) -> Message:
    function: FunctionCall = {"name": "bash", "arguments": {"command": command}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def rows(split: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the first tasks of a split."""
    settings = {key: value for key, value in RECIPE["data"]["taskset"].items() if key != "type"}
    for task in Repositories(**settings).tasks(split)[:most]:
        yield {"id": task.uid, "messages": messages(task), "tools": [TOOL]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of the rows; NAME-test.jsonl is written to the same folder")
    path = parser.parse_args().out
    path.parent.mkdir(parents=True, exist_ok=True)
    for out, split, most in (path, "train", 64), (path.with_stem(f"{path.stem}-test"), "test", 24):
        out.write_text("".join(json.dumps(row) + "\n" for row in rows(split, most)), encoding="utf-8")
        print(f"{most} rows in {out}")


if __name__ == "__main__":
    main()
