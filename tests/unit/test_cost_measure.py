"""Measuring: one real run of the smallest kind, and errors before anything starts."""

from pathlib import Path

import pytest

from entrain_opt.cost import CostModel
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.measure import measure_costs
from entrain_opt.spec import ClusterSpec, ModelSpec

MODEL = Path(__file__).parents[2] / "models" / "tiny-llava"


def test_a_measurement_has_every_piece_that_the_frozen_parts_leave():
    frozen = ("vision_tower",)
    measured = measure_costs(MODEL, frozen=frozen, budget_seconds=0.0)
    vision, llm = measured.modules["vision"], measured.modules["llm"]
    assert "vision layer backward" not in measured.residuals
    assert vision.layer.backward.token_seconds == 0 < vision.layer.forward.token_seconds
    assert llm.layer.forward.token_seconds < llm.layer.backward.token_seconds
    # The projector trains, so gradients are asked for behind the language model; before its tower they are not.
    assert vision.layer.split_backward is None
    assert llm.layer.split_backward.token_seconds > 0
    assert min(llm.output.backward.token_seconds, vision.output.backward.token_seconds) > 0
    assert (measured.message_latency_seconds, measured.message_bytes_per_second) == (None, None)
    assert (measured.frozen, measured.model, measured.num_processes_busy) == (frozen, "tiny-llava", 1)
    assert min(measured.step_seconds_per_parameter, measured.action_seconds) > 0
    costs = CostModel(ModelSpec.from_pretrained(MODEL, frozen=frozen), ClusterSpec(), measured=measured)
    assert 0 < costs.layer_seconds("llm", [64]) < costs.layer_seconds("llm", [512, 512])


def test_a_worker_that_fails_is_heard(tmp_path, monkeypatch):
    # The folder is one that only the worker finds wrong.
    monkeypatch.setattr("entrain_opt.runtime.measure._check_model", lambda folder, frozen: None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RuntimeConfigError, match="measuring failed: process 0 ended with status 1"):
        measure_costs(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frozen": ("tower",)}, "frozen: expected names"),
        ({"precision": "16-mixed"}, "precision: expected"),
        ({"device": "tpu"}, "device: expected cpu"),
        ({"num_processes_busy": 0}, "num_processes_busy"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(RuntimeConfigError, match=message):
        measure_costs(MODEL, **arguments)
