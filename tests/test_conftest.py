"""The hooks of ``tests/conftest.py``."""

import pytest


class Finalized:
    """An object whose finalizer needs some room on the stack."""

    def __del__(self) -> None:
        self.descend(3)

    def descend(self, frames: int) -> None:
        if frames:
            self.descend(frames - 1)


def dive() -> None:
    Finalized()
    dive()


def test_a_finalizer_that_finds_no_room_on_the_stack_fails_no_test() -> None:
    with pytest.raises(RecursionError):
        dive()
