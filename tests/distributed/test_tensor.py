"""Devices that share layers: loss, gradients, norms and steps are those of one process, whatever the degrees."""

import numpy as np
import pytest
from cases import MIXED_TILES, SyntheticReader, make_plan, relative_error, run_pipeline, write_model
from ranks import run_ranks
from test_exactness import expected_of

ROWS = list(range(len(MIXED_TILES)))
ONE = [("vision", (0, 4), 0), ("llm", (0, 3), 0)]
TWO = [("vision", (0, 4), 0), ("llm", (0, 3), 1)]
#: Name: the split, and fields of the plan. All on two ranks.
SHARED = {
    "plain": {},
    "split backward": {"schedule": "zero_bubble"},
    "recompute": {"recompute": ("vision", "llm")},
    "frozen encoder": {"frozen": ("vision_tower",)},
    "frozen encoder and llm": {"frozen": ("vision_tower", "language_model"), "recompute": ("llm",)},
}


def own_parts(values, shards):
    """What a device holds of whole arrays."""

    def part(name, value):
        shard = shards.get(name)
        if shard is None:
            return value
        return np.concatenate([value[shard.index(*ends)] for ends in shard.ranges], axis=shard.dim)

    return {name: part(name, value) for name, value in values.items()}


def assert_parts_exact(results, expected):
    """Every rank's gradients are its parts of the plain model's; loss and norm are equal."""
    expected_loss, gradients = expected
    assert sum(result[0] for result in results) == pytest.approx(expected_loss, rel=1e-5)
    norm = np.sqrt(sum(float(np.linalg.norm(g)) ** 2 for g in gradients.values()))
    for result in results:
        owned = {name: value for name, value in gradients.items() if name in result[1]}
        assert relative_error(result[1], own_parts(owned, result[3]["shards"])) < 1e-5
        assert result[2] == pytest.approx(norm, rel=1e-5)
    assert set(gradients) <= {name for result in results for name in result[1]}


def run_plans(plans_and_rows):
    reader = SyntheticReader(MIXED_TILES)
    return [run_pipeline(plan, reader, rows) for plan, rows in plans_and_rows]


def check(world_size, plans_and_rows):
    of_ranks = run_ranks(run_plans, world_size, plans_and_rows)
    for index, (plan, rows) in enumerate(plans_and_rows):
        expected = expected_of(plan.model, tuple(rows), plan.frozen)
        assert_parts_exact([results[index] for results in of_ranks], expected)
        for rank, results in enumerate(of_ranks):
            _, pipeline_rank, _ = plan.degrees.place_of(rank)
            assert bool(results[index][3]["shards"]) == (plan.degrees.tensor_of(pipeline_rank) > 1)


def test_two_devices_share_all_layers(tmp_path):
    folder, tied = write_model(tmp_path / "plain"), write_model(tmp_path / "tied", tied=True)
    cases = [(make_plan(str(folder), ONE, tensor=2, **fields), ROWS) for fields in SHARED.values()]
    cases += [(make_plan(str(folder), ONE, tensor=2), [1, 5]), (make_plan(str(tied), ONE, tensor=2), ROWS)]
    check(2, cases)


def test_two_pipeline_ranks_of_two_devices(tmp_path):
    folder, tied = write_model(tmp_path / "plain"), write_model(tmp_path / "tied", tied=True)
    cut = [("vision", (0, 4), 0), ("llm", (0, 1), 0), ("llm", (1, 3), 1)]
    cases = [
        (make_plan(str(folder), TWO, tensor=2), ROWS),
        (make_plan(str(folder), TWO, tensor=2, recompute=("llm",), frozen=("vision_tower",)), ROWS),
        (make_plan(str(tied), cut, tensor=2, schedule="eager"), ROWS),
        (make_plan(str(folder), ONE, tensor=2, data=2), [0, 1, 5]),
        (make_plan(str(folder), ONE, tensor=2, data=2), [9]),
    ]
    check(4, cases)


def test_degrees_that_differ_between_modules(tmp_path):
    folder = write_model(tmp_path / "plain")
    cases = [
        (make_plan(str(folder), TWO, tensor=(1, 2)), ROWS),
        (make_plan(str(folder), TWO, tensor=(2, 1), schedule="zero_bubble"), ROWS),
        (make_plan(str(folder), TWO, tensor=(1, 2), frozen=("vision_tower", "language_model")), ROWS),
        (make_plan(str(folder), TWO, tensor=(1, 2)), [1, 5]),
    ]
    check(3, cases)
