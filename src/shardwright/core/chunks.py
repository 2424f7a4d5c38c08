"""How rows are cut into chunks whose messages run beside the next chunk's work: for the run and for its closed form."""

from __future__ import annotations

from itertools import pairwise


def chunk_slices(rows: int, chunks: int) -> tuple[slice, ...]:
    """At most ``chunks`` slices of ``rows``, none empty, the longer ones first; one slice when there are no rows.

    >>> chunk_slices(5, 2)
    (slice(0, 3, None), slice(3, 5, None))
    """
    count = max(1, min(rows, chunks))
    each, longer = divmod(rows, count)
    ends = [index * each + min(index, longer) for index in range(count + 1)]
    return tuple(slice(start, end) for start, end in pairwise(ends))
