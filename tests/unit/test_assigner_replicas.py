"""Splits over replicas."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.replicas import equal_blocks, split_by_llm_work, split_karmarkar_karp
from entrain_opt.assigner.work import sample_work
from entrain_opt.assignment import BatchCosts
from entrain_opt.plan import PipelineShape

SHAPE = PipelineShape(encoder_stages=1, llm_stages=1)


def work_of(encoder, llm):
    return sample_work(BatchCosts(encoder_seconds=np.array(encoder), llm_seconds=np.array(llm)), SHAPE)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=40),
    num_replicas=st.integers(1, 9),
)
def test_equal_counts_and_least_loaded_replica_first(rows, num_replicas):
    work = work_of(*np.array(rows).T)
    replica = split_by_llm_work(work, num_replicas)
    counts = np.bincount(replica, minlength=num_replicas)
    assert counts.max() - counts.min() <= 1
    # Replay: each sample went to the least loaded replica that could still take one.
    base, spare = divmod(len(rows), num_replicas)
    loads, taken = np.zeros(num_replicas), np.zeros(num_replicas, int)
    for sample in work.canonical_order:
        above = int((taken > base).sum())
        open_to = (taken < base) | ((taken == base) & (above < spare))
        assert replica[sample] == np.where(open_to, loads, np.inf).argmin()
        loads[replica[sample]] += work.llm_seconds[sample]
        taken[replica[sample]] += 1


def test_karmarkar_karp_levels_total_work_over_replicas():
    generator = np.random.default_rng(0)
    work = work_of(generator.lognormal(size=256), generator.lognormal(size=256))
    total = work.encoder_seconds + work.llm_seconds
    sums = np.bincount(split_karmarkar_karp(work, 8), weights=total)
    assert sums.max() <= 1.001 * sums.mean()


def test_equal_blocks():
    assert equal_blocks(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert equal_blocks(1, 3).tolist() == [0]
