"""`BalancedBatchSampler`: level work for teams that train without pipelines (DDP, FSDP, ZeRO).

Each epoch is a seeded permutation of the data set, cut into global batches of consecutive samples. Every rank splits
each global batch over the ranks in the same way (`split_jointly`: encoder and language-model work both level) and takes
its own part. Nothing is communicated.

Promise: every sample of an epoch exactly once over ranks and steps; the same global batches for every number of ranks,
so a run resumes under another; no rank is ever without samples. Price: one split per step, 20 to 40 ms for 4,096
samples over 32 ranks, made ahead of training wherever the loader prefetches.

A plain loop, with one process per rank (to resume, save `sampler.state_dict(step + 1)`)::

    sampler = BalancedBatchSampler(costs, global_batch_size=512, rank=rank, world_size=world_size)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=4, persistent_workers=True)
    for step, batch in enumerate(itertools.chain.from_iterable(loader for _ in range(num_epochs))):
        loss = ddp_model(batch) * sampler.loss_factor(step)  # the model returns the mean over its label tokens
        loss.backward(), optimizer.step(), optimizer.zero_grad()

Lightning, `Trainer(strategy="ddp", use_distributed_sampler=False)`; left at True, Lightning tries to shard once more.
To resume, save `sampler.state_dict(trainer.global_step)` in `on_save_checkpoint` and load it in `train_dataloader`::

    def train_dataloader(self):
        self.sampler = BalancedBatchSampler(costs, global_batch_size=512, rank=self.global_rank, world_size=...)
        return DataLoader(dataset, batch_sampler=self.sampler, collate_fn=collate)
    def training_step(self, batch, batch_idx):
        return self.model(batch) * self.sampler.loss_factor(self.trainer.global_step)

Hugging Face `Trainer`; the loader is returned as it is, because `accelerator.prepare` would shard it once more::

    def get_train_dataloader(self):
        sampler = BalancedBatchSampler(costs, global_batch_size=512, rank=self.args.process_index, world_size=...)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        loader.set_epoch = sampler.set_epoch  # so that the trainer, which counts epochs, resumes in the right one
        return loader

There the loss needs no factor if the model takes `num_items_in_batch`, as language models in Transformers do: with
`average_tokens_across_devices` (its default) the trainer itself divides by the label tokens of all ranks. For any other
model, multiply in `compute_loss` by `sampler.loss_factor(self.state.global_step)`. When it resumes, the trainer skips
the batches already done by itself, so the sampler's state must not be loaded as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from entrain_opt.assigner.replica_split import split_jointly
from entrain_opt.assigner.work import sample_work
from entrain_opt.assignment import BatchCosts, IntArray
from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape

# Every rank holds both modules, one after the other.
_ONE_RANK = PipelineShape(encoder_stages=1, llm_stages=1)
#: Splits remembered between drawing a batch and asking for its loss factor: more than loaders prefetch.
_REMEMBERED = 256
_STATE_VERSION = 1


class BalancedBatchSampler:
    """Lists of sample indices of one rank, one per optimizer step: a `batch_sampler` for `torch.utils.data.DataLoader`.

    A *step* is counted from the start of training, over all epochs: what training loops call the global step. Each pass
    over the sampler is one epoch, and the next pass is the next epoch; `set_epoch` chooses another.

    Args:
        costs: the whole data set, one sample per row; see `BatchCosts`. Seconds may be in any unit: only ratios count.
            `label_tokens` are those whose loss the model averages (after the shift, without ignored ones); without
            them `llm_tokens`, without those one per sample.
        global_batch_size: samples of one step over all ranks, at least `world_size`.
        rank, world_size: of the data-parallel group.
        seed: of the order; the same on every rank.
        shuffle: another order every epoch; False keeps the data set's order.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch. By default they form a
            smaller one, which must have a sample for every rank.
        max_tokens_per_rank: most `llm_tokens` of one rank in one step, against running out of memory.

    Raises:
        AssignmentError: an argument or a sample cannot work; the message names it.
    """

    def __init__(
        self,
        costs: BatchCosts,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        self.num_samples = costs.num_samples
        self.global_batch_size = _whole("global_batch_size", global_batch_size, least=1)
        self.world_size = _whole("world_size", world_size, least=1)
        self.rank = _whole("rank", rank, least=0)
        self.seed = _whole("seed", seed, least=0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.max_tokens_per_rank = max_tokens_per_rank
        # Media items of one sample go together, so sums per sample are all that a split needs.
        self._costs = BatchCosts(
            encoder_seconds=costs.encoder_seconds_per_sample, llm_seconds=costs.llm_seconds, llm_tokens=costs.tokens
        )
        self._label_tokens = costs.label_tokens if costs.label_tokens is not None else costs.tokens
        self._epoch = 0
        self._resumed = (0, 0)
        self._remembered: dict[int, tuple[list[int], float]] = {}
        self._order: tuple[int, IntArray] | None = None
        self._check_sizes()
        self._check_tokens(costs)

    def __len__(self) -> int:
        """Steps of a whole epoch, also where a resumed one has fewer left."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        first = self._resumed[1] if epoch == self._resumed[0] else 0
        for batch in range(first, len(self)):
            if batch == len(self) - 1:
                # Before the last batch is handed out: many loops know the length and never ask for one more.
                self._epoch = epoch + 1
            yield list(self._rank_batch(epoch * len(self) + batch)[0])

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: Lightning calls `set_epoch` on a batch sampler's `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch: all of it, or what is left of the one that `load_state_dict` leads into."""
        self._epoch = _whole("epoch", epoch, least=0)

    def global_batch(self, step: int) -> list[int]:
        """The samples of all ranks in that step; the same whatever the number of ranks."""
        epoch, batch = divmod(_whole("step", step, least=0), len(self))
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.num_samples)
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
            self._order = (epoch, order)
        found: list[int] = self._order[1][batch * self.global_batch_size :][: self.global_batch_size].tolist()
        return found

    def loss_factor(self, step: int) -> float:
        """What this rank's loss must be multiplied by so that averaged gradients are those of the global batch.

        Ranks have unequal numbers of label tokens, while DDP and FSDP average gradients as if they were equal. The
        factor is `world_size` * label tokens of this rank / label tokens of the step, for a loss that is the mean over
        this rank's label tokens; over ranks, factors average 1. It is right for one global batch per optimizer step: to
        accumulate several, make the global batch larger and cut each rank's list instead.

        Args:
            step: optimizer steps done before this one, since the first epoch.
        """
        return self._rank_batch(_whole("step", step, least=0))[1]

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """The position after that many steps, the same on every rank and for any number of ranks.

        Loaders draw batches ahead, so the sampler cannot know how many of them were trained on: the loop says it.

        Args:
            steps_done: optimizer steps since the first epoch, also after resuming.
        """
        epoch, batch = divmod(_whole("steps_done", steps_done, least=0), len(self))
        return {"version": _STATE_VERSION, "epoch": epoch, "batch": batch} | self._identity()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next pass goes on where the state was taken; call it before the loader is iterated.

        Raises:
            AssignmentError: the state is of other data or other global batches.
        """
        for name, expected in ({"version": _STATE_VERSION} | self._identity()).items():
            if state_dict.get(name) != expected:
                raise AssignmentError(
                    f"state_dict[{name!r}]: expected {expected!r} as in this sampler, found {state_dict.get(name)!r}. "
                    "Some samples would be seen twice or never: use the values of the run that saved it."
                )
        epoch = _whole("state_dict['epoch']", state_dict.get("epoch"), least=0)
        self._epoch = epoch
        self._resumed = (epoch, _whole("state_dict['batch']", state_dict.get("batch"), least=0))

    def _identity(self) -> dict[str, Any]:
        names = ("num_samples", "global_batch_size", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}

    def _rank_batch(self, step: int) -> tuple[list[int], float]:
        """This rank's samples of that step and its loss factor."""
        if step not in self._remembered:
            rows = np.array(self.global_batch(step))
            work = sample_work(self._costs.take(rows), _ONE_RANK)
            owner = split_jointly(work, self.world_size, token_limit=self.max_tokens_per_rank)
            self._check_owner(step, owner, work.tokens)
            mine = rows[owner == self.rank]
            labels = self._label_tokens[rows]
            factor = self.world_size * int(labels[owner == self.rank].sum()) / int(labels.sum())
            while len(self._remembered) >= _REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[step] = (mine.tolist(), factor)
        return self._remembered[step]

    def _check_sizes(self) -> None:
        if self.rank >= self.world_size:
            raise AssignmentError(f"rank: expected 0 to {self.world_size - 1} (world_size - 1), found {self.rank}.")
        if self.global_batch_size < self.world_size:
            raise AssignmentError(
                f"global_batch_size: expected at least one sample for each of {self.world_size} ranks, found "
                f"{self.global_batch_size}. A rank without samples would make the others wait forever."
            )
        rest = self.num_samples % self.global_batch_size
        if not self.num_samples or len(self) == 0:
            raise AssignmentError(
                f"costs: expected samples for at least one global batch of {self.global_batch_size}, found "
                f"{self.num_samples}."
            )
        if 0 < rest < self.world_size and not self.drop_last:
            raise AssignmentError(
                f"global_batch_size: the last global batch of an epoch would have {rest} of {self.num_samples} "
                f"samples, too few for {self.world_size} ranks. Set drop_last=True to leave them out, or choose "
                "another global_batch_size."
            )

    def _check_tokens(self, costs: BatchCosts) -> None:
        if self._label_tokens.min() < 1:
            sample = int(self._label_tokens.argmin())
            raise AssignmentError(
                f"label_tokens: expected at least 1 for every sample, found {self._label_tokens[sample]} for sample "
                f"{sample}. It trains nothing, and a rank with only such samples has no mean loss: leave it out."
            )
        if self.max_tokens_per_rank is None:
            return
        limit = _whole("max_tokens_per_rank", self.max_tokens_per_rank, least=1)
        if costs.llm_tokens is None:
            raise AssignmentError("max_tokens_per_rank: expected costs with llm_tokens, found none.")
        if costs.tokens.max() > limit:
            sample = int(costs.tokens.argmax())
            raise AssignmentError(
                f"sample {sample}: expected at most {limit} tokens (max_tokens_per_rank), found "
                f"{costs.tokens[sample]}. It fits on no rank: leave it out, shorten it, or raise max_tokens_per_rank."
            )

    def _check_owner(self, step: int, owner: IntArray, tokens: IntArray) -> None:
        if self.max_tokens_per_rank is None:
            return
        sums = np.bincount(owner, tokens, self.world_size)
        if sums.max() > self.max_tokens_per_rank:
            raise AssignmentError(
                f"max_tokens_per_rank: step {step} needs {sums.max():.0f} tokens on rank {sums.argmax()}, the limit is "
                f"{self.max_tokens_per_rank}; its {len(owner)} samples have {tokens.sum()} tokens for "
                f"{self.world_size} ranks. Lower global_batch_size, raise max_tokens_per_rank, or use more ranks."
            )


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise AssignmentError(f"{name}: expected a whole number of at least {least}, found {value!r}.")
    return int(value)
