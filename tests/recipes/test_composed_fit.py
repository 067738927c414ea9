"""A composed model with two encoders as a user trains it: two processes, resumed in one, exported in parts."""

import json
import shutil

import pytest
import torch
import yaml
from small import ROOT, entrain, losses
from transformers import AutoModel, AutoModelForCausalLM

from entrain_opt import ComposedModel
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.runtime.checkpoint import export, load_model
from entrain_opt.runtime.stages import build_rank_model

NAME = "tiny-compose-qwen2_5-vit-whisper-llama"


def fit(folder, recipe, *arguments):
    process = entrain(folder, recipe, *arguments, ranks=recipe["trainer"]["devices"])
    assert process.returncode == 0, process.stdout + process.stderr


def write_run(folder):
    """The shipped recipe, shorter, with the encoders on different ranks, beside a copy of its model and data."""
    recipe = yaml.safe_load((ROOT / "recipes" / f"{NAME}.yaml").read_text())
    shutil.copytree(ROOT / "models" / NAME, folder / "model")
    (folder / "data").symlink_to(ROOT / "recipes" / "data")
    trainer = recipe["trainer"]
    trainer |= {"devices": 2, "max_steps": 2, "default_root_dir": "runs/small", "enable_progress_bar": False}
    trainer["logger"]["init_args"] = {"save_dir": "runs/small", "name": "metrics"}
    trainer["callbacks"][0]["init_args"] |= {"dirpath": "runs/small/checkpoints", "every_n_train_steps": 1}
    trainer["strategy"]["init_args"] = {"plan": "plan.yaml", "cost_model": "analytic"}
    recipe["model"]["init_args"]["model"] = "model"
    recipe["data"]["init_args"] |= {"dataset": "data/mixed/train.jsonl", "global_batch_size": 4}
    return recipe


def write_plan(folder, ranks):
    layers = {"vision": 6, "audio": 6, "llm": 4}
    plan = Plan(
        model="model",
        degrees=ParallelDegrees(pipeline=max(ranks) + 1),
        stages=tuple(
            StagePlan(module=module, layers=(0, count), rank=rank)
            for (module, count), rank in zip(layers.items(), ranks, strict=True)
        ),
        global_batch_size=4,
        num_microbatches=2,
        policy="pairwise",
    )
    plan.write(folder / "plan.yaml")
    return plan


def test_side_by_side_then_in_one_process_then_in_parts(tmp_path):
    recipe = write_run(tmp_path)
    write_plan(tmp_path, (0, 1, 1))
    fit(tmp_path, recipe)
    whole = losses(tmp_path)
    assert list(whole) == [0, 1]
    plan = write_plan(tmp_path, (0, 0, 0))
    recipe["trainer"]["devices"] = 1
    checkpoints = tmp_path / "runs" / "small" / "checkpoints"
    fit(tmp_path, recipe, "--ckpt_path", str(checkpoints / "step=1.ckpt"))
    assert losses(tmp_path, version=1) == pytest.approx({1: whole[1]}, rel=1e-5)

    export(checkpoints / "step=2.ckpt", tmp_path / "out")
    model = ComposedModel.from_pretrained(tmp_path / "out")
    # The checkpoint itself, read into the cut model; the seed plays no part.
    trained = build_rank_model(tmp_path / "model", plan, 0, seed=99)
    load_model(checkpoints / "step=2.ckpt", trained)
    found, expected = model.state_dict(), trained.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["weights"]["projector"] == "projector"
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        llm = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "language_model").eval()
        assert torch.equal(llm(ids).logits, model(ids).logits)
        pixels, grid = torch.randn(16, 1176), torch.tensor([[1, 4, 4]])
        tower = AutoModel.from_pretrained(tmp_path / "out" / "vision_tower").eval()
        assert torch.equal(tower(pixels, grid_thw=grid).pooler_output, model.image_features(pixels, grid))
