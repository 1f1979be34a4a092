"""Server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from diagd.web.serve.errors import ApiError

ACCEPTED = b": accepted\n\n"  # a comment among events


def event(kind: str, document: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **document})}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """Format an error as OpenAI's clients expect it."""
    return f"event: error\ndata: {json.dumps(error.document)}\n\n".encode()


async def streamed(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Respond with events; an error before the first one becomes the status."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        try:
            async for one in events:
                yield one
        except ApiError as error:
            yield error_event(error)

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # of nginx
    return StreamingResponse(all_of_them(), media_type="text/event-stream", headers=headers)
