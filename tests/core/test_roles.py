"""A mistyped role is named; roles of chat templates are left to them."""

import pytest

from whet.core.roles import problem_of


@pytest.mark.parametrize(
    ("written", "meant"),
    [("usr", "user"), ("uesr", "user"), ("User", "user"), ("users", "user"), ("human", "user"),
     ("asistant", "assistant"), ("assitant", "assistant"), ("Assistant", "assistant"), ("gpt", "assistant"),
     ("model", "assistant"), ("systm", "system"), ("system ", "system"), ("tools", "tool")],
)  # fmt: skip
def test_a_mistyped_role_is_answered_with_the_one_that_is_meant(written: str, meant: str) -> None:
    assert problem_of({"role": written, "content": ""}) == f"must have the role {meant!r} in place of {written!r}"


@pytest.mark.parametrize(
    "role", ["system", "user", "assistant", "tool", "developer", "ipython", "function", "observation", "environment",
             "context", "critic", "principle", "narrator", "buyer", "seller"],
)  # fmt: skip
def test_other_roles_are_left_to_the_chat_template(role: str) -> None:
    assert problem_of({"role": role, "content": "", "name": "a", "at": (1, {2})}) == ""
