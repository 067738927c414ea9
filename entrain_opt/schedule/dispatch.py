"""A list scheduler that plays the pipeline forward in time and writes down what each rank runs.

Whenever a rank is free it starts the first operation, by the rule's priorities, whose inputs are there and which
`admission.py` admits. No rank ever waits for one particular operation, so the result can always be replayed: the order
it wrote down is one that has run.

Times are integer ticks, so equal costs give exactly equal times. Price: O(log n) and about 8 us per operation.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from entrain_opt.errors import ScheduleError
from entrain_opt.schedule.admission import ADMITTED, NO_MEMORY, Admission, Rule
from entrain_opt.schedule.graph import WorkGraph

#: How many ready units of a stage are tried when memory refuses the first ones.
CANDIDATES_PER_STAGE = 8


def dispatch(
    graph: WorkGraph,
    rule: Rule,
    *,
    durations: list[int],
    transfer: list[int],
    limits: list[int | None],
    amounts: list[int],
) -> list[list[int]]:
    """Operations of each rank in the order they start.

    Args:
        graph: the work.
        rule: priorities and windows.
        durations: [3 * slots] ticks.
        transfer: [slots] ticks of its output (and of the gradient back) to another rank.
        limits: per stage, the amount it may hold; None is unlimited.
        amounts: [slots] what each slot holds while in flight.

    Raises:
        ScheduleError: the sources of one language-model microbatch do not fit into the limit together.
    """
    return _Dispatcher(graph, rule, durations, transfer, limits, amounts).run()


class _Dispatcher:
    def __init__(
        self,
        graph: WorkGraph,
        rule: Rule,
        durations: list[int],
        transfer: list[int],
        limits: list[int | None],
        amounts: list[int],
    ) -> None:
        shape = graph.shape
        self.graph, self.rule, self.durations, self.transfer = graph, rule, durations, transfer
        self.admission = Admission(graph, rule, limits, amounts)
        self.phases = rule.phases and all(limit is None for limit in limits)
        self.num_slots, self.missing = graph.num_slots, list(graph.missing)
        self.has_backward, self.first_llm = shape.has_backward, shape.num_encoder_stages
        self.rank_of_stage = shape.ranks_of_stages
        self.stages_of_rank = [shape.stages_of_rank(rank) for rank in range(shape.num_ranks)]
        self.forwards_left = [sum(len(graph.units[s]) for s in stages) for stages in self.stages_of_rank]
        self.started = bytearray(self.num_slots)
        self.ready_forward: list[list[tuple[int, int]]] = [[] for _ in range(shape.num_stages)]
        self.ready_backward: list[list[tuple[int, int]]] = [[] for _ in range(shape.num_ranks)]
        self.ready_weight: list[deque[int]] = [deque() for _ in range(shape.num_ranks)]
        self.last_was_backward = [False] * shape.num_ranks
        self.events: list[tuple[int, int, int]] = []
        self.now = 0
        self.touched: set[int] = set(range(shape.num_ranks))

    def run(self) -> list[list[int]]:
        graph, events, touched, durations = self.graph, self.events, self.touched, self.durations
        for slot in range(self.num_slots):
            if self.missing[slot] == 0:
                self.ready_forward[graph.slot_stage[slot]].append((self.rule.forward_key[slot], slot))
        for ready in self.ready_forward:
            heapify(ready)
        busy = [False] * len(self.stages_of_rank)
        orders: list[list[int]] = [[] for _ in busy]
        while True:
            for rank in sorted(touched):
                if not busy[rank]:
                    operation = self._choose(rank)
                    if operation >= 0:
                        busy[rank] = True
                        orders[rank].append(operation)
                        heappush(events, (self.now + durations[operation], 0, operation))
            touched.clear()
            if not events:
                break
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                _, arrived, operation = heappop(events)
                if arrived:
                    self._deliver(operation)
                else:
                    busy[graph.slot_rank[operation % self.num_slots]] = False
                    self._complete(operation)
        expected = self.num_slots + sum(
            1 + self.rule.split[slot] for slot, stage in enumerate(graph.slot_stage) if self.has_backward[stage]
        )
        if sum(map(len, orders)) != expected:
            raise ScheduleError(
                f"schedule: only {sum(map(len, orders))} of {expected} operations could run. This is a defect of the "
                f"list scheduler; please report it with the assignment."
            )
        return orders

    def _choose(self, rank: int) -> int:
        """The next operation of a free rank, taken off its list; -1 if none may start."""
        waits = self.phases and self.forwards_left[rank]
        backward = self.ready_backward[rank]
        turn = self.rule.first == "backward" or (self.rule.first == "alternate" and not self.last_was_backward[rank])
        if backward and turn and not waits:
            self.last_was_backward[rank] = True
            return heappop(backward)[1]
        slot = self._choose_forward(rank)
        if slot >= 0:
            self.last_was_backward[rank] = False
            self.started[slot] = 1
            self.forwards_left[rank] -= 1
            self.admission.start(self.graph.slot_stage[slot], slot)
            return slot
        if backward and not waits:
            self.last_was_backward[rank] = True
            return heappop(backward)[1]
        return self.ready_weight[rank].popleft() if self.ready_weight[rank] else -1

    def _choose_forward(self, rank: int) -> int:
        best, best_key = -1, 0
        for stage in self.stages_of_rank[rank]:
            ready = self.ready_forward[stage]
            while ready and self.started[ready[0][1]]:
                heappop(ready)
            if not ready or (best >= 0 and ready[0][0] >= best_key):
                continue
            answer = self.admission.ask(stage, ready[0][1])
            if answer == ADMITTED:
                best_key, best = ready[0]
            elif answer == NO_MEMORY:
                key, slot = self._choose_smaller(stage)
                if slot >= 0 and (best < 0 or key < best_key):
                    best_key, best = key, slot
        return best

    def _choose_smaller(self, stage: int) -> tuple[int, int]:
        """Memory refuses the first unit in order: another that fits, or one that the oldest microbatch waits for."""
        ready = self.ready_forward[stage]
        aside: list[tuple[int, int]] = []
        found = (0, -1)
        while ready and len(aside) < CANDIDATES_PER_STAGE:
            entry = heappop(ready)
            if self.started[entry[1]]:
                continue
            aside.append(entry)
            if self.admission.ask(stage, entry[1]) == ADMITTED:
                found = entry
                break
        for entry in aside:
            heappush(ready, entry)
        if found[1] < 0:
            for slot in self.admission.units_of_oldest(stage):
                if not self.missing[slot] and not self.started[slot] and self.admission.ask(stage, slot) == ADMITTED:
                    return self.rule.forward_key[slot], slot
        return found

    def _complete(self, operation: int) -> None:
        graph, count, admission = self.graph, self.num_slots, self.admission
        kind, slot = divmod(operation, count)
        stage, rank = graph.slot_stage[slot], graph.slot_rank[slot]
        self.touched.add(rank)
        if kind == 0:
            for target in graph.forward_targets[slot]:
                self._send(target, graph.slot_rank[target] != rank, self.transfer[slot])
            if self.has_backward[stage]:
                self._deliver(count + slot)
            else:
                admission.leave(stage)
                admission.release(stage, slot)
                if stage >= self.first_llm:
                    admission.finish(stage, slot)
            if stage == self.first_llm:
                for served in admission.finish_without_gradients(slot - graph.stage_first[stage]):
                    self.touched.add(self.rank_of_stage[served])
        elif kind == 1:
            for target in graph.backward_targets[slot]:
                self._send(count + target, graph.slot_rank[target] != rank, self.transfer[target])
            admission.leave(stage)
            admission.finish(stage, slot)
            if self.rule.split[slot]:
                admission.weights_left[stage] += 1
                self.ready_weight[rank].append(2 * count + slot)
            else:
                admission.release(stage, slot)
        else:
            admission.weights_left[stage] -= 1
            admission.release(stage, slot)

    def _send(self, operation: int, crosses_ranks: bool, ticks: int) -> None:
        if crosses_ranks and ticks:
            heappush(self.events, (self.now + ticks, 1, operation))
        else:
            self._deliver(operation)

    def _deliver(self, operation: int) -> None:
        """One of the inputs of an operation is there."""
        self.missing[operation] -= 1
        if self.missing[operation]:
            return
        slot = operation % self.num_slots
        rank = self.graph.slot_rank[slot]
        if operation < self.num_slots:
            heappush(self.ready_forward[self.graph.slot_stage[slot]], (self.rule.forward_key[slot], slot))
        else:
            heappush(self.ready_backward[rank], (self.rule.backward_key[slot], operation))
        self.touched.add(rank)
