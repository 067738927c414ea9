"""A function over many tasks: here, in processes of this machine, or on a Ray cluster.

Local workers are plain child processes that read pickled tasks from their standard input and write results to their
standard output. So a script needs no `if __name__ == "__main__"`, a worker that dies is noticed at once (a
multiprocessing pool would wait forever), and if this process is killed, the workers read the end of their input and go.

Promise: every result exactly once, in any order; an error in a worker is raised here. Price: 3 to 5 seconds to start
(imports), one pickle each way per task.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any, BinaryIO, Literal

from entrain_opt.errors import EntrainError, RuntimeConfigError, WorkloadError

Engine = Literal["local", "ray"]
#: `(function, tasks) -> iterator of (task index, result)`, in the order of completion.
Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[tuple[int, Any]]]

_SERVE = "from entrain_opt.workload.workers import serve; serve()"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_workers(num_workers: int, engine: Engine) -> Iterator[Mapper]:
    """A function `(function, tasks) -> iterator of (task index, result)`, results in the order of completion.

    Args:
        num_workers: processes; 0 works in this one. With Ray, 0 takes every core of the cluster.
        engine: `local`, or `ray` for the cluster that RAY_ADDRESS names (this machine if it names none), whose machines
            all see the files.

    Raises:
        RuntimeConfigError: Ray is asked for and not installed, or the engine is unknown.
        WorkloadError: a worker ended (out of memory, killed).
    """
    if engine not in ("local", "ray"):
        raise RuntimeConfigError(f"engine: expected local or ray, found {engine!r}.")
    if num_workers < 0:
        raise RuntimeConfigError(f"num_workers: expected at least 0, found {num_workers}.")
    if engine == "ray":
        try:
            from ray.util.multiprocessing import Pool
        except ImportError as error:
            raise RuntimeConfigError(
                "engine: ray is not installed. Install it with `pip install entrain-opt[ray]`, or use engine local."
            ) from error
        with Pool(num_workers or None) as pool:
            yield lambda function, tasks: _raised(
                pool.imap_unordered(_numbered, [(function, *t) for t in enumerate(tasks)])
            )
    elif num_workers == 0:
        yield lambda function, tasks: ((index, function(task)) for index, task in enumerate(tasks))
    else:
        processes: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        workers = [_Worker() for _ in range(num_workers)]
        for worker in workers:
            processes.put(worker)

        def call(task: tuple[int, Callable[[Any], Any], Any]) -> tuple[int, Any]:
            index, function, value = task
            worker = processes.get()
            try:
                return index, worker.call(function, value)
            finally:
                processes.put(worker)

        pool = ThreadPool(num_workers)
        try:
            yield lambda function, tasks: pool.imap_unordered(
                call, [(i, function, task) for i, task in enumerate(tasks)]
            )
        finally:
            for worker in workers:
                worker.end()  # First, so that no thread waits for a worker any more.
            pool.terminate()


def _numbered(task: tuple[Callable[[Any], Any], int, Any]) -> tuple[int, Any]:
    """The result, or our own error as a value: Ray would bury its message in a traceback."""
    function, index, value = task
    try:
        return index, function(value)
    except EntrainError as error:
        return index, error


def _raised(results: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    for index, result in results:
        if isinstance(result, EntrainError):
            raise result
        yield index, result


class _Worker:
    """One child process."""

    def __init__(self) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def call(self, function: Callable[[Any], Any], value: Any) -> Any:
        """The function's result in the child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((function, value), self._process.stdin)
            self._process.stdin.flush()
            error, result = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as lost:
            raise WorkloadError(
                f"index: a worker process ended with code {self._process.wait()} while it worked on {value}. Was it "
                "out of memory? Start again with fewer --num-workers; what is measured is kept."
            ) from lost
        if isinstance(error, EntrainError):
            raise error
        if error is not None:
            raise RuntimeError(f"in a worker process:\n{error}")
        return result

    def end(self) -> None:
        """The child has ended."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # A task that was being sent when the work was given up.


def serve() -> None:
    """Answer tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides, and ends its workers.
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not get between the answers.
    while True:
        try:
            function, value = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error: EntrainError | str | None = None
        result = None
        try:
            result = function(value)
        except EntrainError as found:
            error = found
        except Exception:
            error = traceback.format_exc()
        try:
            pickle.dump((error, result), answers)
            answers.flush()
        except BrokenPipeError:
            return
