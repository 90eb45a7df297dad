"""A task set as a resources server of NeMo Gym: ``/seed_session`` and ``/verify`` over rows that name its tasks. Who
trains with Gym can so be rewarded by whet's graders."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.environments.base import TaskSet
from whet.environments.hosted import HostedEnvironments
from whet.files import write_atomically
from whet.gym.items import final_text
from whet.processes.loop_thread import described
from whet.types import Task

TASK = "whet_task"  # the field of a row that names its task


def rows(tasks: TaskSet, split: str, agent: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a split as rows of Gym for ``agent``."""
    for task in tasks.tasks(split):
        prompt = [{"role": message["role"], "content": message["content"]} for message in task.prompt]
        reference = {"type": "responses_api_agents", "name": agent}
        yield {"responses_create_params": {"input": prompt}, "agent_ref": reference, TASK: task.uid}


def write_rows(tasks: TaskSet, split: str, agent: str, path: Path) -> int:
    """Write them to a JSONL file. Return how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(tasks, split, agent)]
    write_atomically(path, "".join(lines).encode())
    return len(lines)


def application(tasks: TaskSet) -> Starlette:
    """Return the server's application. A task whose episodes have several turns can't be verified from an answer."""
    known: dict[str, Task] = {task.uid: task for split in ("train", "test") for task in tasks.tasks(split)}
    environments = HostedEnvironments(tasks.open())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await environments.close()

    async def seed_session(request: Request) -> Response:
        body = await _body(request)
        given = body.get("resources_session_id")
        return JSONResponse({} if given is None else {"resources_session_id": given})

    async def verify(request: Request) -> Response:
        body = await _body(request)
        task = known.get(body.get(TASK, ""))
        if task is None:
            return JSONResponse({"detail": f"the row's {TASK!r} names none of the tasks"}, 422)
        try:
            answer = final_text(body["response"])
        except (LookupError, TypeError, AttributeError) as problem:
            return JSONResponse({"detail": f"'response' is not an answer of a model: {described(problem)}"}, 422)
        environment = environments.make(task)
        try:
            await environment.start()
            step = await environment.step({"role": "assistant", "content": answer})
        except Exception as problem:  # a failure of ours is no measurement of theirs
            failed = {"mask_sample": True, "failure_kind": "whet:grader", "failure_reason": described(problem)}
            return JSONResponse(body | {"reward": 0.0} | failed)
        finally:
            await environment.close()
        return JSONResponse(body | {"reward": step.reward, "mask_sample": False, "reward_components": step.scores})

    async def status(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def close_session(request: Request) -> Response:
        return JSONResponse({"resources_session_id": (await _body(request)).get("resources_session_id")})

    async def reverify_mode(_: Request) -> Response:
        return JSONResponse("stateless")

    posts = {"/seed_session": seed_session, "/verify": verify, "/close_session": close_session}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    return Starlette(routes=[Route("/", status), Route("/reverify_mode", reverify_mode), *routes], lifespan=lifespan)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
