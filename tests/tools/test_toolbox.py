"""Calls are answered in their order, within their limits; errors of tools are shown to the model, and infrastructure
failures raised."""

import asyncio
import http.server
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.contracts.fault_contract import eventually
from whet.base.errors import ConfigError
from whet.core.types import Message, ToolCall
from whet.processes.loop_thread import UserCodeExit
from whet.tools.tool import tool, tools_of
from whet.tools.toolbox import Toolbox, ToolLimits

SHORT = ToolLimits(max_result_chars=100)
SOON = ToolLimits(deadline_s=0.2, max_result_chars=100)


def call(name: str, number: int = 0, /, **arguments: Any) -> ToolCall:
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answers(box: Toolbox, *calls: ToolCall) -> list[Message]:
    return asyncio.run(box.answer(calls))


def texts(box: Toolbox, *calls: ToolCall) -> list[str]:
    return [message["content"] for message in answers(box, *calls)]


def slow(seconds: float) -> float:
    """Wait."""
    time.sleep(seconds)
    return seconds


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def broken(kind: str) -> None:
    """Break."""
    raise {
        "value": ValueError("bad \ud800 value"),
        "connection": ConnectionResetError("gone"),
        "exit": SystemExit(3),
        "memory": MemoryError(),
        "long": RuntimeError("x" * 10_000),
        "unspeakable": Unspeakable(),
    }[kind]


def test_results_come_in_the_order_of_calls_with_their_ids_and_names() -> None:
    begun = [threading.Event() for _ in range(4)]

    def after(number: int) -> int:
        """Return once the next one has begun."""
        begun[number].set()
        assert begun[number + 1].wait(60)
        return number

    async def async_after(number: int) -> int:
        """Return once the next one has begun."""
        return await asyncio.to_thread(after, number)

    begun[3].set()
    box = Toolbox(tools_of([after, async_after]), ToolLimits(at_once=3, deadline_s=100))
    found = answers(box, call("after", 0, number=0), call("async_after", 1, number=1), call("after", 2, number=2))
    assert [(one["role"], one["name"], one["tool_call_id"], one["content"]) for one in found] == [
        ("tool", "after", "call0", "0"),
        ("tool", "async_after", "call1", "1"),
        ("tool", "after", "call2", "2"),
    ]
    assert box.counts["calls"] == 3


def test_no_more_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def counted() -> None:
        """Count."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    answers(Toolbox(tools_of(counted), ToolLimits(at_once=2)), *[call("counted")] * 6)
    assert most == 2


def test_calls_of_an_object_run_one_after_the_other_in_order() -> None:
    class Line:
        def __init__(self) -> None:
            self.said: list[str] = []

        def say(self, word: str, seconds: float) -> list[str]:
            """Say a word."""
            time.sleep(seconds)
            self.said.append(word)
            return self.said

    found = texts(
        Toolbox(tools_of(Line()), ToolLimits()), call("say", word="a", seconds=0.05), call("say", word="b", seconds=0)
    )
    assert found == ['["a"]', '["a", "b"]']


def test_the_errors_of_the_model_are_shown_to_it() -> None:
    box = Toolbox(tools_of(slow), ToolLimits(max_calls=2))
    unknown, wrong, refused = texts(box, call("slov", seconds=1), call("slow"), call("slow", seconds=0))
    assert unknown == "Error: there is no tool 'slov'. Did you mean 'slow'? Tools: slow"
    assert wrong.startswith("Error: wrong arguments for slow: seconds: Missing")
    assert refused == "Error: not run, because only 2 calls are allowed"
    assert box.counts == {"calls": 2, "errors": 2, "unknown": 1, "timeouts": 0, "refused": 1}
    assert texts(box, call("slow", seconds=0)) == [refused]  # of the episode, not of the reply


def test_an_exception_is_shown_with_limited_length() -> None:
    box = Toolbox(tools_of(broken), SHORT)
    kinds = ("value", "memory", "long", "unspeakable")
    value, memory, long, unspeakable = texts(box, *(call("broken", kind=kind) for kind in kinds))
    assert unspeakable == "Error: Unspeakable (its text can't be formatted)"
    assert value == "Error: ValueError: bad \ufffd value"
    assert memory == "Error: MemoryError: "
    assert long == "Error: RuntimeError: " + "x" * 86 + "\n[the rest is left out]"


@pytest.mark.parametrize("hung", ["hangs", "async_hangs"])
def test_a_hung_tool_is_an_error_and_delays_no_other_call(hung: str) -> None:
    end = threading.Event()

    def hangs() -> None:
        """Hang."""
        end.wait(200)

    async def async_hangs() -> None:
        """Hang."""
        await asyncio.sleep(200)

    box = Toolbox(tools_of([hangs, async_hangs, slow]), SHORT.model_copy(update={"deadline_s": 2.0}))
    late, fine = texts(box, call(hung), call("slow", seconds=0))
    end.set()
    assert late == f"Error: {hung} did not finish within 2 s"
    assert fine == "0.0"
    assert box.counts["timeouts"] == box.counts["errors"] == 1


def test_a_late_result_is_thrown_away_and_its_object_is_called_no_more() -> None:
    end = threading.Event()

    class Slow:
        done = 0

        def act(self) -> int:
            """Act."""
            end.wait(200)
            self.done += 1
            return self.done

    state = Slow()
    box = Toolbox(tools_of(state), SHORT.model_copy(update={"deadline_s": 5.0}))  # in which the call begins
    assert texts(box, call("act"), call("act")) == [
        "Error: act did not finish within 5 s",
        "Error: not run, because act has not finished",
    ]
    end.set()
    assert eventually(lambda: state.done == 1)
    assert texts(box, call("act")) == ["Error: not run, because act has not finished"]


@pytest.mark.parametrize(("kind", "error"), [("connection", ConnectionError), ("exit", UserCodeExit)])
def test_a_fault_of_the_infrastructure_is_raised(kind: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        answers(Toolbox(tools_of(broken), SHORT), call("broken", kind=kind))


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(2000):
                self.wfile.write(b"drop ")
                self.wfile.flush()
                time.sleep(0.05)
        elif self.path == "/huge":
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 1_000_000)
        else:
            self.send_error(int(self.path[1:]))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[assignment,method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fetcher(address: str) -> Sequence[Any]:
    def fetch(path: str) -> Iterator[str]:
        """Fetch a page."""
        with urllib.request.urlopen(f"{address}/{path}", timeout=60) as page:
            while part := page.read1(1 << 16):
                yield part.decode()

    return [tool(fetch)]


def test_a_server_that_drips_is_given_up_on(address: str) -> None:
    assert texts(
        Toolbox(fetcher(address), SOON.model_copy(update={"max_result_chars": 10_000})), call("fetch", path="drip")
    ) == ["Error: fetch did not finish within 0.2 s"]


def test_a_body_of_a_gigabyte_is_cut_off_without_being_read(address: str) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        (text,) = texts(Toolbox(fetcher(address), ToolLimits(max_result_chars=50)), call("fetch", path="huge"))
        assert text == "x" * 50 + "\n[the rest is left out]"
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_is_down_or_overloaded_is_never_the_models_fault(address: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError):
        answers(Toolbox(fetcher(address), ToolLimits()), call("fetch", path=str(status)))


def test_a_missing_page_is_shown_and_a_missing_server_raised(address: str) -> None:
    (text,) = texts(Toolbox(fetcher(address), ToolLimits()), call("fetch", path="404"))
    assert text == "Error: HTTPError: HTTP Error 404: Not Found"
    with pytest.raises(urllib.error.URLError):
        answers(Toolbox(fetcher("http://127.0.0.1:9"), ToolLimits()), call("fetch", path="x"))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called slow"):
        Toolbox(tools_of([slow, slow]), ToolLimits())
