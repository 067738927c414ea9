"""`entrain fit` as a user runs it: launchers, resume, export, validation."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from small import INTERPRETER, entrain, losses, write_run


def fit(folder, recipe, *arguments, launcher=()):
    """By a launcher, or with all ranks started at once."""
    options = {"launcher": launcher} if launcher else {"ranks": recipe["trainer"]["devices"]}
    process = entrain(folder, recipe, *arguments, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with a frozen tower and validation: (folder, recipe, what it printed)."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_run(folder, frozen=["vision_tower"])
    recipe["data"]["init_args"]["validation_dataset"] = "train.jsonl"
    recipe["trainer"]["val_check_interval"] = 3
    return folder, recipe, fit(folder, recipe, launcher=INTERPRETER).stdout


def test_prints_plan_and_where_results_lie(trained):
    folder, _, printed = trained
    for expected in ("vision", "llm", "predicted", "Metrics in", "entrain export"):
        assert expected in printed
    assert list(losses(folder)) == [0, 1, 2]
    assert (folder / "runs" / "small" / "plan.yaml").is_file()


def test_torchrun_gives_the_same_losses(trained):
    folder, recipe, _ = trained
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    log = {"--trainer.logger.init_args.version": "torchrun"}
    fit(folder, recipe, *(f"{name}={value}" for name, value in log.items()), launcher=torchrun)
    assert losses(folder, version="torchrun") == losses(folder)


def test_validation_runs_under_the_same_plan(trained):
    folder, _, _ = trained
    log = (folder / "runs" / "small" / "metrics" / "version_0" / "metrics.csv").read_text()
    assert "validation_loss" in log


def test_saved_config_runs_again_in_the_same_folder(trained):
    folder, _, _ = trained
    saved = yaml.safe_load((folder / "runs" / "small" / "metrics" / "version_0" / "config.yaml").read_text())
    fit(folder, saved, "--trainer.logger.init_args.version=again")
    assert losses(folder, version="again") == losses(folder)


def test_any_plan_gives_the_same_losses(tmp_path):
    recipe = write_run(tmp_path, devices=1)
    fit(tmp_path, recipe)
    recipe["trainer"]["devices"] = 2
    recipe["trainer"]["strategy"]["init_args"].update(pipeline_degree=None, data_degree=2, policy="in_order")
    fit(tmp_path, recipe)
    assert list(losses(tmp_path, version=1).values()) == pytest.approx(list(losses(tmp_path).values()), rel=1e-5)


def test_devices_that_share_layers_give_the_same_losses_and_their_checkpoint_resumes_on_one(tmp_path):
    recipe = write_run(tmp_path, max_steps=4, pipeline_degree=1, tensor_degrees=[2], recompute="always")
    recipe["trainer"]["gradient_clip_val"] = 0.5
    recipe["data"]["init_args"]["validation_dataset"] = "train.jsonl"
    recipe["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 2
    assert "of 2 vision + 2 llm devices" in fit(tmp_path, recipe).stdout
    whole = losses(tmp_path)
    recipe["trainer"]["devices"] = 1
    recipe["trainer"]["strategy"]["init_args"].update(tensor_degrees=None, recompute="never")
    fit(tmp_path, recipe, "--ckpt_path", "runs/small/checkpoints/step=2.ckpt")
    assert losses(tmp_path, version=1) == pytest.approx({step: whole[step] for step in (2, 3)}, rel=1e-5)
    fit(tmp_path, recipe)
    assert losses(tmp_path, version=2) == pytest.approx(whole, rel=1e-5)


def test_replicas_that_share_the_optimizers_state_give_the_same_losses_and_their_checkpoint_resumes_on_one(tmp_path):
    shared = {"pipeline_degree": 1, "data_degree": 2, "data_parallel": "sharded"}
    recipe = write_run(tmp_path, max_steps=4, async_checkpoints=True, **shared)
    recipe["trainer"]["gradient_clip_val"] = 0.5
    recipe["data"]["init_args"]["validation_dataset"] = "train.jsonl"
    recipe["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 2
    assert "2 replicas that share the optimizer's state" in fit(tmp_path, recipe).stdout
    whole = losses(tmp_path)
    recipe["trainer"]["devices"] = 1
    recipe["trainer"]["strategy"]["init_args"].update(data_degree=1, data_parallel="search")
    fit(tmp_path, recipe, "--ckpt_path", "runs/small/checkpoints/step=2.ckpt")
    assert losses(tmp_path, version=1) == pytest.approx({step: whole[step] for step in (2, 3)}, rel=1e-5)
    fit(tmp_path, recipe)
    assert losses(tmp_path, version=2) == pytest.approx(whole, rel=1e-5)


def test_resume_sees_the_same_samples_and_losses(tmp_path):
    """Across an epoch's end, with and without loader processes, and under another plan."""
    recipe = write_run(tmp_path, max_steps=6, samples=10)
    recipe["trainer"]["gradient_clip_val"] = 0.5
    recipe["model"]["init_args"]["scheduler"] = {
        "class_path": "torch.optim.lr_scheduler.StepLR",
        "init_args": {"step_size": 1, "gamma": 0.9},
    }
    recipe["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 1
    fit(tmp_path, recipe)
    whole = losses(tmp_path)
    assert list(whole) == list(range(6))
    recipe["data"]["init_args"]["num_workers"] = 2
    fit(tmp_path, recipe, "--ckpt_path", "runs/small/checkpoints/step=2.ckpt")
    assert losses(tmp_path, version=1) == pytest.approx({step: whole[step] for step in range(2, 6)}, rel=1e-6)
    recipe["data"]["init_args"]["num_workers"] = 0
    fit(tmp_path, recipe, "--ckpt_path", "runs/small/checkpoints/step=3.ckpt")
    assert losses(tmp_path, version=2) == pytest.approx({step: whole[step] for step in range(3, 6)}, rel=1e-6)
    recipe["trainer"]["devices"] = 1
    recipe["trainer"]["strategy"]["init_args"]["pipeline_degree"] = 1
    fit(tmp_path, recipe, "--ckpt_path", "runs/small/checkpoints/step=3.ckpt")
    assert losses(tmp_path, version=3) == pytest.approx({step: whole[step] for step in range(3, 6)}, rel=1e-6)


def test_export_loads_in_transformers(trained):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    from entrain_opt.runtime.checkpoint import load_model
    from entrain_opt.runtime.families import MediaUnit
    from entrain_opt.runtime.stages import PackedText, build_rank_model

    folder, _, _ = trained
    checkpoint = folder / "runs" / "small" / "checkpoints" / "step=3.ckpt"
    process, _ = export(folder, checkpoint, "out")
    assert process.returncode == 0, process.stderr
    exported, info = AutoModelForImageTextToText.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(info.values())
    AutoTokenizer.from_pretrained(folder / "out")
    AutoImageProcessor.from_pretrained(folder / "out")

    from entrain_opt.plan import ParallelDegrees, Plan, StagePlan

    stages = (StagePlan(module="vision", layers=(0, 2), rank=0), StagePlan(module="llm", layers=(0, 2), rank=0))
    plan = Plan(
        model="model", degrees=ParallelDegrees(), stages=stages, global_batch_size=4, num_microbatches=1, frozen=()
    )  # fmt: skip
    rank = build_rank_model(folder / "model", plan, 0, seed=99)
    load_model(checkpoint, rank)
    pixels = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([7, 8, *[3] * 128, 9, 10])
    unit = MediaUnit(module="vision", segments=(2,), patches=(128,), features=(128,))
    text = PackedText(
        segment_offsets=[0, len(ids)],
        position_ids=torch.arange(len(ids)),
        input_ids=ids,
        feature_positions=(torch.nonzero(ids == 3).squeeze(1),),
        feature_rows=(None,),
    )
    with torch.no_grad():
        ours = rank.family.logits(rank.model, rank.decode(1, text, None, [rank.encode(0, pixels, unit)]))
        plain = exported(input_ids=ids[None], pixel_values=pixels).logits[0]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    # Frozen layers kept their initial weights, trained ones moved.
    fresh = dict(build_rank_model(folder / "model", plan, 0, seed=0).model.named_parameters())
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, fresh[name]) == ("vision_tower" in name), name


def export(folder, checkpoint, output):
    import os
    import subprocess

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "entrain_opt.cli.main", "export", str(checkpoint), output]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False), command
