"""What the other ranks do when one fails: they end in seconds and name it."""

import functools
import os
import signal
import time

import pytest
from processes import run_ranks_to_end
from small import write_run

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
        at_call(PipelineExecutor, "_forward", 6, kill_self)


def kill_in_backward(rank, of=1):
    from entrain_opt.runtime.executor import PipelineExecutor

    if rank == of:
        at_call(PipelineExecutor, "_backward", 6, kill_self)


@pytest.mark.parametrize(
    ("fault", "killed"), [(kill_in_forward, 1), (functools.partial(kill_in_forward, of=0), 0), (kill_in_backward, 1)]
)
def test_a_killed_rank_ends_the_others_with_its_name(tmp_path, fault, killed):
    ended = run_ranks_to_end(tmp_path, write_run(tmp_path, max_steps=4), fault=fault)
    assert ended[killed].code == -signal.SIGKILL
    survivor = ended[1 - killed]
    assert survivor.code == 1
    assert survivor.late_seconds < LIMIT_SECONDS
    assert f"rank {killed}" in survivor.text
    assert "ended without a word" in survivor.text
    assert f"Rank {1 - killed} waited" in survivor.text
    assert "microbatch" in survivor.text
