"""`MultimodalDataModule`: a chat dataset, drawn in global batches that every rank sees alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.ahead import AheadLoader
from entrain_opt.runtime.batches import RankBatch, RankBatchBuilder, SampleReader
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.unreadable import SkippingReader
from entrain_opt.workload.formats import is_trace
from entrain_opt.workload.samples import SampleTable


class GlobalBatchDataset(Dataset[RankBatch]):
    """Maps the rows of a global batch to what this rank needs of it."""

    def __init__(self, builder: RankBatchBuilder) -> None:
        self.builder = builder

    def __len__(self) -> int:
        return len(self.builder.samples)

    def __getitem__(self, rows: Sequence[int]) -> RankBatch:
        batch, reader = self.builder.build(rows), self.builder.reader
        return replace(batch, decoded=reader.take(rows)) if isinstance(reader, SkippingReader) else batch


class GlobalBatchSampler(DistributedSampler[Sequence[int]]):
    """Rows of each global batch, the same on every rank, reshuffled every epoch, resumable anywhere.

    The position is global (epoch and batches done in it), so a run resumes under any number of ranks. It derives from
    `DistributedSampler` because Lightning calls `set_epoch` on those, and otherwise leaves them alone whatever
    `use_distributed_sampler` says.

    Args:
        num_samples: rows of the table.
        batch_size: samples of one global batch; the last one of an epoch may be smaller.
        seed: of the order.
        shuffle: another order every epoch; False keeps the table's order.
        start: (epoch, batches already done in it).
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int, shuffle: bool, start: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(range(num_samples), num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.num_rows = num_samples
        self.batch_size = batch_size
        self.start = start
        # With loader processes the first batches are drawn before Lightning sets the epoch.
        self.set_epoch(start[0])

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Sequence[int]]:
        order = np.arange(self.num_rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
        first = self.start[1] if self.epoch == self.start[0] else 0
        for batch in range(first, len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


class MultimodalDataModule(pl.LightningDataModule):
    """A dataset of conversations, read by row, only what each rank needs.

    Args:
        dataset: training data: a JSONL or Parquet file, a pattern of such files, a folder of Parquet shards or a saved
            Hugging Face dataset.
        global_batch_size: samples of one optimizer step, over all replicas.
        validation_dataset: None for no validation.
        bad_samples: `error` names all bad samples and stops; `skip` leaves them out and prints how many, also those
            that turn out to be unreadable behind their headers while training, whose label tokens then leave the loss
            on every rank.
        num_workers: loader processes per rank; assignments are computed there, ahead of training. 0: a background
            thread works one batch ahead.
        shuffle: reshuffle the training data every epoch.
        seed: of the order.
    """

    def __init__(
        self,
        dataset: str,
        global_batch_size: int,
        validation_dataset: str | None = None,
        bad_samples: str = "error",
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.validation_dataset = validation_dataset
        self.global_batch_size = global_batch_size
        self.bad_samples = bad_samples
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self._start = (0, 0)

    def check(self, *, emulated: bool = False) -> None:
        """Raise RuntimeConfigError for arguments that cannot train; an emulated run needs sizes only.

        Not in the constructor, where the command line would bury the message in its own.
        """
        if self.global_batch_size < 1:
            raise RuntimeConfigError(f"data.global_batch_size: expected at least 1, found {self.global_batch_size}.")
        for path in (self.dataset, self.validation_dataset):
            if path is not None and not emulated and is_trace(path):
                raise RuntimeConfigError(
                    f"data: {path} is a trace of sizes without content; expected conversations (JSONL, Parquet or a "
                    "Hugging Face dataset). Traces serve `entrain plan`, `simulate`, `report` and `rehearse`."
                )

    def _loader(self, path: str, samples: SampleTable, sampler: GlobalBatchSampler) -> DataLoader[RankBatch]:
        trainer: Any = self.trainer
        strategy, module = trainer.strategy, trainer.lightning_module
        reader: SampleReader | None = None
        family = None
        if not strategy.rehearsal:
            content = ChatReader.open(path, samples, module.model_folder, cache_dir=strategy.cache_dir)
            reader, family = content, content.family
            if self.bad_samples == "skip":
                reader = SkippingReader(content, samples)
        builder = RankBatchBuilder(
            samples=samples,
            reader=reader,
            family=family,
            plan=strategy.plan,
            cost_model=strategy.cost_model,
            replica=strategy.groups.replica,
            pipeline_rank=strategy.groups.pipeline_rank,
            keeps_timeline=bool(strategy.trace_steps) and strategy.groups.is_first_of_replica,
        )
        return AheadLoader(
            GlobalBatchDataset(builder),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader[RankBatch]:
        trainer: Any = self.trainer
        samples, batch_size = trainer.strategy.samples, trainer.strategy.plan.global_batch_size
        sampler = GlobalBatchSampler(len(samples), batch_size, seed=self.seed, shuffle=self.shuffle, start=self._start)
        return self._loader(self.dataset, samples, sampler)

    def val_dataloader(self) -> DataLoader[RankBatch] | list[Any]:
        if self.validation_dataset is None:
            return []
        from entrain_opt.workload.index import load_index

        trainer: Any = self.trainer
        samples = load_index(
            self.validation_dataset,
            trainer.lightning_module.model_folder,
            policy="skip" if self.bad_samples == "skip" else "error",
            cache_dir=trainer.strategy.cache_dir,
            progress=False,
        )
        batch_size = trainer.strategy.plan.global_batch_size
        sampler = GlobalBatchSampler(len(samples), batch_size, seed=self.seed, shuffle=False)
        return self._loader(self.validation_dataset, samples, sampler)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data: the epoch, and the global batches of it whose step is done."""
        trainer: Any = self.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        epoch, batches = divmod(done, max(1, int(trainer.num_training_batches)))
        position = {"epoch": epoch, "batches": batches, "num_samples": len(trainer.strategy.samples)}
        return {**position, "seed": self.seed, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("seed", "global_batch_size"):
            if state_dict[name] != getattr(self, name):
                raise RuntimeConfigError(
                    f"data.{name}: the checkpoint was made with {state_dict[name]}, this run uses "
                    f"{getattr(self, name)}, so some samples would be seen twice or never. Use the checkpoint's value."
                )
        trainer: Any = self.trainer
        num_samples = len(trainer.strategy.samples)
        if state_dict["num_samples"] != num_samples:
            raise RuntimeConfigError(
                f"data.dataset: the checkpoint was made with {state_dict['num_samples']} samples, this run has "
                f"{num_samples}, so the position in the data means nothing. Use the same data, or `entrain export` the "
                "checkpoint and start a new run from that folder."
            )
        self._start = (state_dict["epoch"], state_dict["batches"])
