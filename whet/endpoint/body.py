"""The body of an HTTP request, bounded in length and in the time that it may take to arrive."""

import asyncio

from starlette.requests import Request

from whet.endpoint.request import ApiError

LARGEST = 16 * 2**20  # bytes
_UPLOAD = 60.0  # seconds that sending one may take


async def read_body(request: Request) -> bytes:
    """Read the body, no further than it may be long. Raises ``ApiError``."""
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
