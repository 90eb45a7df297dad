"""The events of a streamed answer of ``/v1/responses``: of each item its beginning, its pieces and its end."""

import json
from collections.abc import Iterator

from whet.base.strict_json import JsonObject
from whet.endpoint.events import Events, pieces
from whet.endpoint.request import ApiError, openai_error


class ResponsesEvents(Events):
    """See ``Events``."""

    def __init__(self, begun: JsonObject) -> None:
        super().__init__(begun)
        self._numbers = iter(range(2**63))
        self._items, self._open = 0, ""  # the items that have begun, and the type of the newest while it is open

    def begin(self) -> Iterator[str]:
        response = {**self.begun, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def thought_piece(self, piece: str) -> Iterator[str]:
        if not self._open:
            yield from self._begin(reasoning_item(self._id, ""))
        yield self._event(
            "response.reasoning_text.delta", delta=piece, **self._place(f"rs_{self._id}", content_index=0)
        )

    def text_piece(self, piece: str) -> Iterator[str]:
        if self._open == "reasoning":
            yield from self._end(reasoning_item(self._id, self.thought))
        if not self._open:
            yield from self._begin(message_item(self._id, "", "in_progress"))
        place = self._place(f"msg_{self._id}", content_index=0)
        yield self._event("response.output_text.delta", delta=piece, logprobs=[], **place)

    def end(self, body: JsonObject) -> Iterator[str]:
        ended = self._items - bool(self._open)
        for item in body["output"][ended:]:
            if not self._open:
                yield from self._begin(item)
            yield from self._end(item)
        yield self._event(f"response.{body['status']}", response=body)

    def failed(self, error: ApiError) -> str:
        return self._event("error", **openai_error(error), message=str(error), code=error.code, param=error.param)

    @property
    def _id(self) -> str:
        return str(self.begun["id"]).removeprefix("resp_")

    def _begin(self, item: JsonObject) -> Iterator[str]:
        self._items, self._open = self._items + 1, item["type"]
        empty: JsonObject = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield self._event("response.output_item.added", output_index=self._items - 1, item={**item, **empty})
        if item["type"] == "message":
            [part] = item["content"]
            place = self._place(item["id"], content_index=0)
            yield self._event("response.content_part.added", part={**part, "text": ""}, **place)

    def _end(self, item: JsonObject) -> Iterator[str]:
        place = self._place(item["id"])
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield self._event("response.function_call_arguments.delta", delta=piece, **place)
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **whole, **place)
        else:
            [part] = item["content"]
            place |= {"content_index": 0}
            if item["type"] == "message":
                yield self._event("response.output_text.done", text=part["text"], logprobs=[], **place)
                yield self._event("response.content_part.done", part=part, **place)
            else:
                yield self._event("response.reasoning_text.done", text=part["text"], **place)
        self._open = ""
        yield self._event("response.output_item.done", output_index=self._items - 1, item=item)

    def _place(self, id: str, **more: int) -> dict[str, object]:
        return {"output_index": self._items - 1, "item_id": id, **more}

    def _event(self, kind: str, **data: object) -> str:
        numbered = {"type": kind, **data, "sequence_number": next(self._numbers)}
        return f"event: {kind}\ndata: {json.dumps(numbered)}\n\n"


def reasoning_item(id: str, text: str) -> dict[str, object]:
    """Return the item of a thought."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": content}


def message_item(id: str, text: str, status: str) -> dict[str, object]:
    """Return the item of a text."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], "id": f"msg_{id}", "status": status}
