"""An agent written for OpenAI's API: it drafts, checks its sums, asks a reviewer. Its recipe is agent.yaml."""

import re

from openai import OpenAI

from whet.core.types import Message, Task

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # made once, because it loads certificates


def solve(task: Task, base_url: str, api_key: str) -> str:
    chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions

    def say(*messages: Message) -> str:
        return chat.create(model="policy", messages=messages).choices[0].message.content or ""

    draft = say(*task.prompt)
    asked: Message = {
        "role": "user",
        "content": f"{task.prompt[-1]['content']}\n{draft}\nIs this right? Say yes or no.",
    }
    advice = wrong_sums(draft) or say(asked)  # of a tool, or of a sub-agent, which doesn't know the conversation
    if advice.lower().startswith("yes"):
        return draft
    return say(*task.prompt, {"role": "assistant", "content": draft}, {"role": "user", "content": advice})


def wrong_sums(text: str) -> str:
    sums = re.findall(r"(\d{1,6}) \+ (\d{1,6}) = (\d+)", text)
    return " ".join(f"{a} + {b} is not {total}." for a, b, total in sums if int(a) + int(b) != int(total))
