"""Requests to NeMo Gym's resources servers. One that fails is asked again, then it is a failure of infrastructure."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ruamel.yaml import YAML

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.fetch.post import bounded, pause

with extra("tasks", "data.type=nemo_gym"):
    import httpx

_MOST_BYTES = 16_000_000
_LOOKS = 30.0  # seconds that a head server may take


class GymError(Exception):
    """A server of Gym failed, or says that an episode was not measured. Never a reward: the episode is repeated or its
    group dropped."""


class GymSession:
    """The requests of one episode: its cookies, which the server signs anew each time, go with each of them."""

    def __init__(self, http: httpx.AsyncClient, url: str, deadline: float, retries: int, name: str) -> None:
        self._http, self._url, self._deadline, self._retries, self._name = (
            http,
            url.rstrip("/"),
            deadline,
            retries,
            name,
        )
        self._cookies = httpx.Cookies()

    async def post(self, path: str, body: Any, *, once: bool = False) -> Any:
        """Return the JSON of an answer. ``once``: the request changes something, and is not repeated.

        Raises ``GymError`` for a server that fails or gives no JSON."""
        status, text = await self._post(path, body, once)
        if status >= 400:
            raise GymError(f"{self._url}/{path}: HTTP {status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            raise GymError(f"{self._url}/{path} answered with what is not JSON: {text[:200]!r}") from None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool says, errors that it blames on the caller included. Raises ``GymError`` where it fails."""
        status, text = await self._post(quote(tool, safe=""), dict(arguments), once=True)
        if status >= 500:
            raise GymError(f"{self._url}/{tool}: HTTP {status}: {text[:300]}")
        return text

    async def _post(self, path: str, body: Any, once: bool) -> tuple[int, str]:
        attempts = 1 if once else self._retries + 1
        problem = ""
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(pause(attempt, "gym", self._name, path))
            try:
                async with asyncio.timeout(self._deadline):
                    status, text = await self._read(path, body)
                if status in (429, 502, 503, 504) and attempt + 1 < attempts:
                    problem = f"HTTP {status}"
                    continue
                return status, text
            except (httpx.HTTPError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise GymError(f"{self._url}/{path} gave no answer in {attempts} attempts: {problem}")

    async def _read(self, path: str, body: Any) -> tuple[int, str]:
        request = self._http.build_request("POST", f"{self._url}/{path}", json=body, timeout=self._deadline)
        self._cookies.set_cookie_header(request)
        answer = await self._http.send(request, stream=True)
        try:
            content = await bounded(answer, _MOST_BYTES)
        except ValueError as problem:
            raise GymError(f"{self._url}/{path}: {problem}") from None
        finally:
            await answer.aclose()
        self._cookies.extract_cookies(answer)
        return answer.status_code, content.decode("utf-8", "replace")


def servers_of(head: str) -> dict[str, str]:
    """Return the URL of each resources server, and of the one behind each agent, as a head server knows them. Raises
    ``ConfigError`` where there is none."""
    url = f"{head.rstrip('/')}/global_config_dict_yaml"
    try:
        known = YAML(typ="safe").load(httpx.get(url, timeout=_LOOKS).raise_for_status().json())
        found: dict[str, str] = {}
        behind: dict[str, str] = {}
        for name, kinds in known.items():
            for kind, implementations in kinds.items() if isinstance(kinds, dict) else ():
                for settings in implementations.values() if isinstance(implementations, dict) else ():
                    if kind == "resources_servers" and "port" in settings:
                        found[name] = f"http://{settings['host']}:{settings['port']}"
                    elif kind == "responses_api_agents" and "resources_server" in settings:
                        behind[name] = settings["resources_server"]["name"]
    except Exception as problem:
        raise ConfigError(f"data.head: {url} doesn't name Gym's servers: {type(problem).__name__}: {problem}") from None
    return found | {agent: found[server] for agent, server in behind.items() if server in found}
