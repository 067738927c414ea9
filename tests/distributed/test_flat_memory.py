"""Host memory stays flat over many steps of reading ahead and training; `benchmarks/loader_memory.py` runs 2,000."""

import gc
from pathlib import Path

import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, write_model
from ranks import run_ranks

from entrain_opt.cost import CostModel
from entrain_opt.lightning.ahead import AheadLoader
from entrain_opt.lightning.datamodule import GlobalBatchDataset, GlobalBatchSampler
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.spec import ClusterSpec, ModelSpec

WARM_UP, STEPS = 200, 360


def resident_kib():
    """Of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def train(folder):
    """(KiB, tensors) after the warm-up and after all steps."""
    plan = make_plan(folder, SPLITS[1], num_microbatches=2)
    model = build_rank_model(plan.model, plan, 0, seed=3)
    reader = SyntheticReader(MIXED_TILES * 4)
    samples = reader.table()
    builder = RankBatchBuilder(
        samples=samples, reader=reader, family=model.family, plan=plan,
        cost_model=CostModel(ModelSpec.from_pretrained(plan.model), ClusterSpec(device="cpu")),
        replica=0, pipeline_rank=0,
    )  # fmt: skip
    sampler = GlobalBatchSampler(len(samples), 4, seed=0, shuffle=True)
    runner = IterationRunner(model, make_groups(plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = AheadLoader(GlobalBatchDataset(builder), batch_size=None, sampler=sampler, num_workers=0)
    found = []
    step = 0
    while step < STEPS:
        sampler.set_epoch(step)
        for batch in loader:
            runner.train(batch)
            optimizer.zero_grad()
            runner.restore_gradients()
            optimizer.step()
            step += 1
            if step in (WARM_UP, STEPS):
                del batch
                gc.collect()
                found.append((resident_kib(), sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())))
    return found


def test_memory_after_the_warm_up_is_that_of_the_last_step(tmp_path):
    """Not one tensor is kept; a fifth of every batch's pixels would be more than the bound.

    In a process of its own: what other tests have left behind comes and goes.
    """
    model = write_model(tmp_path / "plain")
    (found,) = run_ranks(train, 1, model, timeout_seconds=300, new_interpreters=True)
    (first, tensors), (last, tensors_later) = found
    # The batch that is being made ahead may hold a few tensors more or less.
    assert abs(tensors_later - tensors) < 60
    assert last - first < 4096
