"""What the other ranks do when one fails: they end in seconds and name it."""

import functools
import os
import signal
import time

import pytest
from processes import run_ranks_to_end
from small import losses, write_run

LIMIT_SECONDS = 15


def at_call(owner, name, number, action):
    """Run `action` in place of the `number`-th call of a method."""
    original = getattr(owner, name)
    calls = [0]

    @functools.wraps(original)
    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_forward(rank, of=1):
    from entrain_opt.runtime.executor import PipelineExecutor

    if rank == of:
        at_call(PipelineExecutor, "_forward", 3, kill_self)


def kill_in_backward(rank, of=1):
    from entrain_opt.runtime.executor import PipelineExecutor

    if rank == of:
        at_call(PipelineExecutor, "_keep_input_gradients", 2, kill_self)  # Of a whole or a split backward.


def kill_in_checkpoint(rank):
    """The second rank dies while it writes its part of the second checkpoint."""
    from entrain_opt.runtime import checkpoint

    if rank == 1:
        at_call(checkpoint.dcp, "save", 2, kill_self)


def fail_in_loader(rank):
    from entrain_opt.runtime.reader import ChatReader

    def fail():
        raise ValueError("no such row in this loader")

    if rank == 1:
        at_call(ChatReader, "text", 5, fail)


def fill_disk(rank):
    import errno

    from torch.distributed.checkpoint import FileSystemWriter

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        at_call(FileSystemWriter, "write_data", 2, fail)


def terminate_other_rank(rank):
    """SIGTERM reaches the second rank only, in the middle of its second step."""
    from entrain_opt.runtime.executor import PipelineExecutor

    if rank == 1:
        at_call(PipelineExecutor, "_forward", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))


def stall(rank):
    from entrain_opt.runtime.executor import PipelineExecutor

    if rank == 1:
        at_call(PipelineExecutor, "_forward", 2, lambda: time.sleep(60))


def write_small(folder, **trainer):
    """Two stages, six short samples, two a step, a checkpoint every step."""
    recipe = write_run(folder, samples=6, global_batch_size=2, max_steps=3, num_microbatches=2)
    recipe["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 1
    recipe["trainer"] |= trainer
    return recipe


def complete(folder):
    """Names of the checkpoints that can be loaded."""
    from entrain_opt.runtime.checkpoint import load_meta

    folder = folder / "runs" / "small" / "checkpoints"
    found = sorted(path for path in folder.iterdir() if not path.name.endswith(".partial"))
    return [path.name for path in found if load_meta(path)["global_step"]]


def assert_survivor(ended, *expected):
    assert ended.code == 1, ended.text
    assert ended.late_seconds < LIMIT_SECONDS
    for text in expected:
        assert text in ended.text, ended.text


@pytest.mark.parametrize(
    ("fault", "killed"), [(kill_in_forward, 1), (functools.partial(kill_in_forward, of=0), 0), (kill_in_backward, 1)]
)
def test_a_killed_rank_ends_the_others_with_its_name(tmp_path, fault, killed):
    ended = run_ranks_to_end(tmp_path, write_small(tmp_path), fault=fault)
    assert ended[killed].code == -signal.SIGKILL, ended[killed].text
    waited = f"Rank {1 - killed} waited"
    assert_survivor(ended[1 - killed], f"rank {killed}", "ended without a word", waited, "microbatch", "stage")


def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    ended = run_ranks_to_end(tmp_path, write_small(tmp_path), fault=kill_in_checkpoint)
    assert ended[1].code == -signal.SIGKILL
    assert_survivor(ended[0], "rank 1", "ended without a word", "checkpoint")
    assert complete(tmp_path) == ["step=1.ckpt"]


def test_an_exception_in_one_rank_s_loader_is_told_by_all(tmp_path):
    ended = run_ranks_to_end(tmp_path, write_small(tmp_path), fault=fail_in_loader)
    assert_survivor(ended[0], "rank 1", "ValueError: no such row in this loader")
    assert ended[1].code == 1
    assert "Traceback" in ended[1].text
    assert "no such row in this loader" in ended[1].text


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(tmp_path):
    ended = run_ranks_to_end(tmp_path, write_small(tmp_path), fault=fill_disk)
    for rank in ended:
        assert_survivor(rank, "No space left on device", "step=2.ckpt", "rank 1")
    assert complete(tmp_path) == ["step=1.ckpt"]
    assert not (tmp_path / "runs" / "small" / "checkpoints" / "step=2.ckpt.partial").exists()


def test_sigterm_saves_and_the_run_goes_on_as_if_it_had_not_been(tmp_path):
    recipe = write_small(tmp_path)
    recipe["trainer"]["callbacks"] = []
    recipe["trainer"]["enable_checkpointing"] = False
    assert [rank.code for rank in run_ranks_to_end(tmp_path, recipe)] == [0, 0]
    recipe["data"]["init_args"]["num_workers"] = 1
    ended = run_ranks_to_end(tmp_path, recipe, fault=terminate_other_rank)
    assert [rank.code for rank in ended] == [128 + signal.SIGTERM] * 2, ended
    path = ended[0].text.rpartition("--ckpt_path ")[2].strip()
    assert "Traceback" not in ended[0].text + ended[1].text
    assert [rank.code for rank in run_ranks_to_end(tmp_path, recipe, "--ckpt_path", path)] == [0, 0]
    whole, first, rest = (losses(tmp_path, version=version) for version in range(3))
    assert len(whole) == 3
    assert first
    assert rest
    assert first | rest == pytest.approx(whole, rel=1e-6)
    assert not set(first) & set(rest)


def test_a_watchdog_says_who_waits_for_what_and_a_timeout_ends_it(tmp_path):
    recipe = write_small(tmp_path)
    # Without a fault the same run ends well; it also compiles what a first run must, which may take longer than 6 s.
    assert [rank.code for rank in run_ranks_to_end(tmp_path, recipe)] == [0, 0]
    recipe["trainer"]["strategy"]["init_args"] |= {"watchdog_seconds": 2, "timeout_seconds": 6}
    ended = run_ranks_to_end(tmp_path, recipe, fault=stall)
    assert "entrain: rank 0 has waited" in ended[0].text, ended[0].text
    assert "sent by rank 1" in ended[0].text
    assert "backward" in ended[0].text
    assert "rank 1, which rank 0 waits for, is at Forward(" in ended[1].text, ended[1].text
    assert_survivor(ended[0], "Rank 0 waited", "in vain")
    assert_survivor(ended[1], "rank 0", "in vain")
