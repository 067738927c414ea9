"""Checkpoints: readable under any plan, complete or not there, and an error that names what is wrong."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import SPLITS, make_plan, write_model
from ranks import run_ranks
from test_training import BATCHES, Run

from entrain_opt.errors import CheckpointError
from entrain_opt.plan import to_plain
from entrain_opt.runtime import checkpoint, checkpoint_files
from entrain_opt.runtime.checkpoint_writer import CheckpointWriter


def snapshot(run, plan, *, step=0, copy=False):
    return checkpoint.take_snapshot(
        run.model, [run.optimizer], meta={"global_step": step}, model_folder=Path(plan.model), plan=to_plain(plan),
        copy=copy,
    )  # fmt: skip


def save_after_two_steps(path, plan):
    """Train two steps, save, train a third: weights after it."""
    run = Run(plan)
    for rows in BATCHES[:2]:
        run.step(rows, max_norm=0.5)
    checkpoint.write(path, snapshot(run, plan))
    run.step(BATCHES[2], max_norm=0.5)
    return run.weights()


def continue_under(path, plans):
    """Load under each plan and train the third step: weights after it."""
    found = []
    for plan in plans:
        run = Run(plan)
        meta = checkpoint.load_meta(path)
        checkpoint.load_model(path, run.model)
        checkpoint.load_optimizers(path, run.model, [run.optimizer], meta)
        run.step(BATCHES[2], max_norm=0.5)
        found.append(run.weights())
    return found


def test_a_run_goes_on_under_any_other_plan(tmp_path):
    """PP 2 -> 1, DP 2 -> 1, another split of the layers, and back: the third step is that of an uninterrupted run."""
    folder = write_model(tmp_path / "tied", tied=True)
    one, two, double = make_plan(folder, SPLITS[1]), make_plan(folder, SPLITS[2]), make_plan(folder, SPLITS[1], data=2)
    other = make_plan(folder, [("vision", (0, 4), 0), ("llm", (0, 1), 0), ("llm", (1, 3), 1)])
    paths = [tmp_path / name for name in ("two", "double", "one")]
    expected = save_after_two_steps(paths[2], one)
    cases = [(path, [other, double] if path == paths[2] else [other]) for path in paths]
    for found in run_ranks(save_and_continue, 2, paths[:2], [two, double], cases):
        for weights in found:
            assert_same(weights, expected)
    for path in paths[:2]:
        assert_same(continue_under(path, [one])[0], expected)


def save_and_continue(paths, plans, cases):
    """Save under each plan, then continue each checkpoint under other plans: all weights."""
    for path, plan in zip(paths, plans, strict=True):
        save_after_two_steps(path, plan)
    return [weights for path, others in cases for weights in continue_under(path, others)]


def assert_same(found, expected):
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture
def saved(tmp_path):
    """(run, plan, path of a complete checkpoint)"""
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[1])
    run = Run(plan)
    run.step(BATCHES[0])
    checkpoint.write(tmp_path / "runs" / "step=1.ckpt", snapshot(run, plan, step=1))
    return run, plan, tmp_path / "runs" / "step=1.ckpt"


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


def write_until(number, path, content, monkeypatch):
    """Write, and stop dead before the `number`-th change to the disk; True if it came to that."""
    calls = []
    places = [(Path, "replace"), (Path, "write_text"), (checkpoint_files, "_sync"), (shutil, "rmtree")]
    places += [(torch, "save"), (checkpoint.dcp, "save")]
    with monkeypatch.context() as patch:
        for owner, name in places:
            original = getattr(owner, name)

            def counted(*args, original=original, **kwargs):
                calls.append(original)
                if len(calls) == number:
                    raise Killed
                return original(*args, **kwargs)

            patch.setattr(owner, name, counted)
        # What torch.distributed.checkpoint itself saves is one step: it would catch our exception.
        inner = checkpoint.dcp.save

        def as_one(*args, **kwargs):
            with monkeypatch.context() as plain:
                plain.setattr(torch, "save", torch_save)
                return inner(*args, **kwargs)

        patch.setattr(checkpoint.dcp, "save", as_one)
        try:
            checkpoint.write(path, content)
        except Killed:
            return True
    return False


torch_save = torch.save


def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(saved, monkeypatch):
    """Writing over an older checkpoint of the same name is cut off before every change to the disk in turn."""
    run, plan, path = saved
    older, newer = snapshot(run, plan, step=1), snapshot(run, plan, step=2)
    number, steps = 1, []
    while write_until(number, path, newer, monkeypatch):
        found = checkpoint_files.find(path)
        steps.append(checkpoint.load_meta(found)["global_step"])
        checkpoint.load_model(found, run.model)
        # The next run starts from what this one left.
        checkpoint.write(path, older)
        number += 1
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert checkpoint.load_meta(path)["global_step"] == 2
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no list", "not a folder"])
def test_damage_is_named_with_the_last_good_one(saved, damage):
    run, plan, good = saved
    path = good.with_name("step=2.ckpt")
    checkpoint.write(path, snapshot(run, plan, step=2))
    victim = next(path.glob("__0_*"))
    content = victim.read_bytes()
    named = victim.name
    if damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        victim.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "missing":
        (path / "meta.pt").unlink()
        named = "meta.pt"
    elif damage == "no list":
        (path / "files.json").unlink()
        named = "files.json"
    else:
        shutil.rmtree(path)
        named = "expected a folder"
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_meta(path)
    assert named in str(error.value)
    assert str(path) in str(error.value)
    assert str(good) in str(error.value)


def full_disk(path, plan):
    """The second rank's disk is full while tensors are written: what every rank raises."""
    import torch.distributed as dist

    run = Run(plan)
    checkpoint.write(path, snapshot(run, plan, step=1))
    if dist.get_rank() == 1:
        from torch.distributed.checkpoint import filesystem

        def fail(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        filesystem.os.fsync = fail
    for target in (path, path.with_name("other")):
        with pytest.raises(CheckpointError) as error:
            checkpoint.write(target, snapshot(run, plan, step=2))
    return str(error.value), checkpoint.load_meta(path)["global_step"]


def test_a_full_disk_is_named_on_every_rank_and_leaves_the_older_checkpoint(tmp_path):
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[2])
    path = tmp_path / "runs" / "last.ckpt"
    for message, step in run_ranks(full_disk, 2, path, plan):
        for expected in ("No space left on device", "rank 1", "other", "free in"):
            assert expected in message
        assert step == 1
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def write_in_background(folder, plan):
    run = Run(plan)
    writer = CheckpointWriter(background=True)
    first, second, third = (folder / name for name in ("1", "2", "3"))
    before = run.weights()
    writer.save(first, snapshot(run, plan, copy=True))
    run.step(BATCHES[0])
    writer.save(second, snapshot(run, plan, copy=True))
    if next(iter(run.model.stages)) == 0:
        writer.remove(first)
    writer.wait()
    kept = first.exists(), second.exists()
    after = run.weights()
    checkpoint.load_meta(second)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    checkpoint.load_model(second, run.model)
    same = all(np.array_equal(after[name], value) for name, value in run.weights().items())
    moved = any(not np.array_equal(before[name], value) for name, value in after.items())
    (folder / "blocked").write_text("a file where the folder should go")
    writer.save(folder / "blocked" / "3", snapshot(run, plan, copy=True))
    with pytest.raises(CheckpointError, match="blocked"):
        writer.wait()
    writer.save(third, snapshot(run, plan, copy=True))
    writer.wait()
    return kept, same, moved, third.exists()


def test_writing_in_the_background_keeps_what_was_there_when_it_began(tmp_path):
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[2])
    for kept, same, moved, third in run_ranks(write_in_background, 2, tmp_path, plan):
        assert kept[1]
        assert same
        assert moved
        assert third
    assert not (tmp_path / "1").exists()
