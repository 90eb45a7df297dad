"""The code of the user is distinguished from the code of Python, of installed packages and of whet."""

import json

import pytest
import typer

from whet.config import component
from whet.processes.user_code import is_user_file


@pytest.mark.parametrize("file", [json.__file__, typer.__file__, component.__file__])
def test_python_packages_and_whet_are_not_the_users(file: str) -> None:
    assert not is_user_file(file)


def test_packages_below_a_virtual_environment_are_not_the_users() -> None:
    assert not is_user_file("/usr/lib/python3/dist-packages/typer/main.py")
    assert not is_user_file("/somewhere/lib/python3.11/site-packages/typer/main.py")
    assert is_user_file("/home/me/my_site-packages/tasks.py")
