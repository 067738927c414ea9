"""What the server of processes has imported and compiled before its first fork; see `server.py`."""

from importlib import import_module

from entrain_opt import BatchCosts, PipelineShape, assign_microbatches, simulate

for _name in (
    "ortools.sat.python.cp_model",
    "pandas",
    "pyarrow.parquet",
    "pytest",
    "pytorch_lightning.cli",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "transformers.models.siglip.modeling_siglip",
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
    "entrain_opt.cli.fit",
    "entrain_opt.cli.plan",
    "entrain_opt.cli.rehearse",
    "entrain_opt.planner.solve",
    "entrain_opt.planner.table",
    "entrain_opt.spec.huggingface",
    "entrain_opt.workload.index",
):
    import_module(_name)

# A first call reads compiled code from disk, which takes longer than the call.
_COSTS = BatchCosts(encoder_seconds=[1.0, 2, 3, 1], llm_seconds=[2.0, 1, 1, 3])
_SHAPE = PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=True)
simulate(_COSTS, assign_microbatches(_COSTS, _SHAPE, num_replicas=1), _SHAPE)
