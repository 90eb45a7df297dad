"""A task set as a resources server of NeMo Gym: ``/seed_session`` and ``/verify`` for rows that name its tasks, so that
training with Gym can use whet's graders.

Gym's protocol has no access tokens. To keep web pages from using the server, requests of pages (``Origin``) are
refused, and on loopback also requests for another host. Bodies and connections are bounded as in ``Endpoint``.
"""

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.base.listening import listen, reach
from whet.base.strict_json import STRICT, JsonObject
from whet.chat.calls import checked_arguments, why
from whet.core.types import Task
from whet.endpoint.connections import Connections, read_body
from whet.endpoint.gym_agents import PREFIXES
from whet.endpoint.http_server import Server
from whet.endpoint.request import ApiError
from whet.processes.loop_thread import format_error
from whet.tasks.base import TaskSet, checked_score
from whet.tasks.episodes import play
from whet.tasks.gym.items import final_text
from whet.tasks.gym.rows import TASK
from whet.tasks.gym.single_turn import check_single_turn
from whet.tasks.isolated import IsolatedEnvironments

log = logging.getLogger(__name__)

_DEADLINE = 120.0  # seconds for one verification
_CLOSING = 5  # seconds for answers in progress at the close
Handler = Callable[[dict[str, Any]], Awaitable[Any]]


def application(tasks: TaskSet, host: str = "127.0.0.1", connections: Connections | None = None) -> Starlette:
    """Return the server's application. The verification of a task that is not done after one answer is masked
    (``mask_sample``): its reward does not count."""
    by_uid: dict[str, Task] = {task.uid: task for split in ("train", "test") for task in tasks.tasks(split)}
    environments = IsolatedEnvironments(tasks.open())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await environments.close()

    async def seed_session(body: dict[str, object]) -> Response:
        session = body.get("resources_session_id")
        answer = JSONResponse({} if session is None else {"resources_session_id": session})
        answer.set_cookie("whet_session", secrets.token_hex(16), httponly=True)  # environment servers require a cookie
        return answer

    async def close_session(body: dict[str, object]) -> object:
        return {"resources_session_id": body.get("resources_session_id")}

    async def verify(body: JsonObject) -> object:
        uid = body.get(TASK)
        task = by_uid.get(uid) if isinstance(uid, str) else None
        if task is None:
            raise ApiError(422, f"{TASK!r} of the row does not name a task of this task set")
        try:
            answer = final_text(body["response"])
        except (LookupError, TypeError, AttributeError) as problem:
            raise ApiError(422, f"'response' is not an answer of a model: {format_error(problem)}") from None
        try:
            async with asyncio.timeout(_DEADLINE):
                _, step = await play(environments.make(task), answer)
            reward = checked_score("reward", step.reward, f"of {uid}")
            scores = {name: checked_score(name, value, f"of {uid}") for name, value in step.scores.items()}
        except Exception as problem:  # the answer must not be punished for an error of the grader
            reason = f"no grade within {_DEADLINE:g} s" if isinstance(problem, TimeoutError) else format_error(problem)
            log.warning("%s could not be verified: %s", uid, reason)
            return body | _masked("grader", reason)
        if not step.done:
            return body | _masked("not_done", "the task needs more than one reply, but only one is verified")
        return body | {"reward": reward, "mask_sample": False, "reward_components": scores}

    async def aggregate_metrics(body: dict[str, object]) -> object:
        """Answer the mean reward of verifications, which Gym asks for at the end of an evaluation."""
        answers = body.get("verify_responses")
        if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
            raise ApiError(422, "'verify_responses' must be a list of answers to /verify")
        measured = [answer.get("reward") for answer in answers if not answer.get("mask_sample")]
        rewards = [reward for reward in measured if isinstance(reward, int | float)]
        mean = {"mean/reward": sum(rewards) / len(rewards)} if rewards else {}
        return {"group_level_metrics": [], "agent_metrics": mean, "key_metrics": mean}

    async def status(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def reverify_mode(request: Request) -> Response:
        return JSONResponse("stateless")

    posts: dict[str, Handler] = {
        "/seed_session": seed_session,
        "/verify": verify,
        "/close_session": close_session,
        "/aggregate_metrics": aggregate_metrics,
    }
    bounds = connections or Connections()
    routes = [
        Route(prefix + path, partial(_answer, handler, host, bounds), methods=["POST"])
        for prefix in ("", PREFIXES[0])  # Gym names the rollout in the path if observability_enabled
        for path, handler in posts.items()
    ]
    return Starlette(routes=[Route("/", status), Route("/reverify_mode", reverify_mode), *routes], lifespan=lifespan)


async def serve(tasks: TaskSet, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled. ``ready`` is called with the address. Raises ``ConfigError`` if it can't listen there."""
    await check_single_turn(tasks)
    listener = listen(host, port)
    connections = Connections()
    settings = uvicorn.Config(
        application(tasks, host, connections), ws="none", log_config=None, log_level="critical", access_log=False,
        server_header=False, timeout_graceful_shutdown=_CLOSING,
    )  # fmt: skip
    server = Server(settings, connections)
    shown_host = f"[{host}]" if ":" in host else host
    ready(f"http://{shown_host}:{listener.getsockname()[1]}")
    serving = asyncio.create_task(server.serve([listener]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


def _masked(kind: str, reason: str) -> dict[str, object]:
    return {"reward": 0.0, "mask_sample": True, "failure_kind": f"whet:{kind}", "failure_reason": reason}


async def _answer(handler: Handler, host: str, connections: Connections, request: Request) -> Response:
    """Return the handler's answer to a request; errors become error responses."""
    headers: dict[str, str] = {}
    try:
        connections.authorized(request.client)
        _check_sender(request, host)
        answer = await handler(_object(await read_body(request)))
        return answer if isinstance(answer, Response) else JSONResponse(answer)
    except ApiError as refused:
        if refused.status == 413:
            headers["connection"] = "close"  # the rest of the body is not read
        return JSONResponse({"detail": str(refused)}, refused.status, headers)
    except ClientDisconnect:
        return Response(status_code=499)  # the client has disconnected


def _object(content: bytes) -> dict[str, object]:
    try:
        value = STRICT.decode(content.decode())
        if isinstance(value, dict):
            return checked_arguments(value)
    except ValueError as problem:
        raise ApiError(422, f"the request is invalid JSON: {why(problem)}") from None
    raise ApiError(422, "the request must be a JSON object")


def _check_sender(request: Request, host: str) -> None:
    """Raise ``ApiError`` if a web page may have sent the request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers:
        raise ApiError(403, "requests of web pages are refused")
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json")
    target = request.url.hostname or ""
    if reach(host)[0] and target != host and not reach(target)[0]:
        raise ApiError(403, f"this server is {host}; requests for another host are refused")
