"""Conversations in NeMo Gym's format: items of OpenAI's Responses API, in requests and in rows."""

import json
from collections.abc import Iterator, Sequence

from whet.base.strict_json import JsonObject
from whet.core.content import text_of
from whet.core.types import Message


def template_tools(tools: Sequence[dict[str, object]]) -> list[JsonObject] | None:
    """Return the tools of a row in the nested form of chat templates; None without tools."""
    keys = ("name", "description", "parameters")
    nested = [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        for tool in tools
    ]
    return nested or None


def output_items(messages: Sequence[Message]) -> Iterator[dict[str, object]]:
    """Yield the items after the prompt: thoughts, calls, their results, and texts. Call ids must be unique in the whole
    conversation."""
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = f"call_{message.get('tool_call_id', '')}"
            yield {"type": "function_call_output", "call_id": call_id, "output": text_of(message["content"])}
            continue
        if thought := message.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": thought}]
            yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
        calls, text = message.get("tool_calls", []), text_of(message["content"])
        if text.strip() or not calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            yield {
                "type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part],
            }  # fmt: skip
        for call in calls:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            yield {
                "type": "function_call", "call_id": f"call_{call['id']}", "name": function["name"],
                "arguments": arguments,
            }  # fmt: skip


def response(messages: Sequence[Message], parameters: dict[str, object]) -> dict[str, object]:
    """Return the conversation after the prompt as a response of a model server."""
    return {
        "id": "resp_whet", "object": "response", "created_at": 0.0, "model": "policy", "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": parameters.get("tools", []), "output": list(output_items(messages)),
    }  # fmt: skip


def final_text(response: JsonObject) -> str:
    """Return the text of the last message of a response. Raises ``ValueError``, ``LookupError`` or ``TypeError`` for an
    object that is not a response."""
    texts = [item for item in response["output"] if item.get("type", "message") == "message"]
    if not texts:
        return ""
    content = texts[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
