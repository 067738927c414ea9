"""Processes for tests that begin with everything imported.

They are forked from a server that has imported what `preloaded.py` names, so each begins in a tenth of a second instead
of the several seconds that importing torch, Lightning and Transformers takes. The server runs nothing else: every
process is as clean as a new interpreter, with one torch thread and the environment of its caller at that moment.

Tests that are about how processes are launched start an interpreter instead.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from multiprocessing import reduction
from pathlib import Path

#: Read by libraries when they are imported, so it has to hold for the server.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@cache
def processes():
    """The context whose processes are forked from the server, which starts here."""
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join(filter(None, places)))
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environments_of_ranks(world_size):
    """What `torchrun` tells each of the processes it starts on one machine."""
    shared = {"WORLD_SIZE": str(world_size), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


class _Descriptor:
    """A file of this process that a new one is to own; it arrives there as a number."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(passed):
    return passed.detach()


def start(target, *args, environment=(), output=(1, 2), daemon=True, context=None):
    """Start `target(*args)`, a function of a module, in a process that has what one of this process's would have.

    That is this process's environment, changed by `environment`, and its `output`: descriptors of stdout and stderr.
    A `context` of multiprocessing takes the place of the server's.
    """
    variables = {**os.environ, **ENVIRONMENT, **dict(environment)}
    streams = [_Descriptor(number) for number in output]
    process = (context or processes()).Process(target=_begin, args=(variables, streams, target, args), daemon=daemon)
    process.start()
    return process


def _begin(variables, streams, target, args):
    import torch

    os.environ.clear()
    os.environ.update(variables)
    for number, (name, given) in enumerate(zip(("stdout", "stderr"), streams, strict=True), 1):
        os.dup2(given, number)
        if given > 2:
            os.close(given)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    torch.set_num_threads(1)
    target(*args)


class ModuleRun:
    """`python -m NAME ARGUMENTS` in a folder, without the time of its imports."""

    def __init__(self, name, arguments, *, folder, environment):
        self.command = [sys.executable, "-m", name, *arguments]
        pipes = [os.pipe(), os.pipe()]
        writers = [writer for _, writer in pipes]
        self.process = start(
            _be_module, name, arguments, folder, environment=environment, output=writers, daemon=False
        )  # fmt: skip
        for writer in writers:
            os.close(writer)
        self.texts = [b"", b""]
        self.threads = [threading.Thread(target=self._drain, args=(n, pipes[n][0]), daemon=True) for n in range(2)]
        for thread in self.threads:
            thread.start()

    def _drain(self, number, reader):
        with open(reader, "rb") as file:
            while part := file.read1():
                self.texts[number] += part

    def wait(self, timeout_seconds):
        """The CompletedProcess, once all that holds its output open has ended, as `subprocess.run` waits."""
        deadline = time.monotonic() + timeout_seconds
        for thing in (self.process, *self.threads):
            thing.join(max(0.0, deadline - time.monotonic()))
        if self.process.exitcode is None or any(thread.is_alive() for thread in self.threads):
            self.process.kill()
            raise subprocess.TimeoutExpired(self.command, timeout_seconds, *self.texts)
        stdout, stderr = (text.decode() for text in self.texts)
        return subprocess.CompletedProcess(self.command, self.process.exitcode, stdout, stderr)


def _be_module(name, arguments, folder):
    """Run a module as `python -m` does, and end the process as an interpreter ends."""
    os.chdir(folder)
    sys.modules.pop(name, None)
    sys.argv = [name, *arguments]
    try:
        # It becomes __main__, by whose name Lightning launches the other ranks.
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
