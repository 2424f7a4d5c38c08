"""Passes over a schedule: add sends and receives, split backward into B and W, check that it can run."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from types import MappingProxyType

from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule

_PEER = MappingProxyType({Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1})
"""From the stage that sends or receives to the stage at the other end."""
_RECEIVED_BY = MappingProxyType({Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B})


def split_backward(schedule: Schedule) -> Schedule:
    """Replace each BW by B at once and W at the end of the row: the most deferred weight gradients there can be."""
    rows = []
    for row in schedule.rows:
        early = [Action(Kind.B, a.stage, a.microbatch) if a.kind is Kind.BW else a for a in row]
        late = [Action(Kind.W, a.stage, a.microbatch) for a in row if a.kind is Kind.BW]
        rows.append((*early, *late))
    return Schedule(
        f"{schedule.name}+w", schedule.num_stages, schedule.num_microbatches, schedule.placement, tuple(rows)
    )


def add_communication(schedule: Schedule) -> Schedule:
    """Put a receive before each action that needs a neighbour's result, and a send after each that makes one."""
    last = schedule.num_stages - 1
    place = schedule.placement
    rows = []
    for row in schedule.rows:
        new: list[Action] = []
        for action in row:
            stage, m = action.stage, action.microbatch
            forward, backward = action.kind is Kind.F, action.kind in (Kind.B, Kind.BW)
            if forward and stage > 0 and place[stage - 1] != place[stage]:
                new.append(Action(Kind.RECV_F, stage, m))
            if backward and stage < last and place[stage + 1] != place[stage]:
                new.append(Action(Kind.RECV_B, stage, m))
            new.append(action)
            if forward and stage < last and place[stage + 1] != place[stage]:
                new.append(Action(Kind.SEND_F, stage, m))
            if backward and stage > 0 and place[stage - 1] != place[stage]:
                new.append(Action(Kind.SEND_B, stage, m))
        rows.append(tuple(new))
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, place, tuple(rows))


def check(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule, one line each; empty when every action can run.

    Every action must be on its stage's rank, every F and B be there once, messages between two ranks be received in
    the order in which they are sent. Then the rows are run with sends that never block: an action runs when what it
    needs is done. When nothing can go on, the action that each rank is stuck at is named.
    """
    if problems := _misplaced(schedule):
        return problems
    problems = _counts(schedule) + _messages(schedule)
    communicates = any(action.kind not in COMPUTE for row in schedule.rows for action in row)
    done: set[Action] = set()
    position = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while position[rank] < len(row) and _ready(row[position[rank]], done, schedule, communicates):
                done.add(row[position[rank]])
                position[rank] += 1
                moved = True
    for rank, row in enumerate(schedule.rows):
        if position[rank] < len(row):
            problems.append(f"rank {rank} is stuck at {row[position[rank]]}: what it needs never comes")
    return problems


def _misplaced(schedule: Schedule) -> list[str]:
    problems = []
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stages = (action.stage, action.stage + _PEER.get(action.kind, 0))
            known = all(0 <= stage < schedule.num_stages for stage in stages)
            if not (known and 0 <= action.microbatch < schedule.num_microbatches):
                problems.append(f"rank {rank}: {action} is outside of the schedule's stages and micro-batches")
            elif schedule.placement[action.stage] != rank:
                place = schedule.placement[action.stage]
                problems.append(f"rank {rank}: {action} belongs on rank {place}, which holds stage {action.stage}")
    return problems


def _messages(schedule: Schedule) -> list[str]:
    """Ranks match messages by their order, so what is received from a rank must be what it sends, in its order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in COMPUTE:
                continue
            other = action.stage + _PEER[action.kind]
            peer = schedule.placement[other]
            if action.kind in _RECEIVED_BY:
                sent[rank, peer].append(Action(_RECEIVED_BY[action.kind], other, action.microbatch))
            else:
                received[peer, rank].append(action)
    problems = []
    for source, target in sorted(sent.keys() | received.keys()):
        pairs = zip_longest(sent[source, target], received[source, target])
        wrong = next(((due, taken) for due, taken in pairs if due != taken), None)
        if wrong is not None:
            due, taken = (str(action) if action else "nothing" for action in wrong)
            problems.append(f"rank {source} sends to rank {target} for {due} where rank {target} has {taken}")
    return problems


def _counts(schedule: Schedule) -> list[str]:
    problems = []
    for stage in range(schedule.num_stages):
        row = schedule.rows[schedule.placement[stage]]
        for m in range(schedule.num_microbatches):
            kinds = [a.kind for a in row if a.stage == stage and a.microbatch == m and a.kind in COMPUTE]
            if sorted(kinds) not in ([Kind.BW, Kind.F], [Kind.B, Kind.F, Kind.W]):
                names = " ".join(kind.value for kind in kinds) or "nothing"
                problems.append(f"stage {stage}, micro-batch {m}: needs F and B W (or BW) once, has {names}")
    return problems


def _ready(action: Action, done: set[Action], schedule: Schedule, communicates: bool) -> bool:
    stage, m, last = action.stage, action.microbatch, schedule.num_stages - 1
    place = schedule.placement

    def any_done(kinds: tuple[Kind, ...], at: int) -> bool:
        return any(Action(kind, at, m) in done for kind in kinds)

    def from_neighbour(made: tuple[Kind, ...], receive: Kind, at: int) -> bool:
        if communicates and place[at] != place[stage]:
            return any_done((receive,), stage)
        return any_done(made, at)

    backward = (Kind.B, Kind.BW)
    needs = {
        Kind.F: stage == 0 or from_neighbour((Kind.F,), Kind.RECV_F, stage - 1),
        Kind.SEND_F: any_done((Kind.F,), stage),
        Kind.RECV_F: stage > 0 and any_done((Kind.SEND_F,), stage - 1),
        Kind.RECV_B: stage < last and any_done((Kind.SEND_B,), stage + 1),
        Kind.SEND_B: any_done(backward, stage),
        Kind.W: any_done((Kind.B,), stage),
    }
    if action.kind in backward:
        return any_done((Kind.F,), stage) and (stage == last or from_neighbour(backward, Kind.RECV_B, stage + 1))
    return needs[action.kind]
