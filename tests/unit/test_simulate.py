"""The clock over real rows: the published bubbles, dependencies at any costs, links, speed; and the pictures."""

from __future__ import annotations

import io
import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.core.layout import Layout
from shardwright.errors import ConfigError
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.draw import grid, report, svg
from shardwright.schedule.make import (
    dualpipe_v,
    gpipe,
    interleaved,
    make_schedule,
    one_forward_one_backward,
    zero_bubble_v,
)
from shardwright.schedule.passes import add_communication
from shardwright.schedule.simulate import Costs, Link, Timeline, closed_form, simulate

NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
EXACT = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb")
SIZES = [(2, 4), (2, 9), (3, 6), (4, 8), (4, 12), (8, 16), (8, 32)]


def build(name: str, p: int, m: int, v: int = 2) -> Schedule:
    virtual = v if name in ("interleaved", "interleaved_zb") else 1
    return make_schedule(Layout(schedule=name, pp=p, microbatches=m, virtual=virtual))


def bubble(schedule: Schedule, costs: Costs | None = None) -> float:
    return simulate(schedule, costs).bubble_fraction


def formula(name: str, p: int, m: int, v: int = 2, f: float = 1, b: float = 1, w: float = 1) -> float:
    found = closed_form(name, p, m, v, f, b, w)
    assert found is not None
    return found.value


# -- bubbles ---------------------------------------------------------------------------------------


def test_bubbles_of_the_worked_examples(shared: Path) -> None:
    examples = json.loads((shared / "vectors" / "worked_examples.json").read_text())["bubble_fraction"]
    assert len(examples) == 11
    for example in examples:
        name = example["schedule"].replace("interleaved_1f1b", "interleaved")
        p, m, v = example["stages"], example["microbatches"], example.get("virtual", 1)
        note = example.get("note", "")
        if note.startswith("closed form"):
            found = formula(name, p, m, v)
        else:
            found = bubble(build(name, p, m, v))
        expected = float(Fraction(example["value"]))
        assert found == pytest.approx(expected, **({"abs": 0.01} if "within 1 point" in note else {"rel": 1e-15})), (
            example
        )


def test_135_is_the_least_count_for_a_tenth() -> None:
    assert bubble(one_forward_one_backward(16, 135)) <= 0.1 < bubble(one_forward_one_backward(16, 134))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_at_equal_times(p: int, m: int) -> None:
    assert bubble(build("zb_h1", p, m)) == pytest.approx((p - 1) / (3 * m + p - 1), rel=1e-15)
    assert bubble(build("zb_v", p, m)) == pytest.approx((p - 1) / (6 * m + p - 1), rel=1e-15)  # exact, 1 point is asked
    if m % p == 0:
        for v in (2, 3):
            assert bubble(build("interleaved", p, m, v)) == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-15)
            assert bubble(build("interleaved_zb", p, m, v)) == pytest.approx((p - 1) / (3 * v * m + p - 1), rel=1e-15)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (10, 12, 7), (5, 5, 4)])
def test_dualpipe_v_has_its_published_bubble_when_pairs_are_blocks(p: int, m: int, f: int, b: int, w: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p: exact with F&B as one block, less when F's result leaves before B's."""
    published = formula("dualpipe_v", p, m, f=f, b=b, w=w)
    assert bubble(dualpipe_v(p, m), Costs(f, b, w, overlapped=f + b + w)) == pytest.approx(published, rel=1e-12)
    assert bubble(dualpipe_v(p, m), Costs(f, b, w)) <= published


def test_overlapping_saves_time() -> None:
    whole = simulate(dualpipe_v(4, 16), Costs(10, 12, 8, overlapped=30))
    hidden = simulate(dualpipe_v(4, 16), Costs(10, 12, 8, overlapped=25))
    assert whole.busy[0] == 2 * 16 * 30
    assert hidden.busy[0] == whole.busy[0] - 5 * (2 * (16 - 8 + 1) + 3)  # a pair for each F next to a BW
    assert hidden.makespan < whole.makespan


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
@pytest.mark.parametrize(("f", "b", "w"), [(10, 11, 8), (10, 12, 7), (10, 9, 5)])
def test_bubbles_at_realistic_times(p: int, m: int, f: int, b: int, w: int) -> None:
    """W < B < F + W: closed forms stay exact but for the V-shaped ones; zero-bubble schedules stay in their order."""
    assert w < b < f + w
    found = {name: bubble(build(name, p, m), Costs(f, b, w)) for name in NAMES}
    for name in EXACT:
        assert found[name] == pytest.approx(formula(name, p, m, f=f, b=b, w=w), rel=1e-12), name
    assert formula("zb_v", p, m, f=f, b=b, w=w) <= found["zb_v"] <= formula("zb_v", p, m, f=f, b=b, w=w) + 0.02
    assert found["zb_v"] < found["zb_h1"] < found["1f1b"] == pytest.approx(found["gpipe"])
    assert found["zb_v"] <= found["interleaved_zb"] < found["interleaved"]


def test_few_micro_batches_still_gain() -> None:
    for p, m in [(4, 4), (4, 5), (8, 8)]:
        assert bubble(build("zb_v", p, m)) < bubble(build("zb_h1", p, m)) < bubble(build("1f1b", p, m))
        assert bubble(build("dualpipe_v", p, m)) < bubble(build("zb_h1", p, m))


def test_one_rank_has_no_bubble() -> None:
    for name in ("gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v"):
        schedule = make_schedule(Layout(schedule=name, microbatches=3))
        assert bubble(schedule) == 0
        assert formula(name, 1, 3) == 0


# -- the clock -------------------------------------------------------------------------------------

seconds = st.floats(0.0, 5.0, allow_nan=False)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.integers(2, 3), st.data())
def test_every_action_starts_as_soon_as_it_can(name: str, p: int, m: int, v: int, data: st.DataObject) -> None:
    schedule = build(name, p, m, v)
    s = schedule.num_stages
    f, b, w = (data.draw(st.lists(seconds, min_size=s, max_size=s)) for _ in range(3))
    latency = data.draw(st.lists(seconds, min_size=s - 1, max_size=s - 1))
    timeline = simulate(schedule, Costs(f, b, w, [Link(latency=one) for one in latency]))
    times = {span.action: span for rank in range(p) for span in timeline.spans(rank)}
    takes = {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: [x + y for x, y in zip(b, w, strict=True)]}
    for row in schedule.rows:
        free = 0.0
        for action in row:
            span = times[action]
            needs = [times[other].end + delay for other, delay in inputs(schedule, action, times, latency)]
            assert span.start == max([free, *needs]), action
            assert span.end == span.start + takes[action.kind][action.stage]
            free = span.end
    assert timeline.makespan == max(x.end for x in times.values()) - min(x.start for x in times.values())
    assert sum(timeline.busy) == pytest.approx(m * (sum(f) + sum(b) + sum(w)))
    assert timeline.idle == pytest.approx([timeline.makespan - one for one in timeline.busy])


def inputs(
    schedule: Schedule, action: Action, times: dict[Action, Any], latency: list[float]
) -> list[tuple[Action, float]]:
    """What ``action`` needs, each with the delay of the way to it."""

    def delay(boundary: int) -> float:
        apart = schedule.placement[boundary] != schedule.placement[boundary + 1]
        return latency[boundary] if apart else 0.0

    stage, m = action.stage, action.microbatch
    if action.kind is Kind.W:
        return [(Action(Kind.B, stage, m), 0.0)]
    if action.kind is Kind.F:
        return [(Action(Kind.F, stage - 1, m), delay(stage - 1))] if stage else []
    needs = [(Action(Kind.F, stage, m), 0.0)]
    if stage + 1 < schedule.num_stages:
        kind = Kind.B if Action(Kind.B, stage + 1, m) in times else Kind.BW
        needs.append((Action(kind, stage + 1, m), delay(stage)))
    return needs


def test_a_chain_by_hand() -> None:
    """Two stages, one micro-batch: F0 2, link 3 + 1, F1 5, BW1 7 + 11, link 4, BW0 3 + 1."""
    timeline = simulate(one_forward_one_backward(2, 1), Costs([2, 5], [3, 7], [1, 11], Link(latency=1, seconds=3)))
    assert [(str(x.action), x.start, x.end) for x in timeline.spans(0)] == [("F0.0", 0, 2), ("BW0.0", 33, 37)]
    assert [(str(x.action), x.start, x.end) for x in timeline.spans(1)] == [("F1.0", 6, 11), ("BW1.0", 11, 29)]
    assert (timeline.makespan, timeline.busy, timeline.idle) == (37, (6, 23), (31, 14))
    assert timeline.bubble_fraction == pytest.approx(1 - 29 / 74)


def test_messages_of_one_way_wait_for_each_other() -> None:
    """Three forwards of 1 over a link that takes 4 for each: they arrive at 5, 9 and 13; latency only moves them."""
    costs = Costs(1, 1, 1, Link.of(num_bytes=8e9, bandwidth=2e9, latency=0.5))
    starts = [span.start for span in simulate(gpipe(2, 3), costs).spans(1) if span.action.kind is Kind.F]
    assert starts == [5.5, 9.5, 13.5]
    v = simulate(zero_bubble_v(1, 2), Costs(1, 1, 1, Link(9, 9)))
    assert v.makespan == 12  # both stages on one rank: no link


def test_rows_with_sends_have_the_same_times() -> None:
    schedule = build("zb_v", 3, 7)
    plain, sending = simulate(schedule), simulate(add_communication(schedule))
    assert (plain.rows, plain.starts, plain.ends) == (sending.rows, sending.starts, sending.ends)


def test_wrong_costs_and_rows_are_refused() -> None:
    schedule = one_forward_one_backward(2, 2)
    for costs, message in (
        (Costs(forward=[1.0]), "forward has 1 times for 2 stages"),
        (Costs(weight=-1.0), "weight has a time below 0"),
        (Costs(backward=float("nan")), "backward has a time below 0 or not finite"),
        (Costs(link=[Link(), Link()]), "2 links were given for 1 boundaries"),
        (Costs(link=Link(latency=-1)), "a link has a time below 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            simulate(schedule, costs)
    stuck = Schedule("mine", 2, 2, (0, 1), (schedule.rows[0][::-1], schedule.rows[1]))
    with pytest.raises(ConfigError, match=r"schedule mine cannot run, stuck: rank 0 at BW0\.1, rank 1 at F1\.0"):
        simulate(stuck)


def test_the_clock_is_fast() -> None:
    schedule = interleaved(64, 1024, 2)
    began = time.process_time()
    timeline = simulate(schedule, Costs(1.0, 1.1, 0.9, Link(0.01, 0.01)))
    assert time.process_time() - began < 3
    assert sum(map(len, timeline.rows)) == 2 * 64 * 1024 * 2


# -- pictures --------------------------------------------------------------------------------------


def drawn(timeline: Timeline, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(grid(timeline, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_the_grid_shows_who_does_what_when() -> None:
    lines = drawn(simulate(one_forward_one_backward(2, 2)), 80)
    assert lines[:2] == ["rank 0 0 1 ····0   ··1   ", "rank 1 ··0 0   1 1   ····"]
    assert any("F forward" in line and "BW both gradients" in line and "idle" in line for line in lines)
    for width in (30, 80, 300):
        assert all(len(line) <= width for line in drawn(simulate(build("dualpipe_v", 8, 32)), width)[:8])


def test_the_svg_has_a_box_for_each_action() -> None:
    timeline = simulate(build("zb_v", 2, 4), Costs(1.0, 1.5, 0.5))
    root = ElementTree.fromstring(svg(timeline, title="a < b"))
    names = [title.text.split()[0] for title in root.iter("{http://www.w3.org/2000/svg}title") if title.text]
    assert sorted(names) == sorted(str(action) for row in timeline.rows for action in row)
    assert root.get("aria-label") == "a < b"
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= float(root.get("width", 0))


def invoke(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["schedule", *arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.stdout


def test_the_verb_prints_json(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "zb.svg"
    code, out = invoke("zb_h1", "--stages", "4", "--microbatches", "8", "--svg", str(picture), "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert found["bubble_fraction"] == found["closed_form"] == pytest.approx(3 / 27)
    assert found["in_flight"] == [4, 4, 4, 4] and found["makespan"] == 27 and found["idle"] == [3, 3, 3, 3]
    assert found["rows"] == [[str(action) for action in row] for row in build("zb_h1", 4, 8).rows]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_the_verb_draws_and_says_what_would_fill_better() -> None:
    code, out = invoke("interleaved", "--stages", "4", "--microbatches", "7", "--virtual", "2", "--w", "0.5")
    assert code == 0
    assert "rank 3" in out and "4 or 8 micro-batches fill this schedule better" in out
    assert "closed form" not in out and "in flight at most, by rank: 11, 9, 7, 5" in out
    code, out = invoke("interleaved", "--stages", "4", "--microbatches", "8", "--virtual", "2", "--w", "0.5")
    assert code == 0 and "closed form (p-1)/(vm+p-1) = 15.79%" in out


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual", "holds"),
    [("interleaved", 4, 6, 2, False), ("interleaved", 4, 8, 2, True), ("dualpipe_v", 3, 3, 1, False), ("zb_v", 3, 5, 1, False),
     ("zb_h1", 4, 3, 1, False), ("zb_h1", 4, 4, 1, True), ("1f1b", 4, 2, 1, True), ("gpipe", 4, 1, 1, True)],
)  # fmt: skip
def test_a_closed_form_is_given_only_where_it_holds(
    name: str, stages: int, microbatches: int, virtual: int, holds: bool
) -> None:
    found = report(name, stages, microbatches, virtual, (10, 11, 8)).to_json()
    assert (found["closed_form"] is not None) == holds
    if holds:
        assert found["bubble_fraction"] == pytest.approx(found["closed_form"])


def test_the_verb_reports_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.txt"
    path.write_text("F0.0 F0.1 BW0.0 BW0.1\nF1.1 BW1.1 BW1.0 F1.0\n", encoding="utf-8")
    code, out = invoke(f"file:{path}", "--json")
    found = json.loads(out)
    assert code == 1 and found["bubble_fraction"] is None
    assert found["problems"] == [
        f"{path}:1: rank 0 is stuck at BW0.0: what it needs never comes",
        f"{path}:2: rank 1 is stuck at BW1.0: what it needs never comes",
    ]
    path.write_text(str(gpipe(2, 2)), encoding="utf-8")
    assert invoke(f"file:{path}")[0] == 0
    with pytest.raises(ConfigError, match="--stages 3 was given, but the file is for 2; leave --stages out"):
        report(f"file:{path}", 3, None)
    with pytest.raises(ConfigError, match="schedule zb_v needs --stages and --microbatches"):
        report("zb_v", None, 4)
