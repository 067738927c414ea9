"""Child processes that run a module of this package and are ended whatever happens.

Each child leads a process group of its own, so that what it started (a solver's program, say) ends with it. Its output
goes to a file: nothing waits for a full pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Variables of a launcher, which would make a child believe that it is a rank of another run.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a child ended.

    Attributes:
        code: exit status; negative for a signal; None if it was ended here because it took too long.
        output: standard output and error together.
    """

    code: int | None
    output: str


def start_module(
    module: str, argument: str, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m module argument` with its output in `log`."""
    variables = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    variables |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(environment or {})}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


def end_processes(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all children that still run, with what they started, and wait for them."""
    for child in children:
        # The group outlives its leader where that started something.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()


def run_modules(
    calls: Mapping[str, tuple[str, str]],
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Ended]:
    """Run several modules side by side.

    Args:
        calls: {name: (module, argument)}.
        timeout_seconds: from now, for all of them together.
        environment: additional variables.

    Returns:
        {name: how it ended}, in the order of `calls`.
    """
    deadline = time.monotonic() + timeout_seconds
    children: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="entrain-child-") as scratch:
        log = {name: Path(scratch) / f"log{number}" for number, name in enumerate(calls)}
        try:
            for name, (module, argument) in calls.items():
                children[name] = start_module(module, argument, log[name], environment)
            while time.monotonic() < deadline and any(child.poll() is None for child in children.values()):
                time.sleep(0.02)
            codes = {name: child.poll() for name, child in children.items()}
        finally:
            end_processes(list(children.values()))
        outputs = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in log.items()}
    return {name: Ended(code=codes[name], output=outputs[name]) for name in calls}


def run_together(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Run a module in several processes that need each other; all have ended on return.

    Args:
        module: run once per argument.
        arguments: of the processes.
        folder: for their output: `log0`, `log1` and so on.
        timeout_seconds: for all of them.
        environment: additional variables.

    Returns:
        What failed first, in words; None if nothing did.
    """
    deadline = time.monotonic() + timeout_seconds
    children: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log{number}" for number in range(len(arguments))]
    try:
        for argument, log in zip(arguments, logs, strict=True):
            children.append(start_module(module, argument, log, environment))
        while True:
            codes = [child.poll() for child in children]
            # The first to fail says why; others fail for want of it.
            for number, code in enumerate(codes):
                if code:
                    return f"process {number} ended with status {code}:\n{_last_lines(logs[number])}"
            waiting = [number for number, code in enumerate(codes) if code is None]
            if not waiting:
                return None
            if time.monotonic() > deadline:
                return f"processes {waiting} did not finish in time:\n{_last_lines(logs[waiting[0]])}"
            time.sleep(0.02)
    finally:
        end_processes(children)


def _last_lines(path: Path, count: int = 20) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
