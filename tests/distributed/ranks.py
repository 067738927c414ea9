"""Run a function on several gloo ranks, and re-raise the first failure with its own traceback."""

import multiprocessing
import time
import traceback

import torch.distributed as dist
from server import free_port, processes, start


def _rank_main(rank, world_size, fn, args, results):
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        results.put((rank, fn(*args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run_ranks(fn, world_size, *args, timeout_seconds=120, new_interpreters=False):
    """Call `fn(*args)` on every rank of a fresh process group of new processes; return the results by rank.

    `fn` must be importable (module level). With `new_interpreters` a rank's memory is its own from the start, at the
    price of its imports; by default it is forked from the server of `server.py`. Raises RuntimeError with the traceback
    of the first rank that failed, and TimeoutError if the ranks do not finish in time.
    """
    context = multiprocessing.get_context("spawn") if new_interpreters else processes()
    results = context.Queue()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks = [
        start(
            _rank_main, rank, world_size, fn, args, results, environment={**shared, "RANK": str(rank)}, context=context
        )
        for rank in range(world_size)
    ]
    found, deadline = {}, time.monotonic() + timeout_seconds
    try:
        while len(found) < world_size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(found))} did not finish")
            if results.empty():
                time.sleep(0.02)
                continue
            rank, value, error = results.get()
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            found[rank] = value
        for process in ranks:
            process.join(timeout=30)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(world_size)]
