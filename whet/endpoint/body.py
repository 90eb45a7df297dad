"""Reads the body of an HTTP request, of bounded length and within bounded time."""

import asyncio

from starlette.requests import Request

from whet.endpoint.request import ApiError

LARGEST = 16 * 2**20  # bytes
_UPLOAD = 60.0  # seconds


async def read_body(request: Request) -> bytes:
    """Return the body. Raises ``ApiError`` if it is too long or takes too long."""
    too_large = ApiError(413, f"the request has more than {LARGEST:,} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > LARGEST:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request took more than {_UPLOAD:g} s to arrive") from None
    return bytes(body)
