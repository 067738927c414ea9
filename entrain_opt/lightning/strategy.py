"""`EntrainStrategy`: Lightning's hooks, each delegating to the runtime."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from entrain_opt.errors import EntrainError, RuntimeConfigError
from entrain_opt.lightning.emulation import Emulation, Rehearsal, rehearse
from entrain_opt.lightning.failures import FailureBoard, PeerFailure
from entrain_opt.lightning.flags import check_loader, check_trainer
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.lightning.own_callbacks import add_callbacks, check_options
from entrain_opt.lightning.precision import plugin_of_stages
from entrain_opt.lightning.preemption import Preempted
from entrain_opt.lightning.resolution import resolution_of, resolve_run
from entrain_opt.plan import Plan, to_plain
from entrain_opt.planner.options import PlanOptions, device_options
from entrain_opt.planner.resolve import Resolution
from entrain_opt.runtime import checkpoint as checkpoints
from entrain_opt.runtime.checkpoint_files import find
from entrain_opt.runtime.checkpoint_writer import CheckpointWriter
from entrain_opt.runtime.emulation import EmulatedExecutor, StandInModel
from entrain_opt.runtime.p2p import PipelineGroups, make_groups
from entrain_opt.runtime.rank_work import CostSource
from entrain_opt.runtime.stages import RankModel, tied_stages
from entrain_opt.runtime.trained import check_divisible
from entrain_opt.runtime.unreadable import leave_out
from entrain_opt.runtime.waiting import PeerLost, WaitLog
from entrain_opt.units import GIB
from entrain_opt.workload.samples import SampleTable

if TYPE_CHECKING:
    from entrain_opt.lightning.module import MultimodalModule


class EntrainStrategy(DDPStrategy):
    """Executes a plan: pipeline stages and data-parallel replicas, packed microbatches, exact gradients.

    Args:
        plan: `auto` solves one (cached), or the path of a plan file.
        policy: of the assigner.
        schedule: order of a replica's work; `auto` lets the planner choose between `eager` and `eager_split`.
        method: solver of the planner.
        cost_model: `measured` or `analytic`.
        data_degree, pipeline_degree, num_microbatches: fixed by you; None is searched.
        tensor_degrees: how many devices may share a module's layers (tensor parallelism); None is 1 only.
        context_degrees: over how many a module's samples may be divided; None is 1 only, and others cannot be trained.
        recompute: whether layers keep their input only and run forward again in the backward pass: `never`,
            `search` (per module, where memory asks for it) or `always`.
        data_parallel: `all_reduce`, `sharded` (replicas share out the optimizer's state), or `search` (where needed).
        device: name of the device in the catalogue, a cluster file (`.yaml`), or a device described in place; None
            takes `cpu` on a CPU, and must be given on a GPU.
        memory_gib: what one rank may use; None takes the device's memory less a reserve.
        time_limit_seconds: of the solver.
        seed: of the solver.
        solver_workers: threads of the solver, 1 or 2; the plan does not depend on it.
        nonfinite: `error`, or `skip` a step whose loss or gradient is not finite and count it.
        emulate: wait for predicted times instead of computing, to rehearse a plan; see `Emulation`.
        timeout_seconds: of a message between ranks; the run ends when one takes longer.
        watchdog_seconds: a wait for another rank of this length is reported, with what it waits for.
        async_checkpoints: write checkpoints in the background, from a copy in host memory.
        trace_steps: steps of which a measured trace is written, numbered from 0 as in the logged metrics.
        drift_check_steps: steps between two looks at whether the data has drifted and another plan would be better; 0
            for none.
        cache_dir: for indexes, measured costs and plans.
    """

    strategy_name = "entrain"

    def __init__(
        self,
        plan: str = "auto",
        policy: str = "auto",
        schedule: str = "auto",
        method: str = "cp-sat",
        cost_model: str = "measured",
        data_degree: int | None = None,
        pipeline_degree: int | None = None,
        num_microbatches: int | None = None,
        tensor_degrees: list[int] | None = None,
        context_degrees: list[int] | None = None,
        recompute: str = "never",
        data_parallel: str = "search",
        device: str | dict[str, Any] | None = None,
        memory_gib: float | None = None,
        time_limit_seconds: float = 20.0,
        seed: int = 0,
        solver_workers: int = 1,
        nonfinite: str = "error",
        emulate: Emulation | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 60.0,
        async_checkpoints: bool = False,
        trace_steps: list[int] | None = None,
        drift_check_steps: int = 100,
        cache_dir: str = "runs/cache",
    ) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_seconds))
        self.timeout_seconds = timeout_seconds
        self.watchdog_seconds = watchdog_seconds
        self.plan_source = plan
        self.nonfinite = nonfinite
        self.emulate = emulate
        self.async_checkpoints = async_checkpoints
        self.trace_steps = list(trace_steps or ())
        self.drift_check_steps = drift_check_steps
        self.cache_dir = cache_dir
        self._option_values: dict[str, Any] = {
            "policy": policy,
            "schedule": schedule,
            "method": method,
            "cost_model": cost_model,
            "data_degree": data_degree,
            "pipeline_degree": pipeline_degree,
            "num_microbatches": num_microbatches,
            "tensor_degrees": tuple(tensor_degrees or (1,)),
            "context_degrees": tuple(context_degrees or (1,)),
            "recompute": recompute,
            "data_parallel": data_parallel,
            "memory_bytes": None if memory_gib is None else int(memory_gib * GIB),
            "time_limit_seconds": time_limit_seconds,
            "seed": seed,
            "solver_workers": solver_workers,
        }
        self._device = device or "cpu"
        self.plan_options: PlanOptions | None = None
        """Instead of those that the arguments say; for callers who have read a recipe already."""
        self._resolution: Resolution | None = None
        self.rehearsal: Rehearsal | None = None
        self._groups: PipelineGroups | None = None
        self._runner: IterationRunner | None = None
        self._failures: FailureBoard | None = None
        self._writer: CheckpointWriter | None = None

    # What the module and data module ask for.

    @property
    def options(self) -> PlanOptions:
        """What the recipe asks of the planner."""
        if self.plan_options is not None:
            return self.plan_options
        found = device_options(self._device)
        given = {name: value for name, value in self._option_values.items() if value is not None}
        return PlanOptions(**(found | given), precision=str(self.precision_plugin.precision))

    @property
    def resolution(self) -> Resolution:
        """Plan, samples and cost model; after `setup_environment`."""
        if self._resolution is None:
            raise RuntimeError("EntrainStrategy.resolution exists once trainer.fit() or validate() has started.")
        return self._resolution

    @property
    def planned_nodes(self) -> tuple[int, int]:
        """Machines that the plan is for, and devices of each."""
        asked = self.emulate or Emulation()
        return asked.num_nodes or self.num_nodes, asked.devices_per_node or self.num_processes

    @property
    def plan(self) -> Plan:
        """What the ranks execute: the resolved plan, or the part of it that is rehearsed."""
        return self.rehearsal.plan if self.rehearsal is not None else self.resolution.plan

    @property
    def samples(self) -> SampleTable:
        return self.resolution.samples

    @property
    def cost_model(self) -> CostSource:
        return self.rehearsal.costs if self.rehearsal is not None else self.resolution.costs

    @property
    def groups(self) -> PipelineGroups:
        if self._groups is None:
            raise RuntimeError("EntrainStrategy.groups exist once trainer.fit() or validate() has started.")
        return self._groups

    @property
    def runner(self) -> IterationRunner:
        if self._runner is None:
            raise RuntimeError("EntrainStrategy.runner exists once EntrainStrategy.setup() has run.")
        return self._runner

    @property
    def writer(self) -> CheckpointWriter:
        if self._writer is None:
            raise RuntimeError("EntrainStrategy.writer exists once EntrainStrategy.setup() has run.")
        return self._writer

    def process_dataloader(self, dataloader: object) -> object:
        check_loader(dataloader)
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.writer.check()
        return leave_out(super().batch_to_device(batch, device, dataloader_idx), self.groups.waits)

    @property
    def _module(self) -> MultimodalModule:
        if self.lightning_module is None:
            raise RuntimeError("EntrainStrategy knows its module once trainer.fit() or validate() has started.")
        return cast("MultimodalModule", self.lightning_module)

    @property
    def _rank_model(self) -> RankModel:
        model = self._module.rank_model
        if model is None:
            raise RuntimeError("EntrainStrategy has stages once MultimodalModule.configure_model() has run.")
        return model

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank draws the same global batch."""
        return {"num_replicas": 1, "rank": 0}

    # Lightning's hooks.

    def setup_environment(self) -> None:
        super().setup_environment()
        self.precision_plugin = plugin_of_stages(self.precision_plugin)
        waits = self._waits = WaitLog()
        self._failures = FailureBoard(
            self.global_rank,
            self.world_size,
            waits=waits,
            watchdog_seconds=self.watchdog_seconds,
            end_children=self._end_children,
        )
        trainer = self._module.trainer
        self._agree(lambda: check_options(self))
        add_callbacks(self, trainer)
        self._agree(lambda: check_trainer(trainer, emulated=self.emulate is not None))
        found = self._agree(lambda: resolve_run(self, trainer, self._module))
        content = [None if found is None else (found.plan, found.costs.measured)]
        dist.broadcast_object_list(content, src=0)
        assert content[0] is not None
        self._resolution = found or resolution_of(self, trainer, self._module, *content[0])
        tied: tuple[int, ...] = ()
        if self.emulate is not None:
            self.rehearsal = rehearse(self.emulate, self.resolution.plan, self.resolution.costs, self.samples)
            self.plan.degrees.check(self.world_size)
        else:
            tied = tied_stages(self._module.model_folder, self.plan)
        self._groups = make_groups(self.plan, tied_stages=tied, timeout_seconds=self.timeout_seconds, waits=waits)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._writer = CheckpointWriter(background=self.async_checkpoints)
        executor = None
        if self.rehearsal is not None:
            assert isinstance(self._rank_model, StandInModel)
            executor = EmulatedExecutor(self._rank_model, self.groups, scale=self.rehearsal.scale)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._rank_model.keep_masters(self.groups)
        self._runner = IterationRunner(self._rank_model, self.groups, nonfinite=self.nonfinite, executor=executor)
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_divisible(optimizer, self.plan)
                optimizer.register_step_post_hook(lambda *_: self._rank_model.masters.write_back())
        self.setup_precision_plugin()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The gradients were made in `training_step`; put them back and run the hooks around a backward."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.runner.restore_gradients()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    # Checkpoints: tensors by Hugging Face name through torch.distributed.checkpoint, the rest beside them.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # Written by `save_checkpoint`, by Hugging Face name.

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # Written by `save_checkpoint`, by Hugging Face name.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.emulate is not None:
            raise RuntimeConfigError(f"emulate: an emulated run has no weights to write to {filepath}.")
        writer = self._writer or CheckpointWriter(background=False)  # After a run, trainer.save_checkpoint still works.
        waits = self.groups.waits.on(f"every rank to write its part of checkpoint {filepath}")
        with waits:
            writer.wait()
        snapshot = checkpoints.take_snapshot(
            self._rank_model,
            self.optimizers if "optimizer_states" in checkpoint else [],
            meta=checkpoint,
            model_folder=Path(self._module.model_folder),
            plan=to_plain(self.plan),
            copy=writer.background,
        )
        with waits:
            writer.save(Path(filepath), snapshot)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.wait()
        self._checkpoint_path = find(Path(checkpoint_path))
        return checkpoints.load_meta(self._checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        checkpoints.load_model(self._checkpoint_path, self._rank_model)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.load_optimizers(self._checkpoint_path, self._rank_model, self.optimizers, checkpoint)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self.writer.remove(Path(filepath))

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why, end the processes that this one started, and name a peer that failed first.

        Raises:
            PeerFailure: this rank only lost the connection to a rank that failed; the message has that rank's error.
        """
        if isinstance(exception, Preempted):
            return  # Every rank ends at the same point, by itself.
        reason = None
        if self._failures is not None:
            # A lost connection shows as a RuntimeError where PyTorch or Lightning waits for the others.
            if isinstance(exception, (PeerLost, RuntimeError)):
                reason = self._failures.reason()
            if reason is None:
                self._failures.tell(exception)
        self._end_children()
        if reason is not None:
            waited = f" {exception}" if isinstance(exception, PeerLost) else ""
            raise PeerFailure(f"stopped because another rank failed first. {reason}.{waited}") from exception

    def _end_children(self) -> None:
        """End the processes that this one started; none under torchrun or SLURM."""
        if self.launcher is not None and hasattr(self.launcher, "kill"):
            self.launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        self._runner = None
        if self._writer is not None and self._module.trainer.state.status != TrainerStatus.INTERRUPTED:
            with self.groups.waits.on("every rank to write its part of the last checkpoint"):
                self._writer.wait()
        self._writer = None
        if self._failures is not None:
            self._failures.close()
        super().teardown()

    def request_stop(self) -> None:
        """End after the current step; before setup and after the run there is nothing to end."""
        if self._runner is not None:
            self._runner.stop_requested = True

    def _agree(self, work: Any) -> Any:
        """Run `work` on rank 0 only; every rank raises its error. Other ranks get None."""
        outcome: list[EntrainError | None] = [None]
        found = None
        if self.is_global_zero:
            try:
                found = work()
            except EntrainError as error:
                outcome = [error]
        with self._waits.on("the first rank to check the run and find its plan"):
            dist.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise outcome[0] if self.is_global_zero else PeerFailure(str(outcome[0]))
        return found


# Referenced by Lightning's registry so that `strategy: entrain` works in a recipe and in code.
def register_strategy() -> None:
    """Make `Trainer(strategy="entrain")` work; calling it again changes nothing."""
    from pytorch_lightning.strategies import StrategyRegistry

    if EntrainStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(EntrainStrategy.strategy_name, EntrainStrategy, description=EntrainStrategy.__doc__)


register_strategy()
