"""Real ranks for tests of faults: each runs the `entrain` command in a process of its own, with its own stderr.

They are started as `torchrun` would, so no launcher hides what a rank does by itself.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from server import environments_of_ranks, start

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code (-9: killed), what it wrote, seconds from the first rank's end to its own."""

    code: int
    text: str
    late_seconds: float


def _rank_main(rank, folder, arguments, fault, program):
    os.chdir(folder)
    from entrain_opt.cli.main import main

    if fault is not None:
        fault(rank)
    sys.argv = ["entrain", *arguments]
    code = main(arguments) if program is None else program()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(folder, recipe, *arguments, world_size=2, command="fit", fault=None, program=None):
    """Start `entrain COMMAND`, or a function `program` in its place, on every rank.

    `fault(rank)` runs in each before the command. Both must be importable (module level).
    """
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    line = [command, "--config", "recipe.yaml", *arguments]
    processes = []
    for rank, environment in enumerate(environments_of_ranks(world_size)):
        with open(folder / f"rank{rank}.txt", "w") as output:
            processes.append(
                start(
                    _rank_main, rank, folder, line, fault, program, environment=environment,
                    output=[output.fileno()] * 2, daemon=False,
                )
            )  # fmt: skip
    return processes


def wait_ranks(folder, processes, *, timeout_seconds=240):
    """Wait until all ranks have ended; kills them and raises TimeoutError if they do not."""
    deadline = time.monotonic() + timeout_seconds
    ends = {}
    while len(ends) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.monotonic()
        if time.monotonic() > deadline:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            texts = "\n".join((folder / f"rank{rank}.txt").read_text() for rank in range(len(processes)))
            raise TimeoutError(f"ranks {sorted(set(range(len(processes))) - set(ends))} did not end\n{texts}")
        time.sleep(0.02)
    first = min(ends.values())
    return [
        Ended(process.exitcode, (folder / f"rank{rank}.txt").read_text(), ends[rank] - first)
        for rank, process in enumerate(processes)
    ]


def run_ranks_to_end(folder, recipe, *arguments, **options):
    return wait_ranks(folder, start_ranks(folder, recipe, *arguments, **options))
