"""Tools that a resources server of Gym offers over the Model Context Protocol (``expose_tools_over_mcp``). Its
endpoint keeps no state: each request is one POST, whose headers name the session."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from whet.base.strict_json import JsonObject
from whet.tasks.gym.client import GymError, GymSession

_ACCEPT = {"accept": "application/json, text/event-stream"}


@dataclass(frozen=True)
class MCPTools:
    """The tools of one session, flat as in a row."""

    session: GymSession
    path: str
    headers: Mapping[str, str]
    tools: list[JsonObject]

    @property
    def names(self) -> set[str]:
        return {tool["name"] for tool in self.tools}

    @classmethod
    def none(cls, session: GymSession, access: object) -> Self:
        """Return the access without its tools. Raises ``GymError`` if it is not an access over HTTP."""
        if not isinstance(access, dict) or access.get("transport", "http") != "http":
            raise GymError(f"{session.url} offers its tools over a transport other than HTTP: {str(access)[:300]}")
        headers = access.get("headers") or {}
        return cls(session, str(access.get("url_path", "/mcp")).lstrip("/"), {**_ACCEPT, **headers}, [])

    @classmethod
    async def listed(cls, session: GymSession, access: object, besides: Collection[str]) -> Self:
        """Return the tools that the server lists, without those in ``besides``. ``access`` is ``resources_tools`` in
        the answer to a seed."""
        unlisted = cls.none(session, access)
        listed = (await unlisted._ask("tools/list", {})).get("tools", [])
        tools = [
            {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("inputSchema")}
            for tool in listed
            if tool["name"] not in besides
        ]
        return cls(session, unlisted.path, unlisted.headers, tools)

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the text of a tool's result, or of its error. Raises ``GymError`` if the server fails."""
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        return "\n".join(str(part.get("text", part)) for part in result.get("content", []))

    async def _ask(self, method: str, parameters: Mapping[str, object]) -> JsonObject:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        answer = await self.session.post(self.path, message, once=True, headers=self.headers)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, dict):
            raise GymError(f"{self.session.url}/{self.path} gave no result of {method}: {str(answer)[:300]}")
        return result
