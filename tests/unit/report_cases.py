"""A small report, made once per test session, for the tests of figures, page and browser."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.report import Bench, draw_batches
from entrain_opt.report.content import ReportContent, build_content


def make_bench(*, limit_bytes: int = 8 << 30, batches: int = 2, data: int = 2, **changes) -> Bench:
    """Two replicas of a tower on two ranks and a language model on two."""
    plan = make_plan(
        [("vision", 0, 6, 0), ("vision", 6, 12, 1), ("llm", 0, 3, 2), ("llm", 3, 6, 3)], data=data, num_microbatches=6
    )
    plan = replace(plan, global_batch_size=32, **changes)
    samples = make_samples(120, seed=3)
    costs = make_costs(model=make_model(), devices=4 * data)
    rows = draw_batches(samples, plan.global_batch_size, batches, seed=0)
    return Bench(plan, samples, costs, rows, limit_bytes=limit_bytes)


@cache
def small_content() -> ReportContent:
    return build_content(
        make_bench(), make_samples(120, seed=3), name="small <run>", policies=("karmarkar_karp",), schedules=("gpipe",),
        seed=0,
    )  # fmt: skip
