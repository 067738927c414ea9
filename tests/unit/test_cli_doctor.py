"""`entrain doctor` says what is missing, survives what hangs or crashes, and runs a step over two processes."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from entrain_opt.cli import doctor, doctor_checks
from entrain_opt.cli.main import main
from entrain_opt.cli.packages import Package, installed_version, read_packages
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime import self_check
from entrain_opt.runtime.children import run_modules

REAL_VERSION = metadata.version


@pytest.fixture
def versions(monkeypatch):
    """Pretend that packages have other versions, or are missing (None)."""

    def pretend(changes):
        def version(name):
            if name not in changes:
                return REAL_VERSION(name)
            if changes[name] is None:
                raise metadata.PackageNotFoundError(name)
            return changes[name]

        monkeypatch.setattr(metadata, "version", version)

    return pretend


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_the_whole_command(capsys):
    """On a machine that runs this suite, all that training needs is there."""
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert (code, report["ok"]) == (0, True), [f for f in report["findings"] if f["status"] == "FAILED"]
    assert {findings[name]["status"] for name in ("torch", "CP-SAT", "HiGHS", "compiled code", "gloo")} == {"ok"}
    assert findings["torch"]["detail"] == REAL_VERSION("torch")
    assert "gradients within" in findings["two processes"]["detail"]


def test_missing_and_old_packages_are_named_with_the_command_that_fixes_them(versions, monkeypatch):
    versions({"numba": None, "pulp": "2.9", "peft": None, "soxr": "0.1"})
    monkeypatch.setattr(doctor, "probe", lambda packages, timeout_seconds: [])
    findings = by_name(doctor.examine())
    assert (findings["numba"].status, findings["numba"].detail) == ("FAILED", "not installed, expected >=0.60")
    assert findings["numba"].fix == f'{sys.executable} -m pip install "numba>=0.60"'
    assert (findings["pulp"].status, findings["pulp"].detail) == ("FAILED", "2.9, expected >=3")
    assert (findings["peft"].status, findings["soxr"].status) == ("note", "note")
    assert "LoRA" in findings["peft"].detail
    assert findings["torch"].status == "ok"
    # What would fail for want of them is not started.
    assert findings["two processes"].detail == "not run, because of pulp, numba"
    text = doctor.as_text(list(findings.values()))
    assert "Not ready: pulp, numba, two processes." in text
    assert "-> " + findings["numba"].fix in text


def test_exit_code_and_text_of_a_failure(versions, monkeypatch, capsys):
    versions({"numba": None})
    monkeypatch.setattr(doctor, "probe", lambda packages, timeout_seconds: [])
    assert main(["doctor"]) == 1
    assert "FAILED  numba" in capsys.readouterr().out


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_compromised_releases_are_refused_before_anything_is_imported(release, versions, monkeypatch, capsys):
    versions({"pytorch-lightning": release})

    def started(*arguments, **settings):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    assert main(["doctor", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["status"] == "FAILED"
    assert f"pytorch-lightning {release} is a compromised release" in finding["detail"]
    assert "pytorch-lightning>=2.6.4" in finding["fix"]
    for command in ("fit", "validate", "rehearse"):
        assert main([command, "--config", "recipes/quickstart.yaml"]) == 1
        assert "compromised release" in capsys.readouterr().err


def test_releases_around_the_compromised_ones_are_not_refused(versions):
    versions({"pytorch-lightning": "2.6.4"})
    assert doctor_checks.check_compromised() == []
    versions({"pytorch-lightning": None})
    assert doctor_checks.check_compromised() == []


def test_what_hangs_crashes_or_raises_is_reported_and_ended(tmp_path, monkeypatch):
    modules = {
        "torch": "import time; time.sleep(3600)",
        "ortools": "raise ImportError('libortools.so: cannot open')",
        "pulp": "import os; os.abort()",
        "fine": "",
        "raises": "raise ValueError('odd')",
        "crashes": "import os; os._exit(3)",
        "after": "",
    }
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    packages = [
        Package(name=name, specifier=">=1", version="1", fits=True, optional=name == "raises")
        for name in ("fine", "raises", "crashes", "after")
    ]
    findings = by_name(doctor_checks.probe(packages, timeout_seconds=6))
    assert findings["CUDA"].detail == "no answer in time; ended"
    assert "libortools.so: cannot open" in findings["CP-SAT"].detail
    assert findings["HiGHS"].detail.startswith("ended with status -6")
    assert (findings["CUDA"].status, findings["CP-SAT"].status, findings["HiGHS"].status) == ("FAILED",) * 3
    assert (findings["CBC"].status, "ilp-highs" in findings["CBC"].fix) == ("note", True)
    assert "fine" not in findings
    assert findings["raises"].detail == "installed, but cannot be imported: ValueError: odd"
    assert (findings["raises"].status, findings["crashes"].status) == ("note", "FAILED")
    assert "ended the process that imported it" in findings["crashes"].detail
    assert "was not reached" in findings["after"].detail


def test_children_of_children_end_too(tmp_path, monkeypatch):
    marker = tmp_path / "pid"
    lines = [
        "import subprocess, time",
        "child = subprocess.Popen(['sleep', '3600'])",
        f"open({str(marker)!r}, 'w').write(str(child.pid))",
        "time.sleep(3600)",
    ]
    (tmp_path / "spawns.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    ended = run_modules({"spawns": ("spawns", "")}, timeout_seconds=4)
    assert ended["spawns"].code is None
    state = subprocess.run(["ps", "-o", "state=", "-p", marker.read_text()], capture_output=True, text=True).stdout
    assert state.strip() in ("", "Z")  # Gone, or a zombie that nobody has waited for.


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    calls = {"cache": ("entrain_opt.cli.doctor_probe", "cache")}
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "file")}
    ended = run_modules(calls, timeout_seconds=60, environment=environment)["cache"]
    finding = doctor_checks.cache_finding(doctor_checks.answers_of(ended), ended)
    assert (finding.status, "NUMBA_CACHE_DIR" in finding.fix) == ("FAILED", True)
    assert f"{tmp_path}/file" in finding.detail


def test_the_list_of_packages_is_the_projects_own():
    packages = {package.name: package for package in read_packages()}
    assert packages["torch"].module == "torch"
    assert packages["pillow"].module == "PIL"
    assert "pytest" not in packages
    assert {name for name, package in packages.items() if package.optional} == set(doctor_checks.NEEDED_FOR)
    assert installed_version("no-such-distribution") is None


def test_without_the_project_file_the_installation_says_what_is_needed(tmp_path, monkeypatch):
    from entrain_opt.cli import packages

    monkeypatch.setattr(packages, "__file__", str(tmp_path / "a" / "b" / "packages.py"))
    lines = ["torch>=2.11", 'peft>=0.17; extra == "lora"', 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    found = {package.name: package.optional for package in packages.read_packages()}
    assert found == {"torch": False, "peft": True}

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    with pytest.raises(RuntimeConfigError, match="entrain-opt is not installed"):
        packages.read_packages()


def test_a_self_check_that_fails_is_a_result(monkeypatch):
    result = self_check.run_self_check(timeout_seconds=0.3)
    assert result.error is not None
    assert "did not finish in time" in result.error
    monkeypatch.setattr(self_check, "_config", lambda: {"model_type": "nonsense"})
    result = self_check.run_self_check()
    assert result.error is not None
    assert "ended with status 1" in result.error
    assert "nonsense" in result.error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"errors": {"a": 1e-7, "b": 2e-3}}, "the gradient of b differs by 2.0e-03"),
        ({"errors": {"a": 1e-7, "b": float("nan")}}, "the gradient of b differs by nan"),
        ({"errors": {"a": 1e-7}}, "no rank has a gradient of b"),
        ({"loss": 2.6}, "the loss is 2.6"),
    ],
)
def test_differences_are_named(change, message):
    whole = {"loss": 2.5, "plain_loss": 2.5, "trained": ["a", "b"], "errors": {"a": 1e-7, "b": 1e-7}, **change}
    result = self_check.judge([whole], 1.0)
    assert (result.error is None) if message is None else (message in (result.error or ""))
