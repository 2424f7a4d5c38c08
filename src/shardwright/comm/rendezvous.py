"""How ranks of one start find each other in a store that has seen earlier starts.

The agents of torchrun keep one store while they start their workers again, so it still holds the addresses of ranks that are
gone, and no number that all agents agree on tells one start from the next (github.com/pytorch/pytorch, issue 135712).
"""

from __future__ import annotations

import secrets
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.errors import RankError

POLL_S = 0.02


def fresh_store(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of ``store`` that only the ranks of this start use; every rank calls it once.

    Rank 0 calls with a new word, the others answer with one of their own, and rank 0 lists the answers. Who finds its own
    word in the list was called by the rank 0 of its own start. Raises `RankError` after ``timeout_s`` seconds.
    """
    deadline, word = time.monotonic() + timeout_s, secrets.token_hex(8)
    call = word if rank == 0 else ""
    if rank == 0:
        store.set("call", word)
    while True:
        if rank:
            if store.check(["call"]) and (latest := store.get("call").decode()) != call:
                call = latest
                store.set(f"{call}/{rank}", word)
        elif store.check(answers := [f"{call}/{other}" for other in range(1, world_size)]):
            store.set(f"{call}/all", " ".join([word, *(store.get(answer).decode() for answer in answers)]))
        if call and store.check([f"{call}/all"]) and word in store.get(f"{call}/all").decode().split():
            return PrefixStore(call, store)
        if time.monotonic() > deadline:
            raise RankError(f"rank {rank} of {world_size} did not meet the others within {timeout_s:g} s", rank)
        time.sleep(POLL_S)
