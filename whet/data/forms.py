"""The forms in which conversations are published, brought into the fields that rows have here: ShareGPT's
``conversations``, Alpaca's and Dolly's ``instruction``, and the transcripts of Anthropic's HH.
"""

import re
from collections.abc import Mapping

from whet.base.strict_json import STRICT, JsonObject
from whet.data.messages import not_read

_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "assistant": "assistant",
    "model": "assistant", "function_call": "assistant",
    "system": "system", "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
_ANSWERS = {"output": "input", "response": "context"}  # Alpaca's and Dolly's: the answer -> the rest of the question
_TURN = re.compile(r"\n\n(Human|Assistant):")


def conversation(values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a row with a published form replaced by ``messages``, ``prompt`` and ``completion``, or
    ``chosen`` and ``rejected``. Raises ``ValueError`` for a ShareGPT turn that is not one."""
    fields = dict(values)
    paired = "chosen" in fields and "rejected" in fields
    if "conversations" in fields and not fields.keys() & {"messages", "prompt"}:
        fields["prompt" if paired else "messages"] = _messages(fields.pop("conversations"), "conversations")
    if isinstance(fields.get("instruction"), str) and not fields.keys() & {"messages", "prompt"}:
        _from_instruction(fields, paired)
    if paired:
        for name in ("chosen", "rejected"):
            fields[name] = _answer(fields[name], name)
    return fields


def _from_instruction(fields: dict[str, object], paired: bool) -> None:
    answer = next((name for name in _ANSWERS if isinstance(fields.get(name), str)), None)
    if answer is None and not paired:
        return
    more = fields.pop(_ANSWERS[answer] if answer else "input", None)
    if more is not None and not isinstance(more, str):
        raise ValueError(f"field {_ANSWERS[answer] if answer else 'input'!r} must be a text, not {more!r:.80}")
    if fields.get("history"):
        raise ValueError(
            "field 'history' has turns before the instruction, and is not read: write the row as 'messages'"
        )
    parts = [fields.pop("instruction"), more]
    fields["prompt"] = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
    if answer and not paired:
        fields["completion"] = fields.pop(answer)


def _answer(value: object, name: str) -> object:
    """Return a transcript or a single message as a list of messages, and anything else unchanged."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        texts = _TURN.split(value)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        return [
            {"role": roles[who], "content": text.strip()} for who, text in zip(texts[::2], texts[1::2], strict=True)
        ]
    if isinstance(value, dict):
        return _messages([value], name) if "from" in value else [value]
    return value


def _messages(turns: object, name: str) -> list[JsonObject]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"field {name!r} must be a list of turns that is not empty")
    return [_message(turn, f"{name}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: object, where: str) -> dict[str, object]:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if isinstance(turn, dict) and (problem := not_read(turn)):
        raise ValueError(f"field '{where}' {problem}")
    speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(text, str):
        raise ValueError(
            f"field '{where}' must have a text 'value' and a 'from' that is one of: {', '.join(_ROLES)}; or a 'role' "
            "and a 'content'"
        )
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": text}
    try:
        call = STRICT.decode(text)
    except ValueError as problem:
        raise ValueError(f"field '{where}' must hold a call as JSON: {problem}") from None
    calls = call if isinstance(call, list) else [call]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": each} for each in calls],
    }
