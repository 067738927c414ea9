"""Arrows between packages go one way, and nothing above the runtime imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import entrain_opt

ROOT = Path(entrain_opt.__file__).parent
# Top to bottom: a part imports only what stands before it.
ORDER = [
    "errors", "units", "compiled", "spec", "workload", "plan", "assignment", "cost", "schedule", "simulator",
    "assigner", "planner", "report", "runtime", "lightning", "cli",
]  # fmt: skip
TORCH_SIDE = {"runtime", "lightning", "cli"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_up_the_list_only(path):
    part = part_of(path)
    for name in imported_modules(path):
        pieces = name.split(".")
        if pieces[0] == "entrain_opt" and len(pieces) > 1 and pieces[1] in ORDER:
            assert ORDER.index(pieces[1]) <= ORDER.index(part), f"{path} imports {name}, which stands below it"
        if part not in TORCH_SIDE:
            assert pieces[0] not in {"torch", "pytorch_lightning"}, f"{path} imports {name}"


def test_every_part_has_a_place_in_the_order():
    assert {part_of(path) for path in FILES} <= set(ORDER)


def test_files_stay_small():
    too_long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not too_long


def test_planner_side_imports_without_torch():
    names = "SampleTable, ModelSpec, ClusterSpec, CostModel, BatchCosts, PipelineShape, Plan, Assignment, Timeline"
    code = (
        f"from entrain_opt import {names}\n"
        "from entrain_opt import solve_plan, assign_microbatches, simulate\n"
        "import sys\n"
        "assert 'torch' not in sys.modules and 'pytorch_lightning' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
