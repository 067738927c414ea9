"""Scores placements of one replica by the time that a schedule of them takes.

`interleaved` and `search` are scored as `eager`, whose order they are nearest to of those that are compiled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner import pipeline_columns as p
from entrain_opt.assigner.annealing import anneal
from entrain_opt.assigner.eager import eager_ticks
from entrain_opt.assigner.joint import normalised_loads
from entrain_opt.assigner.layout import Layout
from entrain_opt.assigner.pipeline import iteration_ticks
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import FloatArray, IntArray
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import columns as c
from entrain_opt.schedule.admission import Rule
from entrain_opt.schedule.dispatch import pipeline_arrays
from entrain_opt.schedule.graph import work_graph
from entrain_opt.schedule.orders import SPLITTING_ORDERS, TIMED_ORDERS, even_ticks, fixed_rule, memory_limits
from entrain_opt.schedule.work import ReplicaWork

#: All work of a replica has this many ticks.
TICKS = 1 << 40
_SCORED_AS = {"interleaved": "eager", "search": "eager"}


class Evaluator:
    """The makespan of placements of the same samples.

    Args:
        work: N >= 1 samples of one replica.
        schedule: the order that will run them.
        general: evaluate as every case is, even where a faster way exists; the seconds are the same.
    """

    def __init__(self, work: SampleWork, schedule: str, *, general: bool = False) -> None:
        order = _SCORED_AS.get(schedule, schedule)
        costs, shape = work.costs, work.shape
        stages = costs.stage_costs(shape)
        fixed = np.array([stages.forward_fixed_seconds, stages.backward_fixed_seconds])
        total = (
            sum(float(f.sum() + b.sum()) for f, b in zip(stages.forward_seconds, stages.backward_seconds, strict=True))
            + float(fixed.sum()) * work.num_samples
        )
        self.seconds_per_tick = total / TICKS if total > 0 else 1.0
        first_llm = shape.num_encoder_stages
        self._has_media = costs.has_media
        rows = np.flatnonzero(self._has_media)
        columns = (stages.forward_seconds, stages.backward_seconds, stages.send_seconds)
        media_ticks = np.array([[self._ticks(a[rows]) for a in kind[:first_llm]] for kind in columns], dtype=np.int64)
        stage_costs = np.zeros((shape.num_stages, p.NUM_STAGE_COSTS), dtype=np.int64)
        stage_costs[:, p.FIXED_FORWARD] = self._ticks(fixed[0])
        stage_costs[:, p.FIXED_BACKWARD] = self._ticks(fixed[1])
        stage_costs[:, p.FIXED_TRANSFER] = self._ticks(np.full(shape.num_stages, stages.send_fixed_seconds))
        stage_costs[:, p.WEIGHT_PERMILLE] = np.rint(1000 * np.array(stages.weight_gradient_share))
        split = np.array([stages.split_costs(stage) for stage in range(shape.num_stages)])
        stage_costs[:, p.SPLIT_PERMILLE] = np.rint(1000 * split[:, 0])
        stage_costs[:, p.FIXED_SPLIT] = self._ticks(split[:, 1])
        stage_costs[:, p.EVEN] = even_ticks(shape)
        # The order's rule and the stages' limits are those of every schedule; units come with each placement.
        no_units = work_graph(ReplicaWork(encoder_units=(), llm_units=(), num_microbatches=0), shape)
        limits, _ = memory_limits(no_units, costs)
        rule = fixed_rule(no_units, order)
        template = pipeline_arrays(no_units, rule, limits, [])
        self._work = (
            np.column_stack([costs.media_sample[rows], costs.encoder_index[rows], costs.patches[rows]]).astype(
                np.int64
            ),
            np.ascontiguousarray(work.tokens, dtype=np.int64),
            media_ticks.reshape(3, first_llm, len(rows)),
            np.array([[self._ticks(a) for a in kind[first_llm:]] for kind in columns]),
            stage_costs,
            _encoders(shape),
            template.stages,
        )
        self._settings = _settings(shape, order, rule)
        # Orders that work ahead as far as memory allows have an evaluation of their own.
        as_eager = order in TIMED_ORDERS and all(depth is None for depth in rule.depth)
        self._rules = None if as_eager and not general else template.rules
        self._media_first = np.searchsorted(costs.media_sample[rows], np.arange(work.num_samples + 1)).astype(np.int64)
        weights = np.sqrt(normalised_loads(work).max(axis=1))
        self._cumulated = np.cumsum(weights if weights.any() else np.ones(work.num_samples))

    def seconds(self, placement: Placement) -> float:
        """Iteration time; infinite where a memory limit is broken."""
        layout = (
            placement.encoder_microbatch[self._has_media],
            placement.llm_microbatch,
            placement.num_microbatches,
        )
        if self._rules is None:
            ticks = eager_ticks(*layout, *self._work, self._settings)
        else:
            ticks = iteration_ticks(*layout, *self._work, self._rules, self._settings)
        return float(np.inf) if ticks == p.INFEASIBLE else float(ticks) * self.seconds_per_tick

    def anneal(
        self,
        start: Layout,
        seconds: float,
        *,
        most: int,
        temperature_seconds: float,
        budget: float,
        state: NDArray[np.uint64],
    ) -> tuple[float, Layout, float]:
        """Seconds and layout of the best found from a start, and what was spent; see `annealing.py`.

        Args:
            start: with at most `most` microbatches, or as many as memory needs.
            seconds: its iteration time.
            most: microbatches.
            temperature_seconds: at the start.
            budget: in evaluations of as many microbatches as there are samples.
            state: of the random numbers; changed.
        """
        rows = np.flatnonzero(self._has_media)
        ticks, media, llm, spent = anneal(
            start.media[rows],
            start.llm,
            start.count,
            most,
            seconds / self.seconds_per_tick,
            temperature_seconds / self.seconds_per_tick,
            budget,
            self._media_first,
            self._cumulated,
            state,
            *self._work,
            self._rules,
            self._settings,
        )
        all_media = start.media.copy()
        all_media[rows] = media
        return ticks * self.seconds_per_tick, Layout(media=all_media, llm=llm, count=int(llm.max()) + 1), spent

    def _ticks(self, seconds: FloatArray) -> IntArray:
        return np.rint(seconds / self.seconds_per_tick).astype(np.int64)


def _encoders(shape: PipelineShape) -> IntArray:
    encoders = np.zeros((shape.num_encoders, 3), dtype=np.int64)
    for encoder in range(shape.num_encoders):
        stages = shape.stages_of_encoder(encoder)
        encoders[encoder] = stages[0], len(stages), shape.encoder_has_backward(encoder)
    return encoders


def _settings(shape: PipelineShape, order: str, rule: Rule) -> IntArray:
    settings = np.zeros(p.NUM_SETTINGS, dtype=np.int64)
    settings[p.PATCHES_LIMIT] = c.NONE if shape.patches_limit is None else shape.patches_limit
    settings[p.TOKENS_LIMIT] = c.NONE if shape.tokens_limit is None else shape.tokens_limit
    settings[p.TIMED] = order in TIMED_ORDERS
    settings[p.SPLIT_BACKWARD] = order in SPLITTING_ORDERS
    settings[p.SPLIT_FOR_WAITING] = rule.split_for_waiting
    return settings
