"""One check of `entrain doctor`, in a process of its own: `python -m entrain_opt.cli.doctor_probe NAME`.

What a check touches (a driver, a solver's library, a broken package) may crash or hang, which must not end the doctor.
Each prints JSON lines; the last one printed tells how far it came.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def import_packages(modules: str) -> None:
    """Import each of the comma-separated modules; say of each whether it worked."""
    for module in modules.split(","):
        _say(module=module, error="it ended the process that imported it")
        try:
            importlib.import_module(module)
        except Exception as error:  # A package may raise anything while it is imported; what it said is the result.
            _say(module=module, error=f"{type(error).__name__}: {error}")
        else:
            _say(module=module, error=None)


def describe_devices(_: str) -> None:
    """CUDA devices and the backends of torch.distributed."""
    import torch
    import torch.distributed as dist

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            devices.append({"name": properties.name, "bytes": properties.total_memory, "bf16": bf16})
    nccl = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    _say(built_with_cuda=torch.version.cuda, devices=devices, gloo=dist.is_gloo_available(), nccl=nccl)


def solve_cp_sat(_: str) -> None:
    """A problem of two variables whose optimum is known: 7."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    first, second = model.new_int_var(0, 3, "v0"), model.new_int_var(0, 3, "v1")
    model.add(2 * first + second <= 5)
    model.maximize(first + 2 * second)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 20.0
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    _say(status=solver.status_name(status), value=solver.objective_value)


def solve_with_pulp(name: str) -> None:
    """The same problem through PuLP with HiGHS or CBC."""
    import pulp

    problem = pulp.LpProblem("doctor", pulp.LpMaximize)
    first = pulp.LpVariable("v0", 0, 3, cat="Integer")
    second = pulp.LpVariable("v1", 0, 3, cat="Integer")
    problem += first + 2 * second
    problem += 2 * first + second <= 5
    solver_class = {"highs": pulp.HiGHS, "cbc": pulp.PULP_CBC_CMD}[name]
    solver = solver_class(msg=False, timeLimit=20, threads=1)
    if not solver.available():
        _say(status="not available", value=None)
        return
    status = problem.solve(solver)
    _say(status=pulp.LpStatus[status].upper(), value=pulp.value(problem.objective))


def write_to_cache(_: str) -> None:
    """Write a file where compiled code is kept."""
    from entrain_opt.compiled import cache_folder

    folder = cache_folder()
    _say(folder=str(folder), error="it could not be made")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-"):
            pass
    except OSError as error:
        _say(folder=str(folder), error=str(error))
        return
    _say(folder=str(folder), error=None, is_temporary=str(folder).startswith(tempfile.gettempdir()))


_PROBES: dict[str, Callable[[str], None]] = {
    "packages": import_packages,
    "devices": describe_devices,
    "cp-sat": solve_cp_sat,
    "pulp": solve_with_pulp,
    "cache": write_to_cache,
}


def main() -> None:
    """The argument is the name of the probe, a colon, and what it takes."""
    name, _, argument = sys.argv[1].partition(":")
    _PROBES[name](argument)


if __name__ == "__main__":
    main()
