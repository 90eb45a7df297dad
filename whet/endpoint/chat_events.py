"""The events of a streamed answer of ``/v1/chat/completions``."""

import json
from collections.abc import Iterator

from whet.base.strict_json import JsonObject
from whet.endpoint.events import Events
from whet.endpoint.request import ApiError, openai_error


class ChatEvents(Events):
    """See ``Events``. ``usage``: whether the last event has the numbers of tokens."""

    def __init__(self, begun: JsonObject, usage: bool) -> None:
        super().__init__(begun)
        self._usage = usage
        self._common = {name: begun[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def begin(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant"})

    def thought_piece(self, piece: str) -> Iterator[str]:
        yield self._chunk({"reasoning_content": piece})

    def text_piece(self, piece: str) -> Iterator[str]:
        yield self._chunk({"content": piece})

    def end(self, body: JsonObject) -> Iterator[str]:
        [choice] = body["choices"]
        streamed = ("role", "content", "reasoning_content", "tool_calls")
        rest = {name: value for name, value in choice["message"].items() if name not in streamed}
        for index, call in enumerate(choice["message"].get("tool_calls", [])):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk(rest, finish_reason=choice["finish_reason"], logprobs=choice["logprobs"])
        if self._usage:
            yield f"data: {json.dumps({**self._common, 'choices': [], 'usage': body['usage']})}\n\n"
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        return f"data: {json.dumps(openai_error(error))}\n\n"

    def _chunk(self, delta: dict[str, object], **ending: object) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **ending}
        return f"data: {json.dumps({**self._common, 'choices': [choice]})}\n\n"
