"""Why a rank ended without a result, and whether that was another rank's doing."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright import errors
from shardwright.errors import RankError, ShardwrightError


@dataclass(frozen=True)
class Failure:
    """Why a rank ended without a result; made in the rank, or by the parent for a rank that could not speak."""

    rank: int
    cause: str  # reads on after "rank 2 "
    details: str = ""  # traceback, or native stack
    consequence: bool = False  # of another rank's end: a lost connection or a timeout
    timeout: bool = False
    user_error: tuple[str, str] | None = None  # class of shardwright.errors and message, if it is one of ours


_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|connectFullMesh failed"
    r"|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out (waiting|after)|(wait|socket) timeout|timeout caused pair closure|Watchdog caught collective",
    re.IGNORECASE,
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from or while handling."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def describe(rank: int, error: BaseException) -> Failure:
    """What the parent is told about an exception that left the target."""
    links = list(_chain(error))
    texts = [str(link) for link in links if isinstance(link, RuntimeError | OSError | RankError)]
    timeout = any(_TIMED_OUT.search(text) for text in texts)
    lost = any(isinstance(link, ConnectionError | RankError) for link in links)
    user_error = None
    if isinstance(error, ShardwrightError) and not isinstance(error, RankError):
        known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
        user_error = (known.__name__, str(error))
    return Failure(
        rank,
        cause=f"failed: {''.join(traceback.format_exception_only(error)).strip()}",
        details="".join(traceback.format_exception(error)).rstrip(),
        consequence=timeout or lost or any(_PEER_LOST.search(text) for text in texts),
        timeout=timeout,
        user_error=user_error,
    )
