"""Lightning's flags do what they say, in one process; a pipeline is tried in test_lightning_loops."""

import os

import pytest
import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning import callbacks
from pytorch_lightning.loggers import CSVLogger
from small import write_run

from entrain_opt import EntrainStrategy, MultimodalDataModule, MultimodalModule
from entrain_opt.errors import RuntimeConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder of all runs of this file, so that index and plan are made once."""
    path = tmp_path_factory.mktemp("flags")
    write_run(path, samples=6)
    before = os.getcwd()
    os.chdir(path)
    yield path
    os.chdir(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(root, *, dataset="train.jsonl", validation=True, ckpt_path=None, command="fit", strategy="entrain", **flags):
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "max_steps": 2}
    settings |= {"enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    strategy = EntrainStrategy(cost_model="analytic", num_microbatches=1) if strategy == "entrain" else strategy
    trainer = pl.Trainer(**settings | {"default_root_dir": str(root), "strategy": strategy} | flags)
    data = MultimodalDataModule(dataset, global_batch_size=2, validation_dataset="train.jsonl" if validation else None)
    getattr(trainer, command)(MultimodalModule("model"), datamodule=data, ckpt_path=ckpt_path)
    return trainer


class Seen(callbacks.Callback):
    """Counts what ran."""

    def __init__(self):
        self.train, self.validation, self.sanity = 0, [], 0

    def on_train_batch_end(self, trainer, *args):
        self.train += 1

    def on_validation_batch_end(self, trainer, *args):
        if trainer.sanity_checking:
            self.sanity += 1
        else:
            self.validation.append(self.train)


def test_validation_logger_checkpoint_of_the_best_and_early_stopping(folder):
    seen, root = Seen(), folder / "best"
    best = callbacks.ModelCheckpoint(root / "best", monitor="validation_loss", save_top_k=1, filename="{step}")
    stop = callbacks.EarlyStopping("validation_loss", min_delta=1e9, patience=1, check_on_train_epoch_end=False)
    flags = {
        "max_steps": 9, "val_check_interval": 1, "limit_val_batches": 2, "num_sanity_val_steps": 1,
        "logger": CSVLogger(root), "enable_checkpointing": True, "callbacks": [seen, best, stop],
        "gradient_clip_val": 1e-9, "profiler": "simple", "log_every_n_steps": 1,
    }  # fmt: skip
    trainer = run(root, **flags)
    assert seen.sanity == 1
    # The first value is the best so far; the second is not better by so much, so the run ends.
    assert seen.train == trainer.global_step == 2
    assert seen.validation == [1, 1, 2, 2]
    assert [path.name for path in (root / "best").iterdir()] == [os.path.basename(best.best_model_path)]
    log = (root / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "validation_loss" in log
    assert "gradient_norm" in log
    assert any("run_training_batch" in name for name in trainer.profiler.recorded_durations)
    # The checkpoint holds the weights that gave its score.
    found = run(root, command="validate", ckpt_path=best.best_model_path, limit_val_batches=2)
    assert float(found.callback_metrics["validation_loss"]) == pytest.approx(float(best.best_model_score), rel=1e-5)


def test_the_last_checkpoints_are_kept_and_the_last_one_is_resumed(folder):
    root = folder / "last"
    flags = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 2, "enable_checkpointing": True}

    def keep():
        return callbacks.ModelCheckpoint(
            root / "kept", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True,
            filename="{step}",
        )  # fmt: skip

    trainer = run(root, validation=False, callbacks=[keep()], **flags)
    assert trainer.global_step == 4
    assert sorted(path.name for path in (root / "kept").iterdir()) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    seen = Seen()
    trainer = run(root, validation=False, ckpt_path="last", callbacks=[keep(), seen], **flags | {"max_epochs": 3})
    assert (trainer.global_step, seen.train) == (6, 2)
    assert sorted(path.name for path in (root / "kept").iterdir()) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]


def test_a_position_in_other_data_is_refused(folder):
    root = folder / "position"
    trainer = run(root, validation=False, max_steps=1)
    trainer.save_checkpoint(root / "one.ckpt")
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "fewer.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(RuntimeConfigError, match="6 samples, this run has 4"):
        run(root, validation=False, dataset="fewer.jsonl", ckpt_path=root / "one.ckpt")


def test_fast_dev_run(folder):
    seen, root = Seen(), folder / "fast"
    run(root, fast_dev_run=2, callbacks=[seen], max_steps=-1)
    assert seen.train == 2
    assert len(seen.validation) == 2
    assert not root.exists()


def test_what_cannot_work_is_refused_before_anything_starts(folder):
    seen = Seen()
    for flags, named in (({"overfit_batches": 1}, "overfit_batches"), ({"accumulate_grad_batches": 2}, "accumulate")):
        with pytest.raises(RuntimeConfigError, match=named):
            run(folder / "refused", callbacks=[seen], **flags)
    assert (seen.train, seen.sanity) == (0, 0)
