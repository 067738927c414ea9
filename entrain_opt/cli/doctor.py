"""`entrain doctor`: is this machine ready? Versions, devices, solvers, and a training step over two processes.

Promise: it says what is missing and what to run, and exits with 0 only if training works here. It never hangs: whatever
could runs in a child process with a time limit, and every child is ended. It works where packages are missing or
broken, and imports nothing of a compromised release. Price: about 15 seconds, most of it the self-check.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from entrain_opt.cli.doctor_checks import FAILED, OK, Finding, check_compromised, check_packages, probe

_SECTIONS = ("packages", "optional", "machine", "solvers", "cache", "self-check")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `doctor` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check versions, devices and solvers, and run a step over two processes"
    )
    _add_arguments(parser)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    parser.add_argument("--no-self-check", action="store_true", help="leave out the step over two processes")
    parser.add_argument(
        "--timeout-seconds", type=float, default=120.0, metavar="S", help="after which a check has failed (default 120)"
    )
    parser.set_defaults(run=run)


def main(arguments: Sequence[str]) -> int:
    """The command alone: the others' packages may be what is missing."""
    parser = argparse.ArgumentParser(prog="entrain doctor", description=__doc__)
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Check everything and print it; 0 if nothing that training needs is missing, else 1."""
    findings = examine(timeout_seconds=arguments.timeout_seconds, self_check=not arguments.no_self_check)
    failed = [finding for finding in findings if finding.status == FAILED]
    if arguments.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(as_text(findings))
    return 1 if failed else 0


def examine(*, timeout_seconds: float = 120.0, self_check: bool = True) -> list[Finding]:
    """All findings, by section.

    Args:
        timeout_seconds: of the probes together, and of the self-check.
        self_check: whether to run it; it is left out, and said so, where a package it needs is missing.
    """
    # First and alone: nothing of such a release may run, not even its import.
    if compromised := check_compromised():
        return compromised
    findings, packages = check_packages()
    findings += probe(packages, timeout_seconds=timeout_seconds)
    findings = _latest(findings)
    if self_check:
        findings.append(_self_check(findings, timeout_seconds))
    return sorted(findings, key=lambda finding: _SECTIONS.index(finding.section))


def _latest(findings: list[Finding]) -> list[Finding]:
    """One finding per section and name: that a package cannot be imported takes the place of its version."""
    return list({(finding.section, finding.name): finding for finding in findings}.values())


def _self_check(findings: list[Finding], timeout_seconds: float) -> Finding:
    missing = [f.name for f in findings if f.status == FAILED and f.section == "packages"]
    if missing:
        detail = f"not run, because of {', '.join(missing)}"
        return Finding(section="self-check", name="two processes", status=FAILED, detail=detail, fix="see above")
    from entrain_opt.runtime.self_check import TOLERANCE, run_self_check

    result = run_self_check(timeout_seconds)
    if result.error is not None:
        return Finding(
            section="self-check",
            name="two processes",
            status=FAILED,
            detail=result.error,
            fix="look at the first error above; on a busy machine give --timeout-seconds more",
        )
    return Finding(
        section="self-check",
        name="two processes",
        status=OK,
        detail=f"one step in {result.seconds:.0f} s: {result.num_gradients} gradients within "
        f"{result.largest_error:.0e} of the plain model's in one process (limit {TOLERANCE:g})",
    )


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, one more for what helps, and a verdict."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in findings)
    for section in _SECTIONS:
        of_section = [finding for finding in findings if finding.section == section]
        lines += [section] if of_section else []
        for finding in of_section:
            lines.append(f"  {finding.status:6}  {finding.name:{width}}  {finding.detail}")
            lines += [f"  {'':6}  {'':{width}}  -> {finding.fix}"] if finding.fix else []
    failed = [finding.name for finding in findings if finding.status == FAILED]
    if failed:
        lines += ["", f"Not ready: {', '.join(failed)}. The lines marked -> say what to do."]
    else:
        lines += ["", "Ready."]
    return "\n".join(lines)
