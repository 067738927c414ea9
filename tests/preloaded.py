"""What the server of processes imports and has compiled before its first fork; see `server.py`."""

from entrain_opt import BatchCosts, PipelineShape, assign_microbatches, simulate

_COSTS = BatchCosts(encoder_seconds=[1.0, 2, 3, 1], llm_seconds=[2.0, 1, 1, 3])
_SHAPE = PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=True)
simulate(_COSTS, assign_microbatches(_COSTS, _SHAPE, num_replicas=1), _SHAPE)
