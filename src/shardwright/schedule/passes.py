"""Passes over a schedule: split backward into B and W, fill gaps with W, add sends and receives, check that it can run."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import zip_longest
from types import MappingProxyType

from shardwright.errors import ConfigError
from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule

_PEER = MappingProxyType({Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1})
"""From the stage that sends or receives to the stage at the other end."""
_RECEIVED_BY = MappingProxyType({Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B})
_NEVER = 1 << 62


def communicates(schedule: Schedule) -> bool:
    """Whether the rows hold sends or receives."""
    return any(action.kind not in COMPUTE for row in schedule.rows for action in row)


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


def fill_weights(schedule: Schedule, name: str, most: int) -> Schedule:
    """Split every backward and put W where it costs nothing: the order of F and B stays, W fills what would be idle.

    The rows are run at F = B = W without links. A rank does its next F or B as soon as that can start, a W when it
    cannot, and a W before an F that would be held as more than ``most`` chunks at once.
    """
    filler = _Filler(schedule, most)
    tick = 0
    while filler.step(tick):
        tick += 1
    if any(filler.rows):
        raise ConfigError(f"schedule {schedule.name} cannot run, so no W can be placed; see check()")
    rows = tuple(map(tuple, filler.filled))
    return Schedule(name, schedule.num_stages, schedule.num_microbatches, schedule.placement, rows)


class _Filler:
    """The state of `fill_weights`: what each rank has still to do, and the tick from which each F and B can start."""

    def __init__(self, schedule: Schedule, most: int) -> None:
        m, size = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
        self.most, self.num_microbatches, self.size = most, m, size
        self.forward = [0] * m + [_NEVER] * (size - m)
        self.backward = [_NEVER] * size
        self.rows = [deque(action for action in row if action.kind is not Kind.W) for row in schedule.rows]
        self.owed: list[deque[Action]] = [deque() for _ in self.rows]
        self.held = [0] * len(self.rows)
        self.filled: list[list[Action]] = [[] for _ in self.rows]

    def step(self, tick: int) -> bool:
        """What every rank does at ``tick``; False when none does anything."""
        moved = False
        for rank, row in enumerate(self.rows):
            if row and self._next_is_ready(rank, row[0], tick):
                self._run(rank, row.popleft(), tick + 1)
            elif self.owed[rank]:
                self.filled[rank].append(self.owed[rank].popleft())
                self.held[rank] -= 1
            else:
                continue
            moved = True
        return moved

    def _next_is_ready(self, rank: int, action: Action, tick: int) -> bool:
        index = action.stage * self.num_microbatches + action.microbatch
        if action.kind is not Kind.F:
            return self.backward[index] <= tick
        return self.forward[index] <= tick and (self.held[rank] < self.most or not self.owed[rank])

    def _run(self, rank: int, action: Action, end: int) -> None:
        m = self.num_microbatches
        index = action.stage * m + action.microbatch
        if action.kind is Kind.F:
            self.held[rank] += 1
            self.filled[rank].append(action)
            if index + m < self.size:
                self.forward[index + m] = end
            else:
                self.backward[index] = end
            return
        self.filled[rank].append(Action(Kind.B, action.stage, action.microbatch))
        self.owed[rank].append(Action(Kind.W, action.stage, action.microbatch))
        if action.stage > 0:
            self.backward[index - m] = end


def add_communication(schedule: Schedule) -> Schedule:
    """Put a send after each action that makes what another rank needs, and its receive before the action that needs it.

    Ranks match messages by their order, so a rank receives from another one in the order in which that one sends: a
    message that is sent before the one needed now is received before it too. A schedule that communicates already is
    returned as it is.
    """
    if communicates(schedule):
        return schedule
    sends = [_with_sends(schedule, row) for row in schedule.rows]
    coming: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, row in enumerate(sends):
        for action in row:
            if action.kind in _RECEIVED_BY:
                receive = _receive_of(action)
                coming[rank, schedule.placement[receive.stage]].append(receive)
    rows = []
    for rank, row in enumerate(sends):
        new: list[Action] = []
        received: set[Action] = set()
        for action in row:
            needed = _message_for(schedule, action)
            if needed is not None:
                queue = coming[schedule.placement[needed.stage + _PEER[needed.kind]], rank]
                while needed not in received:
                    if not queue:
                        raise ConfigError(f"rank {rank}: no rank sends what {action} needs; see check()")
                    new.append(queue.popleft())
                    received.add(new[-1])
                received.discard(needed)
            new.append(action)
        rows.append(tuple(new))
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.placement, tuple(rows))


def _with_sends(schedule: Schedule, row: tuple[Action, ...]) -> list[Action]:
    place, last = schedule.placement, schedule.num_stages - 1
    new: list[Action] = []
    for action in row:
        new.append(action)
        stage = action.stage
        if action.kind is Kind.F and stage < last and place[stage + 1] != place[stage]:
            new.append(Action(Kind.SEND_F, stage, action.microbatch))
        elif action.kind in (Kind.B, Kind.BW) and stage > 0 and place[stage - 1] != place[stage]:
            new.append(Action(Kind.SEND_B, stage, action.microbatch))
    return new


def _message_for(schedule: Schedule, action: Action) -> Action | None:
    """The receive that ``action`` needs, None where its input is made on its own rank."""
    place, stage = schedule.placement, action.stage
    if action.kind is Kind.F and stage > 0 and place[stage - 1] != place[stage]:
        return Action(Kind.RECV_F, stage, action.microbatch)
    last = schedule.num_stages - 1
    if action.kind in (Kind.B, Kind.BW) and stage < last and place[stage + 1] != place[stage]:
        return Action(Kind.RECV_B, stage, action.microbatch)
    return None


def _receive_of(send: Action) -> Action:
    return Action(_RECEIVED_BY[send.kind], send.stage + _PEER[send.kind], send.microbatch)


# -- the checker ---------------------------------------------------------------------------------------


def check(schedule: Schedule, posted: int | None = None) -> list[str]:
    """What is wrong with a schedule, one line each; empty when every action can run.

    Every action must be on its stage's rank, every F and B be there once, messages between two ranks be received in
    the order in which they are sent. Then the rows are run: an action runs when what it needs is done, first with sends
    that never block, then with sends that wait for their receive. For these, receives are taken to be posted early:
    each rank has the next ``posted`` receives from each other rank posted at any time (None: as many as there are
    ranks; 0: only the one that it is at, a rendezvous). When nothing can go on, the action that each rank is stuck at
    is named. All of our own schedules pass; `receives_to_post` says how few posted receives they need.
    """
    if problems := _misplaced(schedule):
        return problems
    problems = _counts(schedule) + _messages(schedule)
    problems += [f"{stuck}: what it needs never comes" for stuck in _Run(schedule, None).stuck()]
    if not problems and communicates(schedule):
        posted = len(schedule.rows) if posted is None else posted
        stuck = _Run(schedule, posted).stuck()
        problems = [f"{at} when sends block and {posted} receives are posted ahead" for at in stuck]
    return problems


def receives_to_post(schedule: Schedule) -> int:
    """The fewest receives that each rank must keep posted for each other rank so that sends may block.

    0 for GPipe, where a rendezvous is enough; 1 for 1F1B and ZB-H1, where two neighbours would else each wait in a send
    to the other; 2 for V-shaped schedules; up to p/2 + 1 for interleaved ones. ``schedule`` holds communication and
    runs when sends do not block (`check`).
    """
    most = max(map(len, schedule.rows))
    return next(posted for posted in range(most + 1) if not _Run(schedule, posted).stuck())


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
            peer = schedule.placement[action.stage + _PEER[action.kind]]
            if action.kind in _RECEIVED_BY:
                sent[rank, peer].append(_receive_of(action))
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
    found: dict[tuple[int, int], list[Kind]] = defaultdict(list)
    for row in schedule.rows:
        for action in row:
            if action.kind in COMPUTE:
                found[action.stage, action.microbatch].append(action.kind)
    problems = []
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            kinds = found[stage, m]
            if sorted(kinds) not in ([Kind.BW, Kind.F], [Kind.B, Kind.F, Kind.W]):
                names = " ".join(kind.value for kind in kinds) or "nothing"
                problems.append(f"stage {stage}, micro-batch {m}: needs F and B W (or BW) once, has {names}")
    return problems


class _Run:
    """Runs the rows as far as they go. ``posted`` None: sends never block; else as in `check`."""

    def __init__(self, schedule: Schedule, posted: int | None) -> None:
        self.schedule, self.posted = schedule, posted
        self.communicates = communicates(schedule)
        self.done: set[tuple[Kind, int, int]] = set()
        self.position = [0] * len(schedule.rows)
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.received: dict[tuple[int, int], int] = defaultdict(int)

    def stuck(self) -> list[str]:
        """Each rank that cannot reach the end of its row, with the action it is at."""
        rows, position = self.schedule.rows, self.position
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row) and self._ready(rank, row[position[rank]]):
                    self._finish(rank, row[position[rank]])
                    moved = True
        return [
            f"rank {rank} is stuck at {row[position[rank]]}"
            for rank, row in enumerate(rows)
            if position[rank] < len(row)
        ]

    def _finish(self, rank: int, action: Action) -> None:
        kind = Kind.B if action.kind is Kind.BW else action.kind
        self.done.add((kind, action.stage, action.microbatch))
        self.position[rank] += 1
        if kind in _PEER:
            peer = self.schedule.placement[action.stage + _PEER[kind]]
            if kind in _RECEIVED_BY:
                self.sent[rank, peer] += 1
            else:
                self.received[peer, rank] += 1

    def _ready(self, rank: int, action: Action) -> bool:
        kind, stage, m, done = action.kind, action.stage, action.microbatch, self.done
        last = self.schedule.num_stages - 1
        if kind is Kind.F:
            return stage == 0 or self._arrived(Kind.F, Kind.RECV_F, stage - 1, stage, m)
        if kind in (Kind.B, Kind.BW):
            arrived = stage == last or self._arrived(Kind.B, Kind.RECV_B, stage + 1, stage, m)
            return arrived and (Kind.F, stage, m) in done
        if kind is Kind.W:
            return (Kind.B, stage, m) in done
        if kind is Kind.RECV_F:
            return (Kind.SEND_F, stage - 1, m) in done
        if kind is Kind.RECV_B:
            return (Kind.SEND_B, stage + 1, m) in done
        made = Kind.F if kind is Kind.SEND_F else Kind.B
        return (made, stage, m) in done and self._may_send(rank, action)

    def _arrived(self, made: Kind, receive: Kind, source: int, stage: int, m: int) -> bool:
        place = self.schedule.placement
        if self.communicates and place[source] != place[stage]:
            return (receive, stage, m) in self.done
        return (made, source, m) in self.done

    def _may_send(self, rank: int, send: Action) -> bool:
        """Whether a send would end: its receive is posted, or the other rank is at it."""
        if self.posted is None:
            return True
        receive = _receive_of(send)
        peer = self.schedule.placement[receive.stage]
        if self.sent[rank, peer] < self.received[rank, peer] + self.posted:
            return True
        row, at = self.schedule.rows[peer], self.position[peer]
        return at < len(row) and row[at] == receive
