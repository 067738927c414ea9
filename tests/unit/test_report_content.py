"""Every number of a report agrees with the simulator it comes from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples
from report_cases import make_bench, small_content

from entrain_opt.plan import Plan
from entrain_opt.report import Bench, draw_batches
from entrain_opt.report.content import build_content
from entrain_opt.report.tables import candidates_table, trials_view
from entrain_opt.report.timelines import bubbles_view, memory_curve_view, memory_peak_view, timeline_view
from entrain_opt.report.views import BAR_KINDS

SCHEDULES = ("1f1b", "zero_bubble")


@pytest.fixture(scope="module")
def bench():
    return make_bench()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bars_cover_the_busy_time_without_overlap(bench, schedule):
    timeline = bench.timeline(0, "pairwise", schedule)
    view = timeline_view(timeline, bench.batches[0], bench.plan, 1)
    for rank in range(4):
        bars = [b for b in view.bars if b.rank == rank and b.kind in BAR_KINDS[:7]]
        assert sum(bar.seconds for bar in bars) == pytest.approx(timeline.busy_seconds[1, rank])
        bars.sort(key=lambda bar: bar.start)
        for one, following in pairwise(bars):
            assert following.start >= one.start + one.seconds - 1e-12
    assert {bar.kind for bar in view.bars} <= set(BAR_KINDS)
    assert max(bar.start + bar.seconds for bar in view.bars) <= timeline.makespan_seconds + 1e-12
    assert ("weight gradients" in {bar.kind for bar in view.bars}) == (schedule == "zero_bubble")


def test_deferral_shows_in_colour_and_arrows(bench):
    # In the second batch `pairwise` defers.
    views = [timeline_view(bench.timeline(1, "pairwise", "1f1b"), bench.batches[1], bench.plan, r) for r in range(2)]
    deferring = max(views, key=lambda view: len(view.arrows))
    plain = timeline_view(bench.timeline(1, "in_order", "1f1b"), bench.batches[1], bench.plan, 0)
    assert deferring.arrows
    assert "deferred forward" in {bar.kind for bar in deferring.bars}
    assert all(arrow.from_rank == 1 and arrow.to_rank == 2 for arrow in deferring.arrows)
    assert all(arrow.from_seconds <= arrow.to_seconds for arrow in deferring.arrows)
    assert not plain.arrows
    assert not {"deferred forward", "deferred backward"} & {bar.kind for bar in plain.bars}


def test_causes_add_up_to_the_idle_time(bench):
    timeline = bench.timeline(0, "in_order", "1f1b")
    view = bubbles_view(timeline, bench.plan, limit_seconds=1.0)
    total = np.sum([values for _, _, values in view.causes], axis=0)
    np.testing.assert_allclose(total, timeline.idle_seconds.mean(axis=0))


def test_memory_adds_up_to_the_simulated_peak(bench):
    timeline = bench.timeline(0, "pairwise", "1f1b")
    nothing = bench.recomputed_bytes(0, "pairwise")
    assert not nothing.any()
    peaks = memory_peak_view(timeline, bench.costs, bench.plan, nothing, limit_bytes=bench.limit_bytes)
    total = np.sum([values for _, values in peaks.parts], axis=0)
    np.testing.assert_allclose(total, timeline.peak_bytes.max(axis=0), rtol=1e-9)
    for replica in range(2):
        curves = memory_curve_view(timeline, bench.plan, replica, limit_bytes=bench.limit_bytes)
        np.testing.assert_allclose([max(v) for v in curves.num_bytes], timeline.peak_bytes[replica])
        assert all(list(seconds) == sorted(seconds) for seconds in curves.seconds)


def test_the_layer_being_recomputed_is_part_of_the_peak():
    plan = make_bench().plan
    stages = tuple(replace(stage, recompute=stage.module == "llm") for stage in plan.stages)
    bench = make_bench(stages=stages)
    timeline, recomputed = bench.timeline(0, "pairwise", "1f1b"), bench.recomputed_bytes(0, "pairwise")
    peaks = memory_peak_view(timeline, bench.costs, bench.plan, recomputed, limit_bytes=bench.limit_bytes)
    parts = dict(peaks.parts)
    assert parts["recomputed layer"][:2] == (0.0, 0.0) < parts["recomputed layer"][2:]
    expected = (timeline.peak_bytes + recomputed).max(axis=0)
    np.testing.assert_allclose(np.sum(list(parts.values()), axis=0), expected, rtol=1e-9)
    assert bench.trial("pairwise", "1f1b").peak_bytes >= expected.max()


def test_the_headline_names_plan_baseline_and_ratio():
    content, bench = small_content(), make_bench()
    own, baseline = bench.trial("pairwise", "1f1b"), bench.trial("in_order", "1f1b")
    assert "2 copies of the model, each cut over 4 devices (vision on 2, the LLM on 2)" in content.sentence
    assert f"{baseline.step_seconds / own.step_seconds:.2f} times as long" in content.sentence
    assert content.policies == ("pairwise", "in_order")
    assert set(content.timelines) == {(p, r) for p in content.policies for r in (0, 1)}
    assert content == build_content(
        bench, make_samples(120, seed=3), name="small <run>", policies=("karmarkar_karp",), schedules=("gpipe",), seed=0
    )  # fmt: skip


def test_the_what_if_table_is_relative_to_the_plan():
    table = small_content().what_if
    assert table.marked == 0
    assert table.rows[0][4] == ""
    assert {(row[0], row[1]) for row in table.rows} == {
        (policy, schedule) for policy in ("pairwise", "karmarkar_karp") for schedule in ("1f1b", "gpipe")
    }
    assert sum("fastest that fits" in row[-1] for row in table.rows) == 1


def test_ratios_narrow_as_batches_grow():
    ratio = small_content().ratio
    assert ratio is not None
    width = np.array(ratio.high) - np.array(ratio.low)
    assert width[-1] < 0.1 * width[0]
    assert ratio.low[-1] <= ratio.all_data <= ratio.high[-1]


def test_a_plan_in_order_on_one_rank_needs_no_comparison():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 0)], num_microbatches=4)
    plan = replace(plan, policy="in_order")
    samples, costs = make_samples(40), make_costs()
    bench = Bench(plan, samples, costs, draw_batches(samples, 16, 1, seed=0), limit_bytes=8 << 30)
    content = build_content(bench, samples, name="one", policies=(), schedules=(), seed=0)
    assert content.policies == ("in_order",)
    assert "in order" not in content.sentence


def test_a_model_without_encoder_has_a_report():
    model = make_model()
    model = replace(model, encoders=())
    plan = make_plan([("llm", 0, 3, 0), ("llm", 3, 6, 1)], num_microbatches=4)
    samples = make_samples(40)
    samples = replace(
        samples,
        media_offsets=np.zeros(41, dtype=np.int64),
        **{
            name: np.zeros(0, dtype=np.int64)
            for name in ("media_kind", "media_patches", "media_segments", "media_tokens")
        },
    )
    bench = Bench(plan, samples, make_costs(model=model), draw_batches(samples, 16, 1, seed=0), limit_bytes=8 << 30)
    content = build_content(bench, samples, name="text", policies=(), schedules=(), seed=0)
    assert content.ratio is None
    assert all("encoder" not in bar.kind for view in content.timelines.values() for bar in view.bars)


def test_runners_up_stand_behind_the_chosen_one(bench):
    entries = (
        {"data": 1, "pipeline": 2, "num_microbatches": 4, "stages": "vision[0:12]@0 llm[0:2]@0 llm[2:6]@1",
         "closed_form_seconds": 1.0, "predicted_seconds": 1.5, "outcome": "chosen"},
        {"data": 1, "pipeline": 2, "num_microbatches": 8, "stages": "vision[0:12]@0 llm[0:6]@1",
         "closed_form_seconds": 1.0, "predicted_seconds": None, "outcome": "cannot run: memory"},
        {"data": 2, "pipeline": 1, "num_microbatches": 8, "stages": "vision[0:12]@0 llm[0:6]@0",
         "closed_form_seconds": 1.0, "predicted_seconds": 1.65, "outcome": "10.0% slower (1.65 s replayed)"},
    )  # fmt: skip
    plan: Plan = replace(bench.plan, provenance=replace(bench.plan.provenance, candidates=entries))
    table = candidates_table(plan)
    assert table is not None
    assert table.marked == 0
    assert table.rows[0][2] == "vision (12), llm (2)+4"
    assert table.rows[1][5] == "10.0% slower"
    assert table.faint == (2,)
    assert candidates_table(bench.plan) is None


def test_trials_that_cannot_run_say_so():
    tight = make_bench(limit_bytes=1 << 20)
    trials = [make_bench().trial("pairwise", "1f1b"), tight.trial("pairwise", "1f1b")]
    table = trials_view(trials, caption="c", reference=0, best=0)
    assert table.faint == (1,)
    assert len({len(row) for row in table.rows} | {len(table.columns)}) == 1
