"""Real ranks for tests of faults: each runs the `entrain` command in a process of its own, with its own stderr.

The processes are forked from a server that has imported everything, so a rank starts in a fraction of a second. They
are started as `torchrun` would, so no launcher hides what a rank does by itself.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code (-9: killed), what it wrote, seconds from the first rank's end to its own."""

    code: int
    text: str
    late_seconds: float


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank_main(folder, arguments, environment, output, fault, program):
    os.chdir(folder)
    os.environ.update(environment)
    for name in ("stdout", "stderr"):
        file = open(output, "a", buffering=1)  # noqa: SIM115
        os.dup2(file.fileno(), {"stdout": 1, "stderr": 2}[name])
        setattr(sys, name, file)
    import torch

    torch.set_num_threads(1)
    from entrain_opt.cli.main import main

    if fault is not None:
        fault(int(environment["RANK"]))
    sys.argv = ["entrain", *arguments]
    code = main(arguments) if program is None else program()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(folder, recipe, *arguments, world_size=2, command="fit", fault=None, program=None):
    """Start `entrain COMMAND`, or a function `program` in its place, on every rank.

    `fault(rank)` runs in each before the command. Both must be importable (module level).
    """
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytorch_lightning.cli", "entrain_opt.cli.fit", "entrain_opt.cli.main"])
    port = str(_free_port())
    processes = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        output = folder / f"rank{rank}.txt"
        output.write_text("")
        line = [command, "--config", "recipe.yaml", *arguments]
        process = context.Process(
            target=_rank_main, args=(folder, line, environment, output, fault, program), daemon=False
        )
        process.start()
        processes.append(process)
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
