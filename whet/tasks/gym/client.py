"""A client of NeMo Gym's resources servers and agent servers."""

import re
from collections.abc import Mapping
from urllib.parse import quote

from whet.fetch.http import Answer, Cookies, HttpClient, UnansweredError, retried

MAX_BYTES = 16_000_000  # longest answer
_SHOWN = 1000  # most characters of an answer in an error
_BUSY = {429, 502, 503, 504}  # HTTP statuses after which a request is repeated
_UNKNOWN = {404, 405}  # HTTP statuses of a path without a route
# FastAPI's answer for a path without a tool.
_NO_ROUTE = re.compile(r'\s*\{"detail": ?"(Not Found|Method Not Allowed)"\}\s*')


class GymError(Exception):
    """A server of Gym failed, or reports that an episode was not measured. Never a reward: the episode is repeated or
    its group dropped."""


class GymSession:
    """The requests of one episode. Each request sends the cookies that the server set with its last answer."""

    def __init__(self, http: HttpClient, url: str, retries: int, name: str) -> None:
        self.url, self._http, self._retries, self._name = url.rstrip("/"), http, retries, name
        self._cookies = Cookies()

    async def post(
        self, path: str, body: object, *, once: bool = False, headers: Mapping[str, str] | None = None
    ) -> object:
        """Return the JSON of an answer. ``once``: the request changes the server's state and is never repeated.

        Raises ``GymError`` if the server fails or answers with something else."""
        answer = await self._post(path, body, once, headers)
        if answer.status >= 400:
            raise GymError(f"{self.url}/{path}: HTTP {answer.status}: {answer.text[:_SHOWN]}")
        try:
            return answer.json()
        except ValueError:
            raise GymError(f"the answer of {self.url}/{path} is not JSON: {answer.text[:_SHOWN]!r}") from None

    async def call(self, tool: str, arguments: Mapping[str, object]) -> str:
        """Return the result of a tool, or its error message about the arguments. Raises ``GymError`` if it fails, or if
        the server lacks the tool, which the row declares."""
        answer = await self._post(quote(tool, safe=""), dict(arguments), once=True)
        if answer.status >= 500 or (answer.status in _UNKNOWN and _NO_ROUTE.fullmatch(answer.text)):
            raise GymError(f"{self.url}/{tool}: HTTP {answer.status}: {answer.text[:_SHOWN]}")
        return answer.text

    async def close(self, body: Mapping[str, object]) -> None:
        """Have the server release the session. Servers that keep none, or are older than Gym 0.7, refuse the request.
        Raises ``GymError`` if the server fails."""
        answer = await self._post("close_session", dict(body), once=False)
        if answer.status >= 500:
            raise GymError(f"{self.url}/close_session: HTTP {answer.status}: {answer.text[:_SHOWN]}")

    async def _post(self, path: str, body: object, once: bool, headers: Mapping[str, str] | None = None) -> Answer:
        retries = 0 if once else self._retries

        async def attempt(number: int) -> Answer:
            answer = await self._http.post(f"{self.url}/{path}", body, self._cookies, headers)
            if answer.status in _BUSY and number < retries:
                raise UnansweredError(f"HTTP {answer.status}")
            return answer

        try:
            return await retried(attempt, retries, "gym", self._name, path)
        except UnansweredError as error:
            raise GymError(f"{self.url}/{path} gave no answer in {retries + 1} attempts: {error}") from None
