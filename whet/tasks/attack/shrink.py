"""Shrinking of a text: parts are deleted while a condition holds."""

from collections.abc import Awaitable, Callable


async def shrunk(text: str, holds: Callable[[str], Awaitable[bool]]) -> str:
    """Return a text from which no line, and then no character, can be deleted without breaking the condition. It begins
    with large parts, as delta debugging does (Zeller and Hildebrandt, 2002). ``text`` fulfils the condition."""
    if text and await holds(""):
        return ""
    lines = await _without_parts(text.splitlines(keepends=True), holds)
    return "".join(await _without_parts(list("".join(lines)), holds))


async def _without_parts(parts: list[str], holds: Callable[[str], Awaitable[bool]]) -> list[str]:
    size = max(1, len(parts) // 2)
    while True:
        start, before = 0, len(parts)
        while start < len(parts):
            rest = parts[:start] + parts[start + size :]
            if len(rest) < len(parts) and rest and await holds("".join(rest)):
                parts = rest
            else:
                start += size
        if size == 1 and len(parts) == before:
            return parts
        size = max(1, size // 2)
