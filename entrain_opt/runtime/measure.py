"""Times the real layers of a model on the device at hand, with as many processes busy as in training.

1. One worker process per process that training keeps busy is started; all measure the same thing at the same time,
   because processes of one machine share caches and memory bandwidth.
2. Each times embeddings, layers, projector and head at a range of sizes (`measure_worker.py`), round after round
   within a time budget.
3. Medians over rounds, means over workers, and a non-negative least-squares line for each piece. On CPU a process's own
   time counts, not the clock's: a plan should not depend on what else ran for a moment.

Promise: what is timed is the code that the executor runs (`Family.encode`, `decode`, ...), of any family and of
composed models, with gradients where the frozen parts leave some. Price: about 17 seconds for models/tiny-llava on two
free cores, half of it start-up; twice that on busy ones. Messages are timed between two local processes over gloo;
where only one process is busy, or on CUDA, they are left to the cost model.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.precision import find_precision
from entrain_opt.cost.profile import MeasuredCosts, TimedPass, fit_line, machine_name
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.children import run_together
from entrain_opt.runtime.families import read_family
from entrain_opt.spec.model import ModelSpec, check_frozen
from entrain_opt.workload.media import media_rule

#: A worker that takes longer has failed.
_TOLERATED_SECONDS = 600


def measure_costs(
    model_folder: str | Path,
    *,
    frozen: Sequence[str] = (),
    num_processes_busy: int = 1,
    precision: str = "32-true",
    device: str = "cpu",
    budget_seconds: float = 4.0,
) -> MeasuredCosts:
    """Measure a model on this machine.

    Args:
        model_folder: Hugging Face folder of a family that the runtime knows; weights are not read.
        frozen: parts that do not train.
        num_processes_busy: processes that measure at the same time, one thread each on CPU.
        precision: Lightning's name of it.
        device: `cpu` or `cuda`.
        budget_seconds: spent on rounds, besides start-up (a few seconds) and at least two rounds.

    Raises:
        RuntimeConfigError: unknown family, precision or frozen part, no such device, or a worker failed.
    """
    check_frozen(frozen)
    find_precision(precision)
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise RuntimeConfigError(f"device: expected cpu, or cuda where there is one, found {device!r}.")
    if num_processes_busy < 1:
        raise RuntimeConfigError(f"num_processes_busy: expected at least 1, found {num_processes_busy}.")
    _check_model(model_folder, frozen)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="entrain-profile-") as scratch:
        request = {
            "model_folder": str(model_folder),
            "frozen": list(frozen),
            "precision": precision,
            "device": device,
            "budget_seconds": budget_seconds,
            "num_workers": num_processes_busy,
            "scratch": scratch,
        }
        results = _run_workers(request, Path(scratch))
    passes = combine_passes([result["passes"] for result in results])
    modules, residuals = fit_modules(passes)
    message, message_error = (
        (Line(), None)
        if "message" not in passes
        else fit_line(passes["message"], columns=("token_seconds", "fixed_seconds"))
    )
    if message_error is not None:
        residuals["message"] = message_error
    return MeasuredCosts(
        modules=modules,
        message_latency_seconds=message.fixed_seconds if message_error is not None else None,
        message_bytes_per_second=1 / message.token_seconds if message.token_seconds > 0 else None,
        step_seconds_per_parameter=passes["step"][0].seconds / passes["step"][0].tokens,
        action_seconds=passes["action"][0].seconds,
        residuals=residuals,
        device=machine_name() if device == "cpu" else torch.cuda.get_device_name(),
        num_threads=1,
        num_processes_busy=num_processes_busy,
        precision=precision,
        frozen=tuple(frozen),
        torch_version=str(torch.__version__),
        model=Path(model_folder).name,
        seconds_spent=time.perf_counter() - started,
    )


def _run_workers(request: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Results of all workers; what failed first is raised with its output."""
    ranks = range(request["num_workers"])
    failure = run_together(
        "entrain_opt.runtime.measure_worker",
        [json.dumps({**request, "rank": rank}) for rank in ranks],
        scratch,
        timeout_seconds=_TOLERATED_SECONDS,
        environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if failure is not None:
        raise RuntimeConfigError(f"measuring failed: {failure}\n`cost_model: analytic` does without.")
    return [json.loads((scratch / f"result{rank}.json").read_text()) for rank in ranks]


def combine_passes(results: list[dict[str, list[list[float]]]]) -> dict[str, list[TimedPass]]:
    """Means over the workers that timed a pass; they list the same passes in the same order."""
    combined: dict[str, list[TimedPass]] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        columns = zip(*(result[name] for result in results if name in result), strict=True)
        combined[name] = [
            TimedPass(
                squares=rows[0][0],
                tokens=rows[0][1],
                segments=rows[0][2],
                seconds=statistics.fmean(row[3] for row in rows),
            )
            for rows in columns
        ]
    return combined


def fit_modules(passes: dict[str, list[TimedPass]]) -> tuple[dict[str, ModuleCosts], dict[str, float]]:
    """Lines through timed passes named `module piece direction`, by module, and the error of each."""
    residuals: dict[str, float] = {}
    parts: dict[str, dict[str, dict[str, Line]]] = {}
    for name, timed in passes.items():
        if name.count(" ") != 2:
            continue
        module, piece, direction = name.split(" ")
        # Pieces without attention see no squares; nor do squares tell anything where all segments are of one length.
        columns: Sequence[str] = ("token_seconds", "fixed_seconds")
        if piece == "layer" and len({one.tokens / one.segments for one in timed}) > 1:
            columns = ("square_seconds", "token_seconds", "segment_seconds", "fixed_seconds")
        lines = parts.setdefault(module, {}).setdefault(piece, {})
        lines[direction], residuals[name] = fit_line(timed, columns=columns)
    modules = {
        module: ModuleCosts(**{piece: PartCosts(**lines) for piece, lines in pieces.items()})
        for module, pieces in parts.items()
    }
    return modules, residuals


def _check_model(model_folder: str | Path, frozen: Sequence[str]) -> None:
    """Raise RuntimeConfigError for a model that the runtime does not execute or whose media are unknown."""
    try:
        read_family(model_folder)
    except RuntimeConfigError as error:
        raise RuntimeConfigError(
            f"{error} What is not executed cannot be measured: plan for it with `cost_model: analytic`."
        ) from error
    ModelSpec.from_pretrained(model_folder, frozen=frozen)
    media_rule(model_folder)
