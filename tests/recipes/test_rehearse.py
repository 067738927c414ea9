"""`entrain rehearse` as a user runs it, on a trace without media."""

import csv

from small import ROOT, entrain, write_run


def test_a_trace_is_rehearsed_and_nothing_passes_for_a_real_run(tmp_path):
    recipe = write_run(tmp_path, devices=2, global_batch_size=6, num_microbatches=2)
    recipe["data"]["init_args"]["dataset"] = str(ROOT / "recipes" / "data" / "traces" / "math_vision.parquet")
    process = entrain(tmp_path, recipe, "--steps", "2", command="rehearse")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("EMULATED")
    assert "emulated step 1" in process.stdout
    (log,) = tmp_path.glob("runs/recipe/emulated/version_*/metrics.csv")
    with open(log, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = set(rows[0]) - {"epoch", "step"}
    assert len(rows) == 2
    assert names
    assert all(name.startswith("emulated_") for name in names)
    assert {"emulated_bubble_share_rank_0", "emulated_bubble_share_rank_1"} <= names
    # Waits do not end early: no step is faster than the simulator says.
    assert all(float(row["emulated_measured_over_predicted"]) >= 1 for row in rows)
    assert not list(tmp_path.rglob("*.ckpt"))
