"""What others would run on the same samples: padded rows, under DDP or torch.distributed.pipelining.

Both train the plain Hugging Face model with SDPA, on the same weights, samples and label tokens as our side: the loss
printed by the benchmark is the same number. Samples are read before the clock starts. DDP synchronises once per global
batch (`no_sync` for all microbatches but the last). Pipelining needs one shape for all microbatches, so rows are padded
to the longest of the global batch; images are not padded, since the first stage looks them up itself.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from entrain_opt import BalancedBatchSampler
from entrain_opt.plan import Plan
from entrain_opt.runtime.reader import ChatReader

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class PeerCase:
    """What peers need to know.

    Attributes:
        model_folder, dataset, samples: of the run.
        plan, costs: of our side; pipelining cuts the model at the same layer.
        microbatch_size: samples of a padded microbatch.
    """

    model_folder: str
    dataset: str
    samples: object
    plan: Plan
    costs: object
    microbatch_size: int


class Peer:
    """Reads samples and builds the plain model with our initial weights."""

    #: Whether the first step with new shapes costs what later ones do not, and is left out.
    agrees_on_shapes = False

    def __init__(self, case: PeerCase) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        from entrain_opt.plan import ParallelDegrees
        from entrain_opt.runtime.stages import build_rank_model

        self.case = case
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.reader = ChatReader.open(case.dataset, case.samples, case.model_folder)
        whole = Plan(
            model=case.model_folder,
            degrees=ParallelDegrees(),
            stages=tuple(_on_one_rank(case.plan)),
            global_batch_size=1,
            num_microbatches=1,
        )
        weights = build_rank_model(case.model_folder, whole, 0, seed=0).model.state_dict()
        self.model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(case.model_folder), attn_implementation="sdpa"
        )
        self.model.load_state_dict(weights)

    def padded(self, rows, length=None):
        """(ids, mask, labels), each [samples, length], and the tiles of all images of these samples (or None)."""
        texts = [self.reader.text(row) for row in rows]
        length = length or max(len(text.input_ids) for text in texts)
        ids = np.zeros((len(rows), length), dtype=np.int64)
        mask, labels = np.zeros_like(ids), np.full_like(ids, IGNORED)
        for place, text in enumerate(texts):
            count = len(text.input_ids)
            ids[place, :count], mask[place, :count], labels[place, :count] = text.input_ids, 1, text.label_ids
        offsets = self.case.samples.media_offsets
        tiles = [self.reader.pixels(row, item) for row in rows for item in range(offsets[row + 1] - offsets[row])]
        return (*map(torch.from_numpy, (ids, mask, labels)), torch.cat(tiles) if tiles else None)

    def label_tokens(self, rows) -> int:
        return int(self.case.samples.label_tokens[list(rows)].sum())

    def run(self, side: str, rows: tuple[int, ...]) -> tuple[float, float, float, dict]:
        """Wall and processor seconds, loss of the global batch; no seconds of actions."""
        prepared = self.prepare(side, rows)
        if self.agrees_on_shapes:
            self.step(prepared)
        # Every side makes its gradients anew, as ours does.
        self.model.zero_grad()
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        loss = self.step(prepared)
        computed = time.process_time() - cpu
        dist.barrier()
        wall = time.perf_counter() - started
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return wall, computed, float(total), {}


class DdpPeer(Peer):
    """Data parallel: `padding` (in order), `length grouping` (sorted, dealt out), `balanced` (our sampler)."""

    def __init__(self, case: PeerCase) -> None:
        super().__init__(case)
        # A last microbatch without images reaches no parameter of the tower.
        self.ddp = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)

    def prepare(self, side, rows):
        size, lengths = self.case.microbatch_size, self.case.samples.total_tokens
        if side == "length grouping":
            ordered = sorted(rows, key=lambda row: -lengths[row])
            chunks = [ordered[i : i + size] for i in range(0, len(ordered), size)][self.rank :: self.num_ranks]
        else:
            mine = list(rows[self.rank :: self.num_ranks])
            if side == "balanced":
                batch = self.case.samples.take(np.array(rows))
                sampler = BalancedBatchSampler(
                    self.case.costs.batch_costs(batch, self.case.plan),
                    global_batch_size=len(rows),
                    rank=self.rank,
                    world_size=self.num_ranks,
                    shuffle=False,
                )
                mine = sorted((rows[i] for i in next(iter(sampler))), key=lambda row: -lengths[row])
            chunks = [mine[i : i + size] for i in range(0, len(mine), size)]
        return [self.padded(chunk) for chunk in chunks], self.label_tokens(rows)

    def step(self, prepared) -> float:
        batches, label_tokens = prepared
        total = 0.0
        for place, (ids, mask, labels, tiles) in enumerate(batches):
            last = place == len(batches) - 1
            with nullcontext() if last else self.ddp.no_sync():
                output = self.ddp(input_ids=ids, attention_mask=mask, pixel_values=tiles)
                loss = nn.functional.cross_entropy(
                    output.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                # DDP takes the mean over ranks.
                (loss * (self.num_ranks / label_tokens)).backward()
            total += float(loss.detach()) / label_tokens
        return total


class PipeliningPeer(Peer):
    """`Schedule1F1B` over two stages: tower, projector and first layers; other layers and head."""

    agrees_on_shapes = True

    def prepare(self, side, rows):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        size = self.case.microbatch_size
        length = int(self.case.samples.total_tokens[list(rows)].max())
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = [self.padded(chunk, length) for chunk in chunks]
        ids, _, labels, _ = (None if i == 3 else torch.cat([batch[i] for batch in batches]) for i in range(4))
        cut = sum(stage.num_layers for stage in self.case.plan.stages if stage.module == "llm" and stage.rank == 0)
        tiles = {tuple(batch[0].flatten().tolist()): batch[3] for batch in batches}
        part = FirstStage(self.model, cut, tiles) if self.rank == 0 else LastStage(self.model, cut)
        label_tokens = self.label_tokens(rows)

        def loss_share(logits, target):
            flat = logits.flatten(0, 1).float()
            return (
                nn.functional.cross_entropy(flat, target.flatten(), ignore_index=IGNORED, reduction="sum")
                / label_tokens
            )

        stage = PipelineStage(part, self.rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=len(chunks), loss_fn=loss_share, scale_grads=False)
        return schedule, ids, labels

    def step(self, prepared) -> float:
        schedule, ids, labels = prepared
        if self.rank == 0:
            schedule.step(ids)
            return 0.0
        losses = []
        schedule.step(target=labels, losses=losses)
        return float(sum(loss.detach() for loss in losses))


class FirstStage(nn.Module):
    """Ids -> hidden states behind the first language-model layers."""

    def __init__(self, model, num_layers, tiles):
        super().__init__()
        self.model, self.num_layers, self.tiles = model, num_layers, tiles

    def forward(self, ids):
        inner = self.model.model
        hidden = inner.language_model.embed_tokens(ids)
        tiles = self.tiles[tuple(ids.flatten().tolist())]
        if tiles is not None:
            features = torch.cat(inner.get_image_features(pixel_values=tiles, return_dict=True).pooler_output)
            where = (ids == self.model.config.image_token_id).unsqueeze(-1).expand_as(hidden)
            hidden = hidden.masked_scatter(where, features)
        return _layers(inner.language_model, hidden, 0, self.num_layers)


class LastStage(nn.Module):
    """Hidden states -> logits."""

    def __init__(self, model, first_layer):
        super().__init__()
        self.model, self.first_layer = model, first_layer

    def forward(self, hidden):
        language_model = self.model.model.language_model
        hidden = _layers(language_model, hidden, self.first_layer, len(language_model.layers))
        return self.model.lm_head(language_model.norm(hidden))


def _layers(language_model, hidden, first, end):
    """Causal attention over right-padded rows: padding comes last, so no real token sees it."""
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    rotary = language_model.rotary_emb(hidden, position_ids=positions)
    for layer in language_model.layers[first:end]:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions, use_cache=False)
    return hidden


def _on_one_rank(plan):
    from entrain_opt.plan import StagePlan

    for module in (*plan.encoder_modules, "llm"):
        end = max(stage.layers[1] for stage in plan.stages if stage.module == module)
        yield StagePlan(module=module, layers=(0, end), rank=0)
