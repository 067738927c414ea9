"""The pipeline of one replica as a CP-SAT model: who is in which microbatch, and when everything runs.

Variables: for each piece of media the pair (encoder microbatch, language-model microbatch of its sample), for each
sample its microbatch; for each unit and stage an interval of the forward and of the backward (input and weight
gradients apart where the order may split them). Constraints: one interval at a time on a rank; forwards after forwards
and gradients after gradients along the pipeline, with the transfers between; what a microbatch and a stage may hold;
no microbatch empty before one that is used. Objective: the end of the last interval.

In a complete scope the ranks' orders are free, so no schedule of any placement ends before the optimum. In a narrowed
one the language model's stages run in index order wherever the hint does, which loses little and saves much.

Price: about 0.2 ms per interval to build; 116 intervals for 16 samples in 8 microbatches on 4 stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from entrain_opt.assigner.exact_scope import Pair, Scope, Ticks, Unit
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import IntArray

FORWARD, BACKWARD, WEIGHT = range(3)
_NOT_RETURNED = -1


class PipelineModel:
    """A CP-SAT model, with its variables.

    Args:
        work: N >= 1 samples.
        scope: what may be chosen.
        ticks: times; weight gradients are intervals of their own if `split`.
        hint: a placement in the scope, its start ticks by (kind, unit), and its makespan.

    Attributes:
        model: to be solved.
        pair: per piece, the variable of each pair.
        llm: per sample, the variable of each microbatch.
        start: by (kind, unit).
        makespan: the objective.
    """

    def __init__(
        self, work: SampleWork, scope: Scope, ticks: Ticks, *, split: bool, hint: Placement,
        hint_starts: Mapping[tuple[int, Unit], int], hint_makespan: int,
    ) -> None:  # fmt: skip
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self._work, self._scope, self._ticks, self._split = work, scope, ticks, split
        self.has_media, self.media_sample = work.costs.has_media, work.costs.media_sample
        self.first_llm_stage = work.shape.num_encoder_stages
        self._hint_starts, self._horizon = hint_starts, hint_makespan
        self._hints: dict[int, tuple[Any, int]] = {}
        self._sizes: dict[tuple[object, ...], Any] = {}
        self.start: dict[tuple[int, Unit], Any] = {}
        self._end: dict[tuple[int, Unit], Any] = {}
        self._present: dict[Unit, Any] = {}
        self._on_rank: list[list[Any]] = [[] for _ in range(work.shape.num_ranks)]
        self._rank_sizes: list[list[Any]] = [[] for _ in range(work.shape.num_ranks)]
        self._assign(hint)
        self._intervals()
        self._precedences()
        self._limits()
        if not scope.complete:
            self._keep_order()
        self.makespan = self._variable(0, self._horizon, self._horizon)
        self._objective()
        for variable, value in self._hints.values():
            self.model.add_hint(variable, value)

    # Variables.

    def _variable(self, low: int, high: int, hint: int) -> Any:
        variable = self.model.new_int_var(low, high, "")
        self._hints[variable.index] = (variable, hint)
        return variable

    def _any_of(self, literals: list[Any], hint: bool) -> Any:
        """A literal that is true where one of them is."""
        if len(literals) == 1:
            return literals[0]
        literal = self._variable(0, 1, int(hint))
        self.model.add_max_equality(literal, literals)
        return literal

    def _assign(self, hint: Placement) -> None:
        scope, work, model = self._scope, self._work, self.model
        self.llm: list[dict[int, Any]] = []
        for sample, choices in enumerate(scope.llm):
            own = int(hint.llm_microbatch[sample])
            row = {m: self._variable(int(len(choices) == 1), 1, int(m == own)) for m in choices}
            model.add_exactly_one(row.values())
            self.llm.append(row)
        self.pair: list[dict[Pair, Any]] = []
        for piece, pairs in zip(scope.pieces, scope.pairs, strict=True):
            own_pair = (int(hint.encoder_microbatch[piece.media[0]]), int(hint.llm_microbatch[piece.sample]))
            chosen = {pair: self._variable(int(len(pairs) == 1), 1, int(pair == own_pair)) for pair in pairs}
            model.add_exactly_one(chosen.values())
            for microbatch, literal in self.llm[piece.sample].items():
                model.add(sum(v for (_, j), v in chosen.items() if j == microbatch) == literal)
            self.pair.append(chosen)
        used = []
        for microbatch in range(scope.count):
            mine = [row[microbatch] for row in self.llm if microbatch in row]
            assert mine, "every microbatch of a scope is a choice of some sample"
            used.append(self._any_of(mine, microbatch < hint.num_microbatches))
        for earlier, later in pairwise(used):
            model.add_implication(later, earlier)
        self._used = used
        self._cap(work)

    def _cap(self, work: SampleWork) -> None:
        """What one microbatch may hold."""
        scope, shape = self._scope, work.shape
        patches = [int(work.costs.patches[piece.media].sum()) for piece in scope.pieces]
        for microbatch in range(scope.count):
            if shape.tokens_limit is not None:
                rows = [(int(work.tokens[s]), row[microbatch]) for s, row in enumerate(self.llm) if microbatch in row]
                self.model.add(sum(tokens * literal for tokens, literal in rows) <= shape.tokens_limit)
            if shape.patches_limit is not None:
                mine = [(p, v) for p, row in zip(patches, self.pair, strict=True) for (k, _), v in row.items()
                        if k == microbatch]  # fmt: skip
                self.model.add(sum(amount * literal for amount, literal in mine) <= shape.patches_limit)

    def _intervals(self) -> None:
        """Units of all stages, by (encoder microbatch, language-model microbatch)."""
        shape, scope = self._work.shape, self._scope
        #: Per encoder: literal of each pair.
        self._pairs: list[dict[Pair, Any]] = []
        for encoder in range(shape.num_encoders):
            members: dict[Pair, list[tuple[Any, IntArray]]] = {}
            for piece, row in zip(scope.pieces, self.pair, strict=True):
                if piece.encoder == encoder:
                    for pair, literal in row.items():
                        members.setdefault(pair, []).append((literal, piece.media))
            hinted = {pair: any(self._hints[v.index][1] for v, _ in rows) for pair, rows in members.items()}
            literals = {pair: self._any_of([v for v, _ in members[pair]], hinted[pair]) for pair in sorted(members)}
            self._pairs.append(literals)
            units: dict[Pair, list[tuple[Any, IntArray]]] = members
            present = literals
            if not shape.encoder_has_backward(encoder):
                units, present = {}, {}
                for (k, _), rows in sorted(members.items()):
                    units.setdefault((k, _NOT_RETURNED), []).extend(rows)
                for k, _ in units:
                    mine = [pair for pair in literals if pair[0] == k]
                    present[k, _NOT_RETURNED] = self._any_of(
                        [literals[pair] for pair in mine], any(hinted[pair] for pair in mine)
                    )
            for stage in shape.stages_of_encoder(encoder):
                for pair in sorted(units):
                    self._unit((stage, *pair), present[pair], units[pair])
        for stage in shape.stages_of_llm:
            for microbatch in range(scope.count):
                rows = self._rows_of((stage, -1, microbatch))
                self._unit((stage, -1, microbatch), self._used[microbatch], rows)

    def _unit(self, unit: Unit, present: Any, rows: list[tuple[Any, Any]]) -> None:
        stage, ticks = unit[0], self._ticks
        rank = self._work.shape.ranks_of_stages[stage]
        self._present[unit] = present
        kinds = [(FORWARD, ticks.forward[stage], int(ticks.fixed[0, stage]))]
        if self._work.shape.has_backward[stage]:
            kinds.append((BACKWARD, ticks.backward[stage], int(ticks.fixed[1, stage])))
            if self._split:
                kinds.append((WEIGHT, ticks.weight[stage], 0))
        for kind, amounts, fixed in kinds:
            size = self._sum(unit, present, rows, amounts, fixed)
            begin = self._hint_starts.get((kind, unit), 0)
            start = self._variable(0, self._horizon, begin)
            end = self._variable(0, self._horizon, begin + self._hints[size.index][1])
            interval = self.model.new_optional_interval_var(start, size, end, present, "")
            self.start[kind, unit], self._end[kind, unit] = start, end
            self._on_rank[rank].append(interval)
            self._rank_sizes[rank].append(size)

    def _sum(self, unit: Unit, present: Any, rows: list[tuple[Any, Any]], amounts: IntArray, fixed: int) -> Any:
        """A variable for the sum of the amounts of a unit's items; stages of equal amounts share it."""
        is_llm = unit[1] < 0
        key = (is_llm, unit[1:], present.index, amounts.tobytes(), fixed)
        if key not in self._sizes:
            terms = [(int(amounts[items].sum()), literal) for literal, items in rows]
            total = sum(amount for amount, _ in terms) + fixed
            hint = sum(amount * self._hints[literal.index][1] for amount, literal in terms)
            hint += fixed * self._hints[present.index][1]
            size = self._variable(0, total, hint)
            self.model.add(size == sum(amount * literal for amount, literal in terms) + fixed * present)
            self._sizes[key] = size
        return self._sizes[key]

    # Constraints.

    def _after(self, later: Any, earlier: Any, transfer: Any, literal: Any) -> None:
        self.model.add(later >= earlier + transfer).only_enforce_if(literal)

    def _transfer(self, unit: Unit, target_stage: int) -> Any:
        """Ticks that the output of a unit takes to another stage, and the gradient back."""
        shape, ticks, stage = self._work.shape, self._ticks, unit[0]
        fixed = int(ticks.fixed[2, stage])
        if shape.ranks_of_stages[stage] == shape.ranks_of_stages[target_stage]:
            return 0
        if not ticks.transfer[stage].any():
            return fixed
        return self._sum(unit, self._present[unit], self._rows_of(unit), ticks.transfer[stage], fixed)

    def _rows_of(self, unit: Unit) -> list[tuple[Any, Any]]:
        stage, k, j = unit
        encoder = self._work.shape.encoder_of_stage(stage)
        if encoder is None:
            return [(row[j], s) for s, row in enumerate(self.llm) if j in row]
        return [
            (literal, piece.media)
            for piece, row in zip(self._scope.pieces, self.pair, strict=True)
            if piece.encoder == encoder
            for pair, literal in row.items()
            if pair[0] == k and j in (_NOT_RETURNED, pair[1])
        ]

    def _precedences(self) -> None:
        shape, first_llm = self._work.shape, self._work.shape.num_encoder_stages
        for unit, present in self._present.items():
            stage = unit[0]
            encoder = shape.encoder_of_stage(stage)
            last = stage + 1 == shape.num_stages or shape.encoder_of_stage(stage + 1) != encoder
            targets = [((stage + 1, *unit[1:]), present)] if not last else []
            if last and encoder is not None:
                pairs = self._pairs[encoder].items()
                mine = [(j, v) for (k, j), v in pairs if k == unit[1] and unit[2] in (_NOT_RETURNED, j)]
                targets = [((first_llm, -1, j), literal) for j, literal in mine]
            for target, literal in targets:
                sent = self._transfer(unit, target[0])
                self._after(self.start[FORWARD, target], self._end[FORWARD, unit], sent, literal)
                if shape.has_backward[stage]:
                    self._after(self.start[BACKWARD, unit], self._end[BACKWARD, target], sent, literal)
            if shape.has_backward[stage]:
                self._after(self.start[BACKWARD, unit], self._end[FORWARD, unit], 0, present)
                if self._split:
                    self._after(self.start[WEIGHT, unit], self._end[BACKWARD, unit], 0, present)

    def _limits(self) -> None:
        """One operation at a time on a rank; what a stage holds between a unit's forward and its last gradients.

        What a split backward keeps besides is left out: a bound stays one, and the evaluator judges every answer.
        """
        shape, work = self._work.shape, self._work
        for intervals in self._on_rank:
            self.model.add_no_overlap(intervals)
        last = WEIGHT if self._split else BACKWARD
        for stage, limit in enumerate(shape.stage_limits):
            if limit is None or not shape.has_backward[stage]:
                continue
            amounts = work.costs.patches if stage < shape.num_encoder_stages else work.tokens
            held, demands = [], []
            for unit in [unit for unit in self._present if unit[0] == stage]:
                start, end, present = self.start[FORWARD, unit], self._end[last, unit], self._present[unit]
                length = self._variable(0, self._horizon, self._hints[end.index][1] - self._hints[start.index][1])
                held.append(self.model.new_optional_interval_var(start, length, end, present, ""))
                demands.append(self._sum(unit, present, self._rows_of(unit), amounts, 0))
            self.model.add_cumulative(held, demands, limit)

    def _keep_order(self) -> None:
        shape = self._work.shape
        for stage in shape.stages_of_llm:
            for kind in (FORWARD, BACKWARD):
                names = [
                    (kind, (stage, -1, m)) for m in range(self._scope.count) if (kind, (stage, -1, m)) in self.start
                ]
                starts = [self._hint_starts[name] for name in names]
                if all(a <= b for a, b in pairwise(starts)):
                    for earlier, later in pairwise(names):
                        self._after(self.start[later], self._end[earlier], 0, self._present[later[1]])

    def _objective(self) -> None:
        shape = self._work.shape
        last = WEIGHT if self._split else BACKWARD
        for unit, present in self._present.items():
            kind = last if shape.has_backward[unit[0]] else FORWARD
            self._after(self.makespan, self._end[kind, unit], 0, present)
        for sizes in self._rank_sizes:
            self.model.add(self.makespan >= sum(sizes))
        self.model.minimize(self.makespan)
