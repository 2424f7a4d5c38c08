"""Generators: each schedule is a few lines over `Action`. One stage is the schedule of pp=1, not a special case.

p is the number of pipeline ranks, m that of micro-batches, v that of chunks (stages) on each rank. F, B and W are the
times of one chunk's forward, input gradient and weight gradient; docstrings give the idle time of a rank in them, and
`simulate.closed_form` the fractions. All of them run with any m: fewer micro-batches than ranks only leave more idle.
"""

from __future__ import annotations

from collections import Counter, deque

from shardwright.core.layout import V_SHAPED, Layout
from shardwright.errors import LayoutError
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.file import load_schedule
from shardwright.schedule.passes import fill_weights

INTERLEAVED = ("interleaved", "interleaved_zb")
"""v chunks on each rank, round and round: rank r holds stages r, p + r, 2p + r, ..."""


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): every stage holds m micro-batches at its peak."""
    rows = []
    for stage in range(num_stages):
        forward = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        rows.append((*forward, *(Action(Kind.BW, stage, m) for m in range(num_microbatches))))
    return Schedule("gpipe", num_stages, num_microbatches, tuple(range(num_stages)), tuple(rows))


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021, section 2.2.1): stage s of p holds at most min(p - s, m) micro-batches."""
    rows = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_microbatches)
        row = [Action(Kind.F, stage, m) for m in range(warm_up)]
        for m in range(num_microbatches - warm_up):
            row += [Action(Kind.F, stage, warm_up + m), Action(Kind.BW, stage, m)]
        row += [Action(Kind.BW, stage, m) for m in range(num_microbatches - warm_up, num_microbatches)]
        rows.append(tuple(row))
    return Schedule("1f1b", num_stages, num_microbatches, tuple(range(num_stages)), tuple(rows))


def interleaved(ranks: int, num_microbatches: int, virtual: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): idle (p-1)(F+B+W) where 1F1B idles v times that.

    Rank r holds at most (v-1)p + 2(p-r) - 1 chunks. Micro-batches go in groups of p; when m is no multiple of p the last
    group is short, which computes the same but idles longer.
    """
    rows = _interleaved_rows(ranks, num_microbatches, virtual, ahead=2)
    return Schedule("interleaved", ranks * virtual, num_microbatches, tuple(range(ranks)) * virtual, rows)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2024, section 2.1): 1F1B with W in its gaps. Idle (p-1)(F+B-W); every rank holds p at most."""
    return fill_weights(one_forward_one_backward(num_stages, num_microbatches), "zb_h1", most=num_stages)


def interleaved_zero_bubble(ranks: int, num_microbatches: int, virtual: int) -> Schedule:
    """Interleaved 1F1B with W in its gaps: idle (p-1)(F+B-W) with F, B, W of one chunk; a rank holds v p chunks at most.

    A rank is only one chunk ahead of the next (two in `interleaved`), as a B without its W passes on sooner.
    """
    rows = _interleaved_rows(ranks, num_microbatches, virtual, ahead=1)
    placement = tuple(range(ranks)) * virtual
    order = Schedule("interleaved", ranks * virtual, num_microbatches, placement, rows)
    return fill_weights(order, "interleaved_zb", most=virtual * ranks)


def zero_bubble_v(ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, section 6): a V of 2p stages, 2p chunks held at most, as much memory as 1F1B on rank 0.

    At F = B = W it idles for the fill alone, (p-1)F, once m >= 2p. Chunk 0 runs ahead until chunk 1 comes back, then
    the two alternate.
    """
    p, rows = ranks, []
    for r in range(p):
        full = max(num_microbatches, 2 * p)
        pieces = [(2 * (p - r) - 1, "F0"), (r, "F1 F0"), (p - r, "F1 BW1"), (full - 2 * p + r + 1, "F0 BW0 F1 BW1")]
        pieces += [(p - r - 1, "BW0 F1 BW1"), (r, "BW0 BW1"), (p - r, "BW0")]
        rows.append(_spelled(pieces, (r, 2 * p - 1 - r), num_microbatches))
    order = Schedule("v", 2 * p, num_microbatches, _v_placement(p), tuple(rows))
    return fill_weights(order, "zb_v", most=2 * p)


def dualpipe_v(ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek 2025, after Sea AI Lab's cut-in-half): each forward of one chunk goes with a backward of the other.

    Each F directly followed by a BW may run as one block (F&B), one's communication behind the other's computation. The
    published idle time counts it so: (p-1)(F&B + B - 2W), here with B the input gradient alone. A rank holds 2p + 1
    chunks at most. Below 2p micro-batches there is no steady state, and W fills the gaps.
    """
    p, m, rows = ranks, num_microbatches, []
    for r in range(p):
        steady = max(m, 2 * p) - 2 * p + r + 1
        pieces = [(2 * (p - r - 1), "F0"), (r + 1, "F0 F1"), (p - r - 1, "B1 W F1"), (steady, "F0 BW1 F1 BW0")]
        pieces += [(p - r - 1, "BW1 F1 BW0"), (1, _alternating_drain(r + 1)), (p - r - 1, "W B0"), (r + 1, "W")]
        rows.append(_spelled(pieces, (r, 2 * p - 1 - r), m))
    schedule = Schedule("dualpipe_v", 2 * p, m, _v_placement(p), tuple(rows))
    return schedule if m >= 2 * p else fill_weights(schedule, "dualpipe_v", most=2 * p + 1)


def make_schedule(layout: Layout) -> Schedule:
    """The schedule that ``layout`` names, for its pipeline ranks and micro-batches; its ``num_stages`` is what counts.

    V-shaped schedules have two stages on each rank whether ``virtual`` says so or is left out. With one pipeline rank
    every schedule is 1F1B over one stage. Raises :class:`LayoutError` where name, ``virtual`` and ranks disagree.
    """
    name, p, m, v = layout.schedule, layout.pp, layout.microbatches, layout.virtual
    if name.startswith("file:"):
        return _from_file(layout)
    _check_virtual(name, p, v)
    if p == 1:
        return one_forward_one_backward(1, m)
    if name in INTERLEAVED:
        return (interleaved if name == "interleaved" else interleaved_zero_bubble)(p, m, v)
    builders = {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "zb_h1": zero_bubble_h1,
        "zb_v": zero_bubble_v,
        "dualpipe_v": dualpipe_v,
    }
    return builders[name](p, m)


def good_counts(layout: Layout) -> tuple[int, ...]:
    """The micro-batch counts nearest to the layout's that leave no avoidable idle time; its own when that is one.

    Interleaved schedules want a multiple of p, V-shaped ones at least 2p.
    """
    p, m = layout.pp, layout.microbatches
    if layout.schedule in INTERLEAVED and m % p:
        return tuple(count for count in (m - m % p, m - m % p + p) if count)
    if layout.schedule in V_SHAPED and p > 1 and m < 2 * p:
        return (2 * p,)
    return (m,)


def _check_virtual(name: str, ranks: int, virtual: int) -> None:
    if name in INTERLEAVED:
        if virtual == 1 and ranks > 1:
            raise LayoutError(
                f"schedule={name} needs several stages per rank, virtual=1 was given; set virtual=2 or more"
            )
    elif name in V_SHAPED:
        if virtual > 2:
            raise LayoutError(
                f"schedule={name} has two stages per rank, virtual={virtual} was given; leave virtual out"
            )
    elif virtual > 1:
        raise LayoutError(f"virtual={virtual} needs a schedule with several stages per rank; leave virtual out")


def _from_file(layout: Layout) -> Schedule:
    """The file's schedule when it has as many ranks, micro-batches and (where given) stages per rank as the layout."""
    schedule = load_schedule(layout.schedule.removeprefix("file:"))
    found = {"pp": len(schedule.rows), "microbatches": schedule.num_microbatches}
    given = {"pp": layout.pp, "microbatches": layout.microbatches}
    if layout.virtual > 1:
        found["virtual"] = schedule.num_stages // len(schedule.rows)
        given["virtual"] = layout.virtual
    for key, value in given.items():
        if found[key] != value:
            raise LayoutError(
                f"schedule={layout.schedule} is for {key}={found[key]}, not {value}; set {key}={found[key]}"
            )
    return schedule


def _interleaved_rows(ranks: int, num_microbatches: int, virtual: int, ahead: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards by groups of p micro-batches, chunk by chunk in each; backwards likewise with the chunks reversed.

    Rank r does (v-1)p + ahead (p-1-r) forwards before it alternates. The rows are those of the next multiple of p with
    the micro-batches beyond ``num_microbatches`` left out: what is left cannot wait for what is gone.
    """
    groups = [range(first, first + ranks) for first in range(0, num_microbatches, ranks)]
    forwards = [(chunk, m) for group in groups for chunk in range(virtual) for m in group]
    backwards = [(chunk, m) for group in groups for chunk in reversed(range(virtual)) for m in group]
    rows = []
    for rank in range(ranks):
        forward = [Action(Kind.F, chunk * ranks + rank, m) for chunk, m in forwards]
        backward = [Action(Kind.BW, chunk * ranks + rank, m) for chunk, m in backwards]
        warm_up = min((virtual - 1) * ranks + ahead * (ranks - 1 - rank), len(forward))
        row = forward[:warm_up]
        for f, b in zip(forward[warm_up:], backward, strict=False):
            row += [f, b]
        row += backward[len(forward) - warm_up :]
        rows.append(tuple(action for action in row if action.microbatch < num_microbatches))
    return tuple(rows)


def _v_placement(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def _alternating_drain(pairs: int) -> str:
    """``BW1 BW0 BW1 ...`` over both chunks, ``2 * pairs`` in all, the second half B only: its W waits for the end."""
    kinds = ["BW"] * pairs + ["B"] * pairs
    return " ".join(f"{kind}{1 - index % 2}" for index, kind in enumerate(kinds))


def _spelled(pieces: list[tuple[int, str]], stages: tuple[int, int], num_microbatches: int) -> tuple[Action, ...]:
    """The row that ``pieces`` spell: (3, "F0 BW1") is three times F of the rank's chunk 0, then BW of its chunk 1.

    Each takes the next micro-batch of its chunk; ``W`` that of the oldest B without one. Micro-batches beyond
    ``num_microbatches`` are left out, so a pattern for 2p of them serves fewer.
    """
    count: Counter[tuple[bool, int]] = Counter()
    owed: deque[tuple[int, int]] = deque()
    row = []
    for times, text in pieces:
        for word in text.split() * times:
            kind = Kind(word.rstrip("01"))
            if kind is Kind.W:
                stage, m = owed.popleft()
            else:
                stage = stages[int(word[-1])]
                m = count[kind is Kind.F, stage]
                count[kind is Kind.F, stage] += 1
                if kind is Kind.B:
                    owed.append((stage, m))
            if m < num_microbatches:
                row.append(Action(kind, stage, m))
    return tuple(row)
