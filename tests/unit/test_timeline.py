"""The measured timeline: fed with what the schedule's clock says, it must find the clock's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.core.layout import SCHEDULES, Layout
from shardwright.core.ledger import Wait
from shardwright.schedule.action import Kind
from shardwright.schedule.make import INTERLEAVED, make_schedule
from shardwright.schedule.memory import in_flight_by_stage
from shardwright.schedule.simulate import Costs, Span, Timeline, simulate
from shardwright.train.timeline import RankClock, pipeline_report, write_trace


def clocks_of(timeline: Timeline, steps: int = 2) -> list[RankClock]:
    clocks = [RankClock(rank, rank, offset=1000.0) for rank in range(len(timeline.rows))]
    held = in_flight_by_stage(timeline.schedule)
    for clock in clocks:
        own = {stage: held[stage] for stage in timeline.schedule.stages_of(clock.rank)}
        for _ in range(steps):
            clock.add(list(timeline.spans(clock.rank)), own, trace=True)
    return clocks


def timeline_of(name: str) -> Timeline:
    layout = Layout(schedule=name, pp=4, microbatches=8, virtual=2 if name in INTERLEAVED else 1)
    schedule = make_schedule(layout)
    slow = schedule.num_stages - 1
    forward = [2.0 if stage == slow else 1.0 for stage in range(schedule.num_stages)]
    return simulate(schedule, Costs(forward, 1.25, 0.75))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clocks_own_times_give_its_own_bubble(name: str) -> None:
    timeline = timeline_of(name)
    report = pipeline_report(timeline.schedule, clocks_of(timeline))
    assert report is not None
    assert report.bubble_fraction == pytest.approx(timeline.bubble_fraction, rel=1e-9)
    assert report.simulated_bubble_fraction == pytest.approx(timeline.bubble_fraction, rel=1e-9)
    assert report.idle_seconds == pytest.approx(timeline.idle, rel=1e-9)
    assert report.slowest_stage == timeline.schedule.num_stages - 1
    assert report.in_flight == in_flight_by_stage(timeline.schedule)
    for stage, seconds in enumerate(report.stage_seconds):
        assert seconds["F"] == pytest.approx(2.0 if stage == report.slowest_stage else 1.0)
        assert seconds["B"] + seconds["W"] == pytest.approx(2.0)
    json.dumps(report.to_json())


def test_waiting_inside_an_action_is_not_computing(tmp_path: Path) -> None:
    """A stage whose forward stands still for a gather is not the slowest one; what it waits for is idle time."""
    timeline, path = timeline_of("1f1b"), tmp_path / "trace.json"
    clocks = clocks_of(timeline, steps=0)
    for clock in clocks:
        spans, messages = [], []
        for span in timeline.spans(clock.rank):
            waited = 0.5 if span.action.kind is Kind.F else 0.0
            spans.append(Span(span.action, span.start, span.end, waited))
            if waited:
                messages.append(Wait("all_gather", "dp", "bucket", span.start - 0.25, span.start + 0.25, span.start + 0.75))
        for _ in range(2):
            clock.add(spans, {}, messages, trace=True)
    report = pipeline_report(timeline.schedule, clocks)
    assert report is not None
    assert report.stage_seconds[0]["F"] == pytest.approx(0.5) and report.stage_seconds[3]["F"] == pytest.approx(1.5)
    more = 8 * 0.5
    assert report.idle_seconds == pytest.approx([idle + more for idle in timeline.idle])
    assert report.bubble_fraction == pytest.approx(timeline.bubble_fraction + more / timeline.makespan)
    write_trace(path, clocks)
    events = json.loads(path.read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    idle = sum(event["dur"] for event in shown if event["cat"] == "idle")
    assert idle == pytest.approx(2 * sum(report.idle_seconds) * 1e6)
    computed = sum(event["dur"] for event in shown if event["cat"] == "compute")
    assert computed + idle == pytest.approx(2 * 4 * timeline.makespan * 1e6)
    waits = [event for event in shown if event["cat"] == "communication"]
    assert {(event["name"], round(event["dur"])) for event in waits} == {("wait for all_gather bucket", 500_000)}
    assert len(waits) == 2 * 4 * 8
    under_way = [event for event in events if event["ph"] in "be"]
    assert len(under_way) == 2 * len(waits)
    first = [event["ts"] for event in under_way if event["id"] == under_way[0]["id"]]
    assert max(first) - min(first) == pytest.approx(1e6)  # from launch to end


def test_the_last_steps_of_a_short_run_are_traced(tmp_path: Path) -> None:
    """Also of a run of one step, or of two; of long ones the third to the fifth."""
    timeline = timeline_of("1f1b")
    for steps, drawn in ((1, [0]), (2, [0, 1]), (4, [1, 2, 3]), (9, [2, 3, 4])):
        clock = RankClock(0, 0)
        for step in range(steps):
            spans = [Span(span.action, span.start + step, span.end + step) for span in timeline.spans(0)]
            clock.add(spans, {}, trace=True)
        assert [spans[0].start for spans, _ in clock.traced] == drawn
        path = tmp_path / f"{steps}.json"
        write_trace(path, [clock])
        assert any(event.get("cat") == "compute" for event in json.loads(path.read_text())["traceEvents"])


def test_the_first_step_does_not_count_and_no_step_gives_no_report() -> None:
    timeline = timeline_of("1f1b")
    assert pipeline_report(timeline.schedule, clocks_of(timeline, steps=0)) is None
    slow = simulate(timeline.schedule, Costs(100.0, 1.0, 1.0))
    clocks = clocks_of(slow, steps=1)
    for clock in clocks:
        clock.add(list(timeline.spans(clock.rank)), {})
    report = pipeline_report(timeline.schedule, clocks)
    assert report is not None and report.bubble_fraction == pytest.approx(timeline.bubble_fraction)


def test_lanes_are_added_to_a_profile_that_is_there(tmp_path: Path) -> None:
    timeline, path = timeline_of("zb_h1"), tmp_path / "trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 999_000_000_000, "traceEvents": [{"ph": "X", "pid": 7, "ts": 1}]}))
    write_trace(path, clocks_of(timeline, steps=6))
    events = json.loads(path.read_text())["traceEvents"]
    assert events[0] == {"ph": "X", "pid": 7, "ts": 1}
    shown = [event for event in events[1:] if event["ph"] == "X"]
    assert min(event["ts"] for event in shown) == pytest.approx(1e6)  # offset 1000 s, base 999 s
    idle = sum(event["dur"] for event in shown if event["cat"] == "idle")
    assert idle == pytest.approx(3 * sum(timeline.idle) * 1e6)
    assert sum(event["cat"] == "compute" for event in shown) == 3 * sum(map(len, timeline.rows))
