"""Ranks that meet in a store in which earlier starts have left their addresses."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore, Store

from shardwright.comm.rendezvous import fresh_store
from shardwright.errors import RankError


def start(store: Store, delays: dict[int, float]) -> list[Store]:
    """Each rank after its delay in a thread of its own; what they got, by rank."""
    found: dict[int, Store] = {}

    def come(rank: int, delay: float) -> None:
        time.sleep(delay)
        found[rank] = fresh_store(store, rank, len(delays), 30.0)

    threads = [threading.Thread(target=come, args=item) for item in delays.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in sorted(delays)]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_start_has_a_part_of_the_store_for_itself(late: int) -> None:
    """Whoever comes late: the others must neither go on with an earlier start's part nor wait in it for ever."""
    store = HashStore()
    for turn in range(3):
        ranks = start(store, {rank: 0.1 * (rank == late and turn > 0) for rank in range(3 - turn // 2)})
        assert not any(rank.check(["address"]) for rank in ranks)
        ranks[0].set("address", str(turn))
        assert [rank.get("address") for rank in ranks] == [str(turn).encode()] * len(ranks)


def test_a_start_that_broke_off_half_way_is_not_taken_up_again() -> None:
    store = HashStore()
    with pytest.raises(RankError, match=r"^rank 0 of 2 did not meet the others within 0\.05 s"):
        fresh_store(store, 0, 2, 0.05)
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not meet the others within 0\.05 s") as caught:
        fresh_store(store, 1, 2, 0.05)
    assert caught.value.rank == 1
    first, second = start(store, {0: 0.1, 1: 0.0})
    first.set("address", "here")
    assert second.get("address") == b"here"
