"""Bodies of requests, read with limits on their size, the time they take, and the memory all of them may hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

__all__ = ["Uploads"]

SECONDS = 15.0
MOST_HELD = 64 * 2**20


class Uploads:
    """Reads bodies into memory, never to disk; ``held`` counts the bytes of all uploads at work."""

    def __init__(self, seconds: float = SECONDS, most_held: int = MOST_HELD) -> None:
        self.seconds, self.most_held = seconds, most_held
        self.held = 0

    @asynccontextmanager
    async def body(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Read a body of at most ``limit`` bytes within the time allowed; its bytes count as held until the end."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 12 or int(declared) > limit):
            raise _too_large(limit)
        held, content = 0, bytearray()
        try:
            with anyio.fail_after(self.seconds):
                async for piece in request.stream():
                    if len(content) + len(piece) > limit:
                        raise _too_large(limit)
                    if self.held + len(piece) > self.most_held:
                        raise HTTPException(
                            503, "Too much is being sent at once: please try again in a moment.", _CLOSE
                        )
                    self.held += len(piece)
                    held += len(piece)
                    content += piece
            yield bytes(content)
        except TimeoutError:
            sentence = f"The file took longer than {self.seconds:.0f} seconds to arrive."
            raise HTTPException(408, sentence, _CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(400, "The file did not arrive whole.", _CLOSE) from None
        finally:
            self.held -= held


#: After a refusal the rest of the body may still be coming; closing is how to stop listening.
_CLOSE = {"connection": "close"}


def _too_large(limit: int) -> HTTPException:
    size = f"{limit / 2**20:.0f} MB" if limit >= 2**20 else f"{limit:,} bytes"
    return HTTPException(413, f"That is too large: the limit is {size}.", _CLOSE)
