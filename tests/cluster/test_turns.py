"""The messages of a call's shards are made and sent one after the other."""

import threading
from collections.abc import Callable
from weakref import WeakSet

import pytest

from whet.cluster import call
from whet.cluster.call import Call

HANG = 30.0  # seconds


class Message:
    """A packed shard."""


def shards(count: int, ranks: int) -> list[Call]:
    turn = threading.Semaphore()
    return [Call("update", (shard,), ranks, True, turn) for shard in range(count)]


def start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_no_two_shards_are_packed_at_once_and_a_sent_message_is_dropped() -> None:
    alive, most = WeakSet[Message](), list[int]()

    def pack(*request: object) -> Message:
        message = Message()
        alive.add(message)
        most.append(len(alive))
        return message

    def send(call: Call) -> None:
        with call.packed(pack) as message:
            assert message in alive
            del message

    calls = shards(5, ranks=3)
    threads = [start(lambda call=call: send(call)) for _ in range(3) for call in calls]  # type: ignore[misc]
    for thread in threads:
        thread.join(HANG)
    assert most == [1] * 5, "one message for the ranks of a shard, and the next one after the last of them"
    assert not alive


def test_all_ranks_of_a_shard_get_the_same_message() -> None:
    (call,) = shards(1, ranks=2)
    with call.packed(lambda *request: request) as first, call.packed(lambda *request: pytest.fail("again")) as second:
        assert first is second == ("update", (0,), True)


def test_a_rank_that_does_not_take_its_message_does_not_keep_others_from_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "_TURN", 0.05)
    frozen, other = shards(2, ranks=1)
    with frozen.packed(lambda *request: "first"), other.packed(lambda *request: "second") as message:
        assert message == "second"


def test_what_can_not_be_packed_does_not_keep_the_turn() -> None:
    bad, good = shards(2, ranks=1)

    def unpackable(*request: object) -> None:
        raise TypeError("cannot pickle")

    with pytest.raises(TypeError), bad.packed(unpackable):
        pytest.fail("there is no message")
    with good.packed(lambda *request: "good") as message:
        assert message == "good"
