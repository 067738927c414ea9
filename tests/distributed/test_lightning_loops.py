"""Lightning's loops around a pipeline: sanity check, validate alone, fit after validate, validate after fit."""

import pytest
from processes import run_ranks_to_end
from small import write_run


def validate_fit_validate():
    """One trainer, three calls; prints what they found."""
    import pytorch_lightning as pl

    from entrain_opt import EntrainStrategy, MultimodalDataModule, MultimodalModule

    class Watch(pl.Callback):
        def on_sanity_check_end(self, trainer, module):
            print("sanity", float(trainer.callback_metrics["validation_loss"]))

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                print(trainer.state.fn.value, float(trainer.callback_metrics["validation_loss"]))

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_steps=2, val_check_interval=2, num_sanity_val_steps=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch()],
        strategy=EntrainStrategy(cost_model="analytic", pipeline_degree=2, num_microbatches=2),
    )  # fmt: skip
    module = MultimodalModule("model")
    data = MultimodalDataModule("train.jsonl", global_batch_size=2, validation_dataset="train.jsonl")
    trainer.validate(module, datamodule=data)
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data)
    return 0


def test_validation_before_between_and_after_training(tmp_path):
    ended = run_ranks_to_end(tmp_path, write_run(tmp_path, samples=4), program=validate_fit_validate)
    found = []
    for rank in ended:
        assert rank.code == 0, rank.text
        lines = [line.split() for line in rank.text.splitlines() if line.startswith(("sanity", "validate", "fit"))]
        assert [name for name, _ in lines] == ["validate", "sanity", "fit", "validate"], rank.text
        found.append([float(loss) for _, loss in lines])
    assert found[0] == found[1]
    before, sanity, between, after = found[0]
    assert sanity == pytest.approx(before, rel=1e-6)
    assert after == pytest.approx(between, rel=1e-6)
    assert after < before
