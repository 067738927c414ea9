"""`BalancedBatchSampler` under DDP: unequal parts, yet the gradients of one process on the whole global batch.

Two ranks train three ways: a plain loop, Lightning and the Hugging Face Trainer. Loaders, epochs and sharding are
theirs; the expected weights come from a loop over the global batches that knows none of them.
"""

import os
import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from entrain_opt import BalancedBatchSampler, BatchCosts

VOCABULARY, NUM_SAMPLES, NUM_EPOCHS, RATE = 13, 22, 2, 0.3
IGNORED = -100


class Sentences(Dataset):
    """Sequences of very unequal length; the first tokens of each are no labels."""

    def __init__(self):
        generator = np.random.default_rng(0)
        self.lengths = np.minimum(np.ceil(generator.lognormal(1.5, 1.0, NUM_SAMPLES)).astype(int) + 2, 60)
        self.label_tokens = generator.integers(1, self.lengths)
        self.encoder_seconds = generator.lognormal(0, 1.0, NUM_SAMPLES)

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        tokens = torch.from_numpy(np.random.default_rng(index).integers(0, VOCABULARY, self.lengths[index]))
        labels = tokens.clone()
        # The first token is nobody's prediction, so it takes one more than the label tokens to ignore.
        labels[: self.lengths[index] - self.label_tokens[index]] = IGNORED
        return tokens, labels

    def sampler(self, rank, world_size):
        costs = BatchCosts(
            encoder_seconds=self.encoder_seconds, llm_seconds=self.lengths, label_tokens=self.label_tokens
        )
        return BalancedBatchSampler(costs, global_batch_size=6, rank=rank, world_size=world_size)


def collate(samples):
    tokens, labels = zip(*samples, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(list(tokens), batch_first=True),
        "attention_mask": pad([torch.ones_like(t) for t in tokens], batch_first=True),
        "labels": pad(list(labels), batch_first=True, padding_value=IGNORED),
    }


class Predictor(torch.nn.Module):
    """Predicts the next token from this one; the loss is the mean over the batch's label tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.head(self.embed(input_ids))[:, :-1].tanh()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"loss": loss}


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def weights(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def expected_weights(model):
    """One process, whole global batches, no sampler but for the list of their samples."""
    data = Sentences()
    sampler = data.sampler(0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(NUM_EPOCHS * len(sampler)):
        optimizer.zero_grad()
        model(**collate([data[index] for index in sampler.global_batch(step)]))["loss"].backward()
        optimizer.step()
    return weights(model)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def train_plain():
    data, rank = Sentences(), torch.distributed.get_rank()
    sampler = data.sampler(rank, 2)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = Predictor()
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    counts = []
    for step, batch in enumerate(chain.from_iterable(loader for _ in range(NUM_EPOCHS))):
        loss = ddp_model(**batch)["loss"] * sampler.loss_factor(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts.append(len(batch["labels"]))
    return weights(model), counts


def train_lightning(folder):
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Predictor()
            self.counts = []

        def train_dataloader(self):
            data = Sentences()
            self.sampler = data.sampler(self.global_rank, self.trainer.world_size)
            return DataLoader(data, batch_sampler=self.sampler, collate_fn=collate)

        def training_step(self, batch, batch_idx):
            self.counts.append(len(batch["labels"]))
            return self.model(**batch)["loss"] * self.sampler.loss_factor(self.trainer.global_step)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    module = Module()
    trainer = pl.Trainer(
        strategy=DDPStrategy(process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()),
        use_distributed_sampler=False,
        accelerator="cpu",
        devices=2,
        max_epochs=NUM_EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    return weights(module.model), module.counts


def make_trainer(folder, model, **options):
    """A Hugging Face Trainer and the list that gets the number of samples of each step."""
    import transformers

    counts = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            self.sampler = self.train_dataset.sampler(self.args.process_index, self.args.world_size)
            loader = DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)
            loader.set_epoch = self.sampler.set_epoch
            return loader

        def compute_loss(self, model, inputs, **options):
            counts.append(len(inputs["labels"]))
            loss = super().compute_loss(model, inputs, **options)
            # Trainer divides by the label tokens of all ranks where the model lets it.
            return loss if self.model_accepts_loss_kwargs else loss * self.sampler.loss_factor(self.state.global_step)

    options = {"save_strategy": "no", "num_train_epochs": NUM_EPOCHS} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate), counts


def train_huggingface(folder, make_model):
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    model = make_model()
    trainer, counts = make_trainer(folder, model, ddp_backend="gloo")
    trainer.train()
    return weights(model), counts


def train_all(folder):
    """Every way in one pair of processes: starting them and importing takes longer than training."""
    return {
        "plain": train_plain(),
        "lightning": train_lightning(folder),
        "trainer": train_huggingface(folder, Predictor),
        "trainer_llama": train_huggingface(folder, tiny_llama),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(train_all, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize(
    ("way", "make_model"),
    [("plain", Predictor), ("lightning", Predictor), ("trainer", Predictor), ("trainer_llama", tiny_llama)],
)
def test_weights_equal_one_process_on_global_batches(outcomes, way, make_model):
    expected = expected_weights(make_model())
    (_, first), (_, second) = ranks = [outcome[way] for outcome in outcomes]
    # The last of four global batches is smaller; elsewhere the ranks' numbers of samples differ too.
    assert (np.array(first) + np.array(second)).tolist() == [6, 6, 6, 4] * NUM_EPOCHS
    assert first != second
    for found, _ in ranks:
        assert_close(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps_done", [2, 4, 5])
def test_lightning_resumes_where_the_state_says(tmp_path, steps_done):
    """In the middle of an epoch, at its end and in the next one."""
    import pytorch_lightning as pl

    class Resumable(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Predictor()
            self.state = None

        def train_dataloader(self):
            data = Sentences()
            self.sampler = data.sampler(0, 1)
            if self.state:
                self.sampler.load_state_dict(self.state)
            return DataLoader(data, batch_sampler=self.sampler, collate_fn=collate)

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"] * self.sampler.loss_factor(self.trainer.global_step)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["sampler"] = self.sampler.state_dict(self.trainer.global_step)

        def on_load_checkpoint(self, checkpoint):
            self.state = checkpoint["sampler"]

    quiet = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False, "max_epochs": NUM_EPOCHS,
    }  # fmt: skip
    every_step = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    pl.Trainer(callbacks=[every_step], **quiet).fit(Resumable())
    resumed = Resumable()
    trainer = pl.Trainer(enable_checkpointing=False, **quiet)
    trainer.fit(resumed, ckpt_path=tmp_path / f"step={steps_done}.ckpt")
    assert trainer.global_step == NUM_EPOCHS * len(resumed.sampler)
    assert_close(weights(resumed.model), expected_weights(Predictor()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps_done", [2, 4, 5])
def test_hugging_face_trainer_resumes_by_itself(tmp_path, steps_done):
    make_trainer(tmp_path, Predictor(), save_strategy="steps", save_steps=steps_done, max_steps=steps_done)[0].train()
    model = Predictor()
    checkpoint = str(tmp_path / f"checkpoint-{steps_done}")
    make_trainer(tmp_path, model)[0].train(resume_from_checkpoint=checkpoint)
    assert_close(weights(model), expected_weights(Predictor()))
