"""Plans that are made for comparing only are refused by every rank, before anything is read, built or sent."""

import json
from dataclasses import replace

import pytest
import torch
from cases import SPLITS, make_plan, write_model
from processes import run_ranks_to_end
from small import write_run

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.planner import PlanOptions
from entrain_opt.runtime.executable import check_executable, executable_options
from entrain_opt.runtime.lora import Lora
from entrain_opt.runtime.p2p import make_groups

STAGES = (StagePlan(module="vision", layers=(0, 2), rank=0), StagePlan(module="llm", layers=(0, 2), rank=0))
DIVIDED = Plan(
    model="model", degrees=ParallelDegrees(context=2), stages=STAGES, global_batch_size=4, num_microbatches=2
)


def fit_divided_plan():
    """Every rank trains on a plan file, from Python; says what stopped it."""
    import pytorch_lightning as pl

    from entrain_opt import EntrainStrategy, MultimodalDataModule, MultimodalModule
    from entrain_opt.errors import EntrainError

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=EntrainStrategy(cost_model="analytic", plan="divided.yaml"),
    )  # fmt: skip
    try:
        # The data is not there: the plan is refused before anyone looks for it.
        trainer.fit(MultimodalModule("model"), datamodule=MultimodalDataModule("nowhere.jsonl", global_batch_size=4))
    except EntrainError as error:
        print(f"refused: {error}")
        return 7
    return 0


def test_every_rank_refuses_a_plan_that_divides_samples(tmp_path):
    recipe = write_run(tmp_path)
    DIVIDED.write(tmp_path / "divided.yaml")
    for rank in run_ranks_to_end(tmp_path, recipe, program=fit_divided_plan):
        assert rank.code == 7, rank.text
        assert "degrees.context: expected 1, found 2 for module vision and 2 for module llm." in rank.text
        assert "Make a plan with context_degrees: [1] to train." in rank.text


@pytest.mark.parametrize(
    ("context", "message"),
    [(2, "found 2 for module vision and 2 for module llm"), ((1, 4), r"found 4 for module llm\.")],
)
def test_groups_are_not_made_and_models_not_divided(context, message, tmp_path):
    folder = write_model(tmp_path / "plain")
    plan = make_plan(folder, SPLITS[2])
    check_executable(folder, plan)
    divided = replace(plan, degrees=replace(plan.degrees, context=context))
    for refuse in (make_groups, lambda plan: check_executable(folder, plan)):
        with pytest.raises(RuntimeConfigError, match=f"degrees.context: expected 1, {message}"):
            refuse(divided)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model whose language model has experts, which no degree divides."""
    folder = write_model(tmp_path_factory.mktemp("mixture") / "model")
    config = json.loads((folder / "config.json").read_text())
    experts = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    config["text_config"] = {**config["text_config"], **experts}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plain") / "model")


WIDE = PlanOptions(tensor_degrees=(1, 2, 64), context_degrees=(1, 2), data_parallel="search")


def test_the_planner_chooses_among_what_runs(plain, mixture):
    found = executable_options(WIDE, plain, make_optimizer=torch.optim.AdamW)
    assert found == replace(WIDE, tensor_degrees=(1, 2), context_degrees=(1,))  # Two key-value heads: 64 is too many.
    assert executable_options(WIDE, mixture, make_optimizer=torch.optim.AdamW).tensor_degrees == (1,)
    whole = executable_options(WIDE, plain, make_optimizer=torch.optim.Adafactor)
    assert (whole.tensor_degrees, whole.data_parallel) == ((1,), "all_reduce")


def test_backwards_of_adapters_stay_whole(plain):
    lora = Lora(parts=["language_model"], rank=2)
    for asked, found in (("auto", "eager"), ("eager_split", "eager_split"), ("zero_bubble", "zero_bubble")):
        options = PlanOptions(schedule=asked)
        assert executable_options(options, plain, make_optimizer=torch.optim.AdamW, lora=lora).schedule == found
        assert executable_options(options, plain, make_optimizer=torch.optim.AdamW).schedule == asked


def test_what_is_asked_for_by_itself_stays_to_be_refused(mixture):
    asked = PlanOptions(tensor_degrees=(2,), context_degrees=(2,), data_parallel="sharded")
    assert executable_options(asked, mixture, make_optimizer=torch.optim.Adafactor) == asked
