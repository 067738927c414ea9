"""Dropout: the same masks under every split, schedule and recompute; others at the next step; none in evaluation."""

import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, relative_error, run_model, run_pipeline, write_model
from ranks import run_ranks

from entrain_opt.runtime.dropout import has_dropout
from entrain_opt.runtime.stages import build_rank_model

ROWS = [0, 1, 2, 6]
BOTH = ("vision", "llm")


def on_one_rank(folder, *, step=0, seed=7, training=True, ambient=0, **fields):
    model = build_rank_model(folder, make_plan(folder, SPLITS[1], **fields), 0, seed=7).train(training)
    model.dropout_key.step, model.dropout_key.seed = step, seed
    torch.manual_seed(ambient)
    return run_model(model, SyntheticReader(MIXED_TILES), ROWS)


def on_this_rank(folder, splits):
    torch.manual_seed(torch.distributed.get_rank())
    return [run_pipeline(make_plan(folder, split), SyntheticReader(MIXED_TILES), ROWS) for split in splits]


def test_masks_do_not_depend_on_schedule_recompute_or_other_random_numbers(tmp_path):
    folder = write_model(tmp_path / "dropout", dropout=0.3)
    loss, expected, _, _ = on_one_rank(folder)
    for fields in ({"ambient": 5}, {"recompute": BOTH}, {"schedule": "gpipe"}):
        found_loss, found, _, _ = on_one_rank(folder, **fields)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert relative_error(found, expected) < 1e-5
    for other in ({"step": 1}, {"seed": 8}, {"training": False}):
        assert on_one_rank(folder, **other)[0] != pytest.approx(loss, rel=1e-6)


def test_two_ranks_draw_the_masks_of_one(tmp_path):
    folder = write_model(tmp_path / "dropout", dropout=0.3)
    loss, expected, _, _ = on_one_rank(folder)
    halves = [("vision", (0, 4), 0), ("llm", (0, 2), 0), ("llm", (2, 3), 1)]
    by_rank = run_ranks(on_this_rank, 2, folder, [SPLITS[2], halves])
    for results in zip(*by_rank, strict=True):
        assert sum(result[0] for result in results) == pytest.approx(loss, rel=1e-6)
        for result in results:
            assert relative_error(result[1], {name: expected[name] for name in result[1]}) < 1e-5


def test_layers_without_dropout_are_left_alone(tmp_path):
    for dropout in (0.0, 0.3):
        folder = write_model(tmp_path / f"{dropout}", dropout=dropout)
        model = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=7)
        layer = model.model.model.language_model.layers[0]
        assert has_dropout(layer) == ("forward" in vars(layer)) == (dropout > 0)
