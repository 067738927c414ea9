"""Run a function on several gloo ranks, and re-raise the first failure with its own traceback."""

import os
import socket
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank_main(rank, world_size, port, fn, args, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        results.put((rank, fn(*args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run_ranks(fn, world_size, *args, timeout_seconds=120):
    """Call `fn(*args)` on every rank of a fresh process group; return the results by rank.

    `fn` must be importable (module level). Raises RuntimeError with the traceback of the first rank that failed, and
    TimeoutError if the ranks do not finish in time.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, port, fn, args, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found, deadline = {}, time.monotonic() + timeout_seconds
    try:
        while len(found) < world_size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(found))} did not finish")
            if results.empty():
                time.sleep(0.05)
                continue
            rank, value, error = results.get()
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            found[rank] = value
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(world_size)]
