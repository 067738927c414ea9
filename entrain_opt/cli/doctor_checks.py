"""The checks of `entrain doctor`: each returns findings, and none raises for what it finds.

Versions are read from metadata before anything is imported. Whatever imports a package or touches a device runs in
child processes with a time limit (`doctor_probe.py`), side by side.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entrain_opt.cli.packages import NEEDED_FOR, Package, compromised_packages, installed_version, read_packages
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.children import Ended, run_modules
from entrain_opt.units import format_bytes

_PROBE = "entrain_opt.cli.doctor_probe"
_SOLVERS = {"CP-SAT": ("cp-sat", "ortools"), "HiGHS": ("pulp:highs", "highspy"), "CBC": ("pulp:cbc", "pulp")}
#: The optimum of the problem that every solver is given.
_OPTIMUM = 7.0
OK, NOTE, FAILED = "ok", "note", "FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's answer.

    Attributes:
        section: `packages`, `machine`, `solvers`, `optional`, `cache` or `self-check`.
        name: of what was looked at.
        status: `ok`; `note` for what only some uses need; `FAILED` for what training needs.
        detail: what was found.
        fix: the command or action that helps; empty where nothing is wrong.
    """

    section: str
    name: str
    status: str
    detail: str
    fix: str = ""


def check_compromised() -> list[Finding]:
    """One finding per compromised release; nothing may be imported if there is one."""
    return [
        Finding(
            section="packages",
            name="pytorch-lightning",
            status=FAILED,
            detail=sentence,
            fix=f'{sys.executable} -m pip install "pytorch-lightning>=2.6.4"',
        )
        for sentence in compromised_packages()
    ]


def check_packages() -> tuple[list[Finding], list[Package]]:
    """Versions of what is required and of the extras; with the packages that are there."""
    findings = [_python()]
    if installed_version("packaging") is None:
        fix = f"{sys.executable} -m pip install packaging"
        missing = Finding(section="packages", name="packaging", status=FAILED, detail="not installed", fix=fix)
        return [*findings, missing], []
    try:
        packages = read_packages()
    except RuntimeConfigError as error:
        fix = f"{sys.executable} -m pip install -e ."
        lost = Finding(section="packages", name="entrain-opt", status=FAILED, detail=str(error), fix=fix)
        return [*findings, lost], []
    for package in packages:
        wanted = f", expected {package.specifier}" if package.specifier else ""
        detail = f"{package.version or 'not installed'}{'' if package.fits else wanted}"
        if package.optional:
            detail += f"; for {NEEDED_FOR[package.name]}"
        findings.append(
            Finding(
                section="optional" if package.optional else "packages",
                name=package.name,
                status=OK if package.fits else NOTE if package.optional else FAILED,
                detail=detail,
                fix="" if package.fits else package.fix,
            )
        )
    return findings, [package for package in packages if package.version is not None]


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    return Finding(
        section="packages",
        name="python",
        status=OK if fits else FAILED,
        detail=f"{platform.python_version()} at {sys.executable}{'' if fits else ', expected >=3.11'}",
        fix="" if fits else "install Python 3.11 or newer and make the environment with it",
    )


def probe(packages: Sequence[Package], *, timeout_seconds: float) -> list[Finding]:
    """Import every package, look at the devices, solve with every solver, write to the cache: all at once.

    Args:
        packages: that are installed.
        timeout_seconds: after which what has not answered has failed.
    """
    names = [package.module for package in packages]
    # Not needed, but every image processor imports it where it is there.
    names += ["torchvision"] if installed_version("torchvision") is not None else []
    calls = {
        "packages": (_PROBE, f"packages:{','.join(names)}"),
        "devices": (_PROBE, "devices"),
        "cache": (_PROBE, "cache"),
    }
    calls |= {name: (_PROBE, argument) for name, (argument, _) in _SOLVERS.items()}
    ended = run_modules(calls, timeout_seconds=timeout_seconds)
    answers = {name: answers_of(end) for name, end in ended.items()}
    findings = list(_broken_imports(answers["packages"], packages))
    findings += _machine(answers["devices"], ended["devices"])
    findings += _solvers({name: answers[name] for name in _SOLVERS}, ended)
    findings.append(cache_finding(answers["cache"], ended["cache"]))
    return findings


def answers_of(end: Ended) -> list[dict[str, Any]]:
    """The JSON lines of a probe; libraries print lines of their own in between."""
    found = []
    for line in end.output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def _reason(end: Ended) -> str:
    """Why a probe gave no answer."""
    if end.code is None:
        return "no answer in time; ended"
    lines = [line for line in end.output.splitlines() if line.strip()]
    return f"ended with status {end.code}: {lines[-1] if lines else 'no output'}"


def _broken_imports(answers: list[dict[str, Any]], packages: Sequence[Package]) -> Iterator[Finding]:
    errors = {answer["module"]: answer["error"] for answer in answers}
    by_module = {package.module: package for package in packages}
    for module in [*by_module, *(["torchvision"] if "torchvision" in errors else [])]:
        error = errors.get(module, "was not reached: an import before it did not end")
        if error is None:
            continue
        package = by_module.get(module)
        optional = package is not None and package.optional
        fix = f"{sys.executable} -m pip install --force-reinstall {package.name if package else module}"
        if package is None:
            fix = f"{sys.executable} -m pip uninstall torchvision (not needed; a broken one breaks image processors)"
        yield Finding(
            section="optional" if optional else "packages",
            name=package.name if package else module,
            status=NOTE if optional else FAILED,
            detail=f"installed, but cannot be imported: {error}",
            fix=fix,
        )


def _machine(answers: list[dict[str, Any]], end: Ended) -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [
        Finding(
            section="machine",
            name="CPU",
            status=OK,
            detail=f"{cores} cores, {format_bytes(_memory_bytes())} of memory, {platform.machine()}",
        )
    ]
    if not answers:
        fix = f"{sys.executable} -c 'import torch; torch.cuda.is_available()' shows the error; then nvidia-smi"
        lost = Finding(section="machine", name="CUDA", status=FAILED, detail=_reason(end), fix=fix)
        return [*findings, lost]
    found = answers[-1]
    if not found["devices"]:
        built = found["built_with_cuda"]
        why = "torch is built without it" if built is None else f"torch is built for CUDA {built}, but sees no device"
        findings.append(Finding(section="machine", name="CUDA", status=NOTE, detail=f"no devices: {why}; CPU is used"))
    for index, device in enumerate(found["devices"]):
        bf16 = "bf16" if device["bf16"] else "no bf16: use 32-true"
        detail = f"{device['name']}, {format_bytes(device['bytes'])}, {bf16}"
        findings.append(Finding(section="machine", name=f"cuda:{index}", status=OK, detail=detail))
    if found["devices"]:
        findings.append(
            Finding(
                section="machine",
                name="NCCL",
                status=OK if found["nccl"] else FAILED,
                detail=found["nccl"] or "torch is built without it; GPUs cannot exchange tensors",
                fix="" if found["nccl"] else "install a build of torch with CUDA for Linux",
            )
        )
    findings.append(
        Finding(
            section="machine",
            name="gloo",
            status=OK if found["gloo"] else FAILED,
            detail="available"
            if found["gloo"]
            else "torch is built without it; processes on CPU cannot exchange tensors",
            fix="" if found["gloo"] else "install a build of torch with torch.distributed",
        )
    )
    return findings


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _solvers(answers: dict[str, list[dict[str, Any]]], ended: dict[str, Ended]) -> list[Finding]:
    findings = []
    for name, (_, package) in _SOLVERS.items():
        found = answers[name][-1] if answers[name] else None
        solved = found is not None and found["status"] == "OPTIMAL" and found["value"] == _OPTIMUM
        detail = f"{package} {installed_version(package)} solves a small problem"
        if not solved and found is not None:
            detail = f"status {found['status']}, value {found['value']}; expected OPTIMAL, {_OPTIMUM:g}"
        elif not solved:
            detail = _reason(ended[name])
        fix = f"{sys.executable} -m pip install --force-reinstall {package}"
        if name == "CBC":
            # Only `method: ilp-cbc` asks for it, and its program is a file of PuLP that may lack permission to run.
            detail += "" if solved else "; only method ilp-cbc needs it"
            fix += ", or use method ilp-highs"
        status = OK if solved else NOTE if name == "CBC" else FAILED
        findings.append(Finding(section="solvers", name=name, status=status, detail=detail, fix="" if solved else fix))
    return findings


def cache_finding(answers: list[dict[str, Any]], end: Ended) -> Finding:
    if not answers:
        detail = f"cannot be looked at: {_reason(end)}"
        return Finding(section="cache", name="compiled code", status=FAILED, detail=detail, fix="see packages above")
    found = answers[-1]
    if found["error"] is not None:
        return Finding(
            section="cache",
            name="compiled code",
            status=FAILED,
            detail=f"{found['folder']} cannot be written to: {found['error']}",
            fix="export NUMBA_CACHE_DIR=/a/folder/of/yours; without one every start compiles for a minute",
        )
    kept = "; in the temporary folder, so it is compiled anew when that is emptied" if found["is_temporary"] else ""
    return Finding(section="cache", name="compiled code", status=OK, detail=f"kept in {found['folder']}{kept}")
