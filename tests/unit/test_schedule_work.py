"""Units of work: nothing lost, parts only where gradients return, names as documented."""

import numpy as np
import pytest
from hypothesis import given, settings
from test_schedule_cases import cases

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import replica_work


@given(case=cases)
@settings(max_examples=80, deadline=None)
def test_every_item_once_and_every_source_known(case):
    costs, assignment, shape = case
    media, samples = [], []
    for replica in range(assignment.num_replicas):
        work = replica_work(costs, assignment, shape, replica)
        names = [(u.microbatch, u.encoder, u.part) for u in work.encoder_units]
        assert names == sorted(set(names))
        for position, unit in enumerate(work.encoder_units):
            assert (np.diff(unit.media) > 0).all()
            assert set(assignment.encoder_microbatch[unit.media]) == {unit.microbatch}
            needed = assignment.llm_microbatch[costs.media_sample[unit.media]]
            assert unit.consumers == tuple(sorted(set(needed.tolist())))
            if shape.encoder_has_backward(unit.encoder):
                assert len(unit.consumers) == 1
            for llm in work.llm_units:
                assert (position in llm.sources) == (llm.microbatch in unit.consumers)
            media += unit.media.tolist()
        for unit in work.llm_units:
            assert (np.diff(unit.samples) > 0).all()
            assert set(assignment.llm_microbatch[unit.samples]) == {unit.microbatch}
            samples += unit.samples.tolist()
    assert sorted(media) == list(range(costs.num_media))
    assert sorted(samples) == list(range(costs.num_samples))


def test_unknown_encoder():
    costs = BatchCosts(encoder_seconds=[1.0], llm_seconds=[1.0], media_encoder=[1])
    zero = np.zeros(1, dtype=int)
    assignment = Assignment(replica=zero, encoder_microbatch=zero, llm_microbatch=zero, num_microbatches=np.array([1]))
    with pytest.raises(ScheduleError, match=r"media_encoder: expected 0 to 0 .* found 1 for media item 0"):
        replica_work(costs, assignment, PipelineShape(), 0)
