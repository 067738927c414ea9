"""A user's mistake is one message that names it, on stderr, with an exit code, and leaves no process behind."""

import json
import os
import shutil

import pytest
from small import DATA, entrain, write_run


def assert_fails(folder, recipe, *arguments, expected, **options):
    """Run and check the one error; returns stderr."""
    process = entrain(folder, recipe, *arguments, **options)
    assert process.returncode != 0, process.stdout
    for text in expected:
        assert text in process.stderr, process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("entrain: error:")]
    assert len(errors) == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert not leftovers(folder)
    return process.stderr


def leftovers(folder):
    """Processes that still run in a folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.readlink(f"/proc/{name}/cwd") == str(folder):
                    found.append(name)
            except OSError:
                continue  # It ended while we looked, or is not ours.
    return found


def change_sample(folder, change):
    """Apply a function to the first sample with an image and return its id."""
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        sample = json.loads(line)
        parts = sample["messages"][0]["content"]
        if any(part["type"] == "image" for part in parts):
            change(sample, next(part for part in parts if part["type"] == "image"))
            lines[number] = json.dumps(sample)
            break
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sample["id"]


def truncate(folder, image, *, keep=0.5):
    """Replace an image by its first half."""
    content = (folder / image["path"]).read_bytes()
    target = folder / "half.jpg"
    target.write_bytes(content[: int(len(content) * keep)])
    image["path"] = target.name


def test_validate_without_a_validation_dataset(tmp_path):
    recipe = write_run(tmp_path)
    assert_fails(tmp_path, recipe, command="validate", expected=["data.validation_dataset", "found none"])


def test_missing_dataset(tmp_path):
    recipe = write_run(tmp_path)
    recipe["data"]["init_args"]["dataset"] = "nowhere.jsonl"
    assert_fails(tmp_path, recipe, expected=["nowhere.jsonl"])


def test_broken_image(tmp_path):
    recipe = write_run(tmp_path)
    name = change_sample(tmp_path, lambda sample, image: truncate(tmp_path, image))
    assert_fails(tmp_path, recipe, expected=[name, "half.jpg"])


def test_broken_image_can_be_skipped(tmp_path):
    recipe = write_run(tmp_path, max_steps=1)
    change_sample(tmp_path, lambda sample, image: truncate(tmp_path, image))
    recipe["data"]["init_args"]["bad_samples"] = "skip"
    process = entrain(tmp_path, recipe, ranks=2)
    assert process.returncode == 0, process.stderr


def test_placeholder_without_its_image(tmp_path):
    recipe = write_run(tmp_path)

    def mark(sample, image):
        sample["messages"][0]["content"][-1]["text"] += " <image> <image> <image> <image>"

    name = change_sample(tmp_path, mark)
    assert_fails(tmp_path, recipe, expected=[name, "4"], command="plan")


def test_plan_for_another_number_of_ranks(tmp_path):
    recipe = write_run(tmp_path, devices=1, max_steps=1)
    process = entrain(tmp_path, recipe)
    assert process.returncode == 0, process.stderr
    shutil.copy(tmp_path / "runs" / "small" / "plan.yaml", tmp_path / "plan.yaml")
    recipe["trainer"]["devices"] = 2
    recipe["trainer"]["strategy"]["init_args"] = {"plan": "plan.yaml", "cost_model": "analytic"}
    assert_fails(tmp_path, recipe, expected=["plan.yaml", "1 ranks", "2"])


def test_three_devices_on_a_plan_of_two_stages(tmp_path):
    recipe = write_run(tmp_path, max_steps=1)
    recipe["trainer"]["devices"] = 3
    assert_fails(tmp_path, recipe, expected=["pipeline", "2", "3"])


@pytest.mark.parametrize(
    ("place", "key", "nearest"),
    [
        (("trainer", "strategy", "init_args"), "polcy", "policy"),
        (("model", "init_args"), "modle", "model"),
        (("data", "init_args"), "globl_batch_size", "global_batch_size"),
        (("trainer",), "max_stepz", "max_stepz"),
    ],
)
def test_misspelled_key(tmp_path, place, key, nearest):
    recipe = write_run(tmp_path)
    section = recipe
    for name in place:
        section = section[name]
    section[key] = 1
    process = entrain(tmp_path, recipe)
    assert process.returncode != 0
    assert key in process.stderr
    assert nearest in process.stderr
    assert "Traceback" not in process.stderr


def test_data_that_breaks_during_training_ends_all_ranks_with_its_name(tmp_path):
    """The rank that loads pictures fails; the other waits for its messages and must end with it."""
    recipe = write_run(tmp_path, max_steps=1)
    process = entrain(tmp_path, recipe, ranks=2)
    assert process.returncode == 0, process.stderr
    name = break_behind_the_index(tmp_path)
    recipe["trainer"]["max_steps"] = 6
    process = entrain(tmp_path, recipe)
    assert process.returncode != 0
    assert name in process.stderr, process.stderr
    assert not leftovers(tmp_path)


def break_behind_the_index(folder):
    """Overwrite a picture with zeros, same size and time, so that the cached index still holds; returns its name."""
    line = next(line for line in (folder / "train.jsonl").read_text().splitlines() if '"image"' in line)
    path = folder / next(p for p in json.loads(line)["messages"][0]["content"] if p["type"] == "image")["path"]
    content, status = path.read_bytes(), path.stat()
    (folder / "images").unlink()
    shutil.copytree(DATA / "images", folder / "images")
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return path.name


def test_layers_that_devices_cannot_share_exactly(tmp_path):
    recipe = write_run(tmp_path, pipeline_degree=1, tensor_degrees=[2])
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["attention_dropout"] = 0.1
    path.write_text(json.dumps(config))
    impossible = "tensor_degrees: none of [2] is possible: module llm has dropout inside its layers"
    assert_fails(tmp_path, recipe, command="plan", expected=[impossible, "Add 1 to it"])
