"""A client of NeMo Gym's resources servers."""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ruamel.yaml import YAML

from whet.base.errors import ConfigError
from whet.fetch.http import Answer, Cookies, HttpClient, UnansweredError, get_json, retried

MAX_BYTES = 16_000_000  # longest answer
_HEAD_DEADLINE = 30.0  # seconds for an answer of a head server
_BUSY = {429, 502, 503, 504}  # HTTP statuses after which a request is repeated
# FastAPI's answer for a path without a tool.
_NO_ROUTE = re.compile(r'\s*\{"detail": ?"(Not Found|Method Not Allowed)"\}\s*')


class GymError(Exception):
    """A server of Gym failed, or reports that an episode was not measured. Never a reward: the episode is repeated or
    its group dropped."""


class GymSession:
    """The requests of one episode. Each request sends the cookies that the server set with its last answer."""

    def __init__(self, http: HttpClient, url: str, retries: int, name: str) -> None:
        self._http, self._url, self._retries, self._name = http, url.rstrip("/"), retries, name
        self._cookies = Cookies()

    async def post(self, path: str, body: Any, *, once: bool = False) -> Any:
        """Return the JSON of an answer. ``once``: the request changes the server's state and is never repeated.

        Raises ``GymError`` if the server fails or answers with something else."""
        answer = await self._post(path, body, once)
        if answer.status >= 400:
            raise GymError(f"{self._url}/{path}: HTTP {answer.status}: {answer.text[:300]}")
        try:
            return json.loads(answer.text)
        except ValueError:
            raise GymError(f"the answer of {self._url}/{path} is not JSON: {answer.text[:200]!r}") from None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool, or its error message about the arguments. Raises ``GymError`` if it fails, or if
        the server lacks the tool, which the row declares."""
        answer = await self._post(quote(tool, safe=""), dict(arguments), once=True)
        if answer.status >= 500 or (answer.status in (404, 405) and _NO_ROUTE.fullmatch(answer.text)):
            raise GymError(f"{self._url}/{tool}: HTTP {answer.status}: {answer.text[:300]}")
        return answer.text

    async def _post(self, path: str, body: Any, once: bool) -> Answer:
        retries = 0 if once else self._retries

        async def attempt(number: int) -> Answer:
            answer = await self._http.post(f"{self._url}/{path}", body, self._cookies)
            if answer.status in _BUSY and number < retries:
                raise UnansweredError(f"HTTP {answer.status}")
            return answer

        try:
            return await retried(attempt, retries, "gym", self._name, path)
        except UnansweredError as error:
            raise GymError(f"{self._url}/{path} gave no answer in {retries + 1} attempts: {error}") from None


def servers_of(head: str) -> dict[str, str]:
    """Return the URL of each resources server, by its name and by its agents' names, from a head server's list. Raises
    ``ConfigError`` if the list can't be read."""
    url = f"{head.rstrip('/')}/global_config_dict_yaml"
    try:
        settings = YAML(typ="safe").load(get_json(url, _HEAD_DEADLINE))
        servers: dict[str, str] = {}
        behind: dict[str, str] = {}
        for name, kinds in settings.items():
            for kind, implementations in kinds.items() if isinstance(kinds, dict) else ():
                for implementation in implementations.values() if isinstance(implementations, dict) else ():
                    if kind == "resources_servers" and "port" in implementation:
                        servers[name] = f"http://{implementation['host']}:{implementation['port']}"
                    elif kind == "responses_api_agents" and "resources_server" in implementation:
                        behind[name] = implementation["resources_server"]["name"]
    except Exception as problem:
        raise ConfigError(f"data.head: {url} doesn't list Gym's servers: {type(problem).__name__}: {problem}") from None
    return servers | {agent: servers[name] for agent, name in behind.items() if name in servers}
