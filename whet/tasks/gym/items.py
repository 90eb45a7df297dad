"""Conversations as NeMo Gym writes them: items of OpenAI's Responses API, on the wire and in rows."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from whet.core.content import text_of
from whet.core.types import Message


def template_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the row's flat tools as chat templates take them."""
    wanted = ("name", "description", "parameters")
    nested = [{"type": "function", "function": {k: t[k] for k in wanted if t.get(k) is not None}} for t in tools]
    return nested or None


def output_items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield what happened after the prompt: thoughts, calls, their results and what was said. A call's id is its own in
    the whole conversation."""
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            call = f"call_{message.get('tool_call_id', '')}"
            yield {"type": "function_call_output", "call_id": call, "output": text_of(message["content"])}
            continue
        if thought := message.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": thought}]
            yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
        calls, said = message.get("tool_calls", []), text_of(message["content"])
        if said.strip() or not calls:
            text = {"type": "output_text", "text": said, "annotations": []}
            yield {
                "type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text],
            }  # fmt: skip
        for called in calls:
            function = called["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            yield {
                "type": "function_call", "call_id": f"call_{called['id']}", "name": function["name"],
                "arguments": arguments,
            }  # fmt: skip


def response(messages: Sequence[Message], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation after the prompt as the answer of a model server."""
    return {
        "id": "resp_whet", "object": "response", "created_at": 0.0, "model": "policy", "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": parameters.get("tools", []), "output": list(output_items(messages)),
    }  # fmt: skip


def final_text(response: dict[str, Any]) -> str:
    """Return what the last message of a response says. Raises ``ValueError``, ``LookupError`` or ``TypeError`` for what
    is not a response."""
    said = [item for item in response["output"] if item.get("type", "message") == "message"]
    if not said:
        return ""
    content = said[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
