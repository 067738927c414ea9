"""Ranks that stay alive between timed iterations, so that rounds of different policies can take turns.

Every rank makes its part of a global batch for each policy with the real builder, and runs it with the real iteration
runner: computing, or waiting for predicted times (emulated). An iteration is timed between two barriers, from the first
check that ranks agree to the last reduction, on the slowest rank. Assigning and reading data happen before. Processor
seconds are counted per rank, and per action of the schedule, since they hardly depend on what else the machine does.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.plan import Plan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.emulation import EmulatedExecutor, StandInModel
from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model, tied_stages
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Forward


@dataclass(frozen=True, kw_only=True)
class Case:
    """What ranks are started for.

    Attributes:
        plan: its policy and schedule are replaced by each trial's.
        costs: the assigner's and, where emulated, the waits'.
        samples: the data set's table.
        model_folder, dataset: for real compute.
        scale: wall seconds per predicted second for emulated compute; None computes.
    """

    plan: Plan
    costs: object
    samples: object
    model_folder: str = ""
    dataset: str = ""
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One iteration.

    Attributes:
        wall_seconds: between barriers.
        busy_seconds: per rank, of the processor; where emulated, in waits for compute.
        loss: of the global batch; 0 where emulated.
        action_seconds: per rank, processor seconds of every forward and backward; empty for peers and where emulated.
    """

    wall_seconds: float
    busy_seconds: tuple[float, ...]
    loss: float
    action_seconds: tuple[dict, ...] = ()

    @property
    def share_of_ideal(self) -> float:
        """Busy seconds over ranks times wall."""
        return sum(self.busy_seconds) / len(self.busy_seconds) / self.wall_seconds


class TimedExecutor(PipelineExecutor):
    """Notes the processor seconds of each action."""

    seconds: dict

    def _forward(self, unit, *arguments):
        return self._note(Forward(*unit), super()._forward, unit, *arguments)

    def _backward(self, unit, *arguments):
        return self._note(Backward(*unit), super()._backward, unit, *arguments)

    def _backward_input(self, unit, *arguments):
        return self._note(BackwardInput(*unit), super()._backward_input, unit, *arguments)

    def _backward_weight(self, unit, *arguments):
        return self._note(BackwardWeight(*unit), super()._backward_weight, unit, *arguments)

    def _note(self, action, function, *arguments):
        started = time.thread_time()
        result = function(*arguments)
        self.seconds[action] = time.thread_time() - started
        return result


class Worker:
    """One rank's side of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        plan = case.plan
        tied = tied_stages(case.model_folder, plan) if case.scale is None else ()
        self.groups = make_groups(plan, tied_stages=tied)
        executor, self.reader = None, None
        if case.scale is None:
            model = build_rank_model(case.model_folder, plan, self.groups.pipeline_rank, seed=0)
            self.reader = ChatReader.open(case.dataset, case.samples, case.model_folder)
            executor = TimedExecutor(model, self.groups, GradientReducer(model, self.groups))
        else:
            model = StandInModel(plan, plan.pipeline_shape.stages_of_rank(self.groups.pipeline_rank))
            executor = EmulatedExecutor(model, self.groups, scale=case.scale)
        self.runner = IterationRunner(model, self.groups, executor=executor)
        self.batches = {}

    def run(self, policy: str, rows: tuple[int, ...], schedule: str = "") -> tuple[float, float, float, dict]:
        """Wall and busy seconds, loss, processor seconds of every action; with another schedule than the plan's."""
        asked = (policy, rows, schedule)
        if asked not in self.batches:
            self.batches[asked] = RankBatchBuilder(
                samples=self.case.samples,
                reader=self.reader,
                family=None if self.reader is None else self.runner.executor.model.family,
                plan=replace(self.case.plan, policy=policy, schedule=schedule or self.case.plan.schedule),
                cost_model=self.case.costs,
                replica=self.groups.replica,
                pipeline_rank=self.groups.pipeline_rank,
            ).build(rows)
        self.runner.executor.seconds = seconds = {}
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        metrics = self.runner.train(self.batches[asked])
        computed = time.process_time() - cpu
        dist.barrier()
        wall = time.perf_counter() - started
        if self.case.scale is not None:
            computed = (1 - metrics.bubble_share) * metrics.iteration_seconds  # Waiting takes no CPU.
        return wall, computed, float(metrics.loss), seconds


class Ranks:
    """Processes for one case after the other; use as a context. A rank's failure is raised here with its traceback.

    Args:
        num_ranks: processes.
        worker: class of what serves a case on each rank: made from the case, then `run(*arguments)` for each trial.
    """

    def __init__(self, num_ranks: int, worker=Worker) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._asked = [context.Queue() for _ in range(num_ranks)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, num_ranks, port, worker, queue, self._answers), daemon=True)
            for rank, queue in enumerate(self._asked)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self):
        return self

    def begin(self, case) -> None:
        """Serve this case from now on."""
        self._ask(("begin", case))

    def run(self, *arguments) -> Timed:
        """One trial on all ranks."""
        walls, busy, losses, seconds = zip(*self._ask(("run", arguments)), strict=True)
        return Timed(wall_seconds=max(walls), busy_seconds=busy, loss=losses[0], action_seconds=seconds)

    def _ask(self, question):
        for queue in self._asked:
            queue.put(question)
        answers = {}
        while len(answers) < len(self._asked):
            rank, error, answer = self._answers.get(timeout=1200)
            if error:
                raise SystemExit(error)
            answers[rank] = answer
        return [answers[rank] for rank in range(len(self._asked))]

    def __exit__(self, *_) -> None:
        for queue in self._asked:
            queue.put(None)
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()


def _serve(rank, num_ranks, port, worker, asked, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    mine = None
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        while (question := asked.get()) is not None:
            what, content = question
            if what == "begin":
                mine = worker(content)
                answers.put((rank, None, None))
            else:
                answers.put((rank, None, mine.run(*content)))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, f"rank {rank} failed:\n{traceback.format_exc()}", None))
        raise
