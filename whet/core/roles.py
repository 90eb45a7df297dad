"""The roles of messages. A chat template may have others, which only it knows, so that a role is refused only if one
that every template knows is meant."""

from collections.abc import Mapping
from difflib import SequenceMatcher

from pydantic_core import PydanticSerializationError, to_jsonable_python

ROLES = ("system", "user", "assistant", "tool")
"""The roles that whet knows. Others (``developer``, ``ipython``, ``observation``) are left to the chat template."""

_CALLED = {"human": "user", "prompter": "user"} | dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai"), "assistant")
_SIMILAR = 0.8  # "usr" to "user" is 0.86, "buyer" 0.67


def problem_of(message: Mapping[str, object]) -> str:
    """Return what is wrong with the role of a message, or with a value that no file could hold, as in ``"must have the
    role 'user' in place of 'usr'"``; empty if nothing is."""
    role = message.get("role")
    if isinstance(role, str) and role not in ROLES and (meant := _meant(role)):
        return f"must have the role {meant!r} in place of {role!r}"
    for key, value in message.items():
        if key in ("role", "content"):
            continue
        try:
            to_jsonable_python(value)
        except (PydanticSerializationError, ValueError):  # the second for a value that contains itself
            return f"must have values that JSON can hold, and {key!r} is {value!r:.80}"
    return ""


def _meant(role: str) -> str | None:
    plain = role.strip().lower()
    if plain in _CALLED:
        return _CALLED[plain]
    swapped = (name for name in ROLES if sorted(name) == sorted(plain))
    similar = (name for name in ROLES if SequenceMatcher(None, name, plain).ratio() >= _SIMILAR)
    return next(swapped, None) or next(similar, None)
