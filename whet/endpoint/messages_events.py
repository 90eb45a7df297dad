"""The events of a streamed answer of ``/v1/messages``: of each block its beginning, its pieces and its end."""

import json
from collections.abc import Iterator

from whet.base.strict_json import JsonObject
from whet.endpoint.events import Events, event, pieces
from whet.endpoint.request import ApiError


class MessagesEvents(Events):
    """See ``Events``."""

    def __init__(self, begun: JsonObject) -> None:
        super().__init__(begun)
        self._index, self._open = -1, ""  # the newest block, and its type while it is open

    def begin(self) -> Iterator[str]:
        yield event("message_start", message={**self.begun, "stop_reason": None, "stop_sequence": None, "content": []})

    def thought_piece(self, piece: str) -> Iterator[str]:
        yield from self._piece("thinking", piece, signature="")

    def text_piece(self, piece: str) -> Iterator[str]:
        yield from self._piece("text", piece)

    def end(self, body: JsonObject) -> Iterator[str]:
        yield from self._close()
        for block in body["content"]:
            if block["type"] == "tool_use":
                yield from self._begin({**block, "input": {}})
                for piece in pieces(json.dumps(block["input"], ensure_ascii=False)):
                    yield self._delta({"type": "input_json_delta", "partial_json": piece})
                yield from self._close()
        ending = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield event("message_delta", delta=ending, usage=body["usage"])
        yield event("message_stop")

    def failed(self, error: ApiError) -> str:
        return event("error", error=anthropic_error(error)["error"])

    def _piece(self, kind: str, piece: str, **more: str) -> Iterator[str]:
        if self._open != kind:
            yield from self._close()
            yield from self._begin({"type": kind, kind: "", **more})
        yield self._delta({"type": f"{kind}_delta", kind: piece})

    def _begin(self, empty: JsonObject) -> Iterator[str]:
        self._index, self._open = self._index + 1, empty["type"]
        yield event("content_block_start", index=self._index, content_block=empty)

    def _delta(self, delta: dict[str, object]) -> str:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._open:
            yield event("content_block_stop", index=self._index)
        self._open = ""


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: ApiError) -> dict[str, object]:
    """Return the error in Anthropic's format."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
