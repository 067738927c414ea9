"""Measured traces: every action once, in order, on the clock of all ranks, in the form of the simulator's."""

import itertools
import json
from collections import Counter

import pytest
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, write_model
from processes import run_ranks_to_end
from ranks import run_ranks
from small import write_run

from entrain_opt.cost import CostModel
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.plan import ParallelDegrees, Plan, Provenance, StagePlan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.spans import SpanLog, merged_events, rank_trace
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.schedule.actions import Receive, Send
from entrain_opt.spec import ClusterSpec, ModelSpec

COMPUTE = {"forward", "backward", "backward_input", "backward_weight"}


def trace(plans):
    """On each rank: its trace of one step under each plan, and how many messages it sends and receives.

    None on a device that another one speaks for.
    """
    found = []
    for plan in plans:
        groups = make_groups(plan)
        model = build_rank_model(plan.model, plan, groups.pipeline_rank, seed=3, tensor=groups.tensor)
        reader = SyntheticReader(MIXED_TILES)
        batch = RankBatchBuilder(
            samples=reader.table(), reader=reader, family=model.family, plan=plan,
            cost_model=CostModel(ModelSpec.from_pretrained(plan.model), ClusterSpec(device="cpu")),
            replica=groups.replica, pipeline_rank=groups.pipeline_rank, keeps_timeline=groups.is_first_of_replica,
        ).build(list(range(10)))  # fmt: skip
        log = SpanLog()
        groups.waits.spans = log if groups.tensor.place == 0 else None
        IterationRunner(model, groups).train(batch)
        if groups.waits.spans is None:
            found.append(None)
            continue
        groups.waits.spans = None
        log.stepped(plan.pipeline_shape.stages_of_rank(groups.pipeline_rank), 0.0, 0.0)
        messages = Counter(type(action) for action in batch.actions)
        mine = rank_trace(log, replica=groups.replica, rank=groups.pipeline_rank, predicted=batch.timeline)
        found.append((mine, messages[Send], messages[Receive]))
    return found


def slices(events, processes):
    """Compute of the given processes: (process, thread, name, kind, stage) -> (start, duration)."""
    return {
        (event["pid"] - processes[0], event["tid"], event["name"], event["cat"], event["args"]["stage"]): (
            event["ts"],
            event["dur"],
        )
        for event in events
        if event["ph"] == "X" and event["cat"] in COMPUTE and event["pid"] in processes
    }


def check(plan, of_ranks):
    shape, replicas = plan.pipeline_shape, plan.degrees.data
    events = merged_events([mine for mine, *_ in of_ranks], shape)
    measured = slices(events, range(replicas))
    simulated = slices(events, range(replicas, 2 * replicas))
    # The same actions on the same threads, by name.
    assert measured.keys() == simulated.keys()
    assert len(measured) == sum(event["ph"] == "X" and event["cat"] in COMPUTE for event in events) / 2
    assert all(duration > 0 for _, duration in measured.values())
    # What a rank's thread does takes turns, and begins after all ranks agreed on the step.
    threads = {(mine.replica, mine.rank): [] for mine, *_ in of_ranks}
    for event in events:
        place = (event["pid"], event.get("tid"))
        if event["ph"] == "X" and event["cat"] in {*COMPUTE, "wait", "send"} and place in threads:
            threads[place].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "X" and event["cat"] in COMPUTE:
            assert event["ts"] >= 0
    for spans in threads.values():
        spans.sort()
        assert all(second[0] >= first[1] - 0.01 for first, second in itertools.pairwise(spans))
    # Every message leaves before it arrives, on one clock.
    of_phase = {phase: {e["id"]: e for e in events if e["ph"] == phase and e["cat"] == "message"} for phase in "sf"}
    assert len(of_phase["s"]) == sum(sends for _, sends, _ in of_ranks)
    assert len(of_phase["f"]) == sum(receives for *_, receives in of_ranks)
    assert of_phase["s"].keys() == of_phase["f"].keys()
    for number, sent in of_phase["s"].items():
        assert sent["ts"] < of_phase["f"][number]["ts"]
        assert sent["tid"] != of_phase["f"][number]["tid"]
    begun, ended = (Counter(e["id"] for e in events if e["ph"] == phase) for phase in "be")
    assert begun == ended == Counter(of_phase["f"].keys())
    assert json.loads(json.dumps(events)) == events
    return events


def test_two_stages_on_two_ranks_and_two_replicas(tmp_path):
    folder = write_model(tmp_path / "plain")
    plans = [
        make_plan(folder, SPLITS[2]),
        make_plan(folder, SPLITS[2], schedule="zero_bubble"),
        make_plan(folder, SPLITS[1], data=2),
    ]
    ranks = run_ranks(trace, 2, plans)
    for index, plan in enumerate(plans):
        events = check(plan, [found[index] for found in ranks])
    reductions = [event for event in events if event.get("cat") == "reduce" and event["pid"] < 2]
    # One per stage and replica, beside the compute.
    assert Counter((e["pid"], e["args"]["stage"]) for e in reductions) == Counter(
        (r, s) for r in (0, 1) for s in (0, 1)
    )
    assert {event["tid"] for event in reductions} == {1}


def test_devices_that_share_layers_are_one_thread(tmp_path):
    """The encoder's device serves two of the language model, the first of which is in the trace."""
    folder = write_model(tmp_path / "plain")
    plan = make_plan(folder, SPLITS[2], tensor=(1, 2))
    encoder, llm, silent = (found[0] for found in run_ranks(trace, 3, [plan]))
    assert silent is None
    shape = plan.pipeline_shape
    events = merged_events([encoder[0], llm[0]], shape)
    assert slices(events, [0]).keys() == slices(events, [1]).keys()
    assert len(slices(events, [0])) == sum(event.get("cat") in COMPUTE and event["pid"] == 0 for event in events)
    starts, ends = (Counter(e["id"] for e in events if e["ph"] == p and e["cat"] == "message") for p in "sf")
    assert starts == ends
    assert set(starts.values()) == {1}
    # Each activation is handed over twice; nothing but that is a send of the encoder's.
    sends = [e for e in events if e.get("cat") == "send"]
    assert Counter(e["tid"] for e in sends) == {0: 2 * encoder[1], 1: llm[1]}


def test_one_process_agrees_with_none(tmp_path):
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[1])
    check(plan, trace([plan]))


def test_chosen_steps_of_a_run_and_a_plan_that_no_longer_fits_its_data(tmp_path):
    """One file per chosen step; a plan made for other data is told from a better one, which is written."""
    recipe = write_run(
        tmp_path, global_batch_size=12, max_steps=8, plan="plan.yaml", trace_steps=[1, 9], drift_check_steps=1,
        num_microbatches=2, policy="pairwise",
    )  # fmt: skip
    stages = (
        StagePlan(module="vision", layers=(0, 1), rank=0),
        StagePlan(module="vision", layers=(1, 2), rank=1),
        StagePlan(module="llm", layers=(0, 2), rank=1),
    )
    Plan(
        model="model", degrees=ParallelDegrees(pipeline=2), stages=stages, global_batch_size=12, num_microbatches=2,
        policy="pairwise", schedule="1f1b",
        provenance=Provenance(
            method="manual", cost_source="analytic", stability={"work_shares": {"vision": 0.9, "llm": 0.1}}
        ),
    ).write(tmp_path / "plan.yaml")  # fmt: skip
    ended = run_ranks_to_end(tmp_path, recipe)
    text = "\n".join(rank.text for rank in ended)
    assert [rank.code for rank in ended] == [0, 0], text
    runs = tmp_path / "runs" / "small"
    assert [path.name for path in (runs / "traces").iterdir()] == ["step-1.json"]
    events = json.loads((runs / "traces" / "step-1.json").read_text(encoding="utf-8"))["traceEvents"]
    assert slices(events, [0]).keys() == slices(events, [1]).keys()
    assert {e["tid"] for e in events if e.get("cat") == "step" and e["pid"] == 0} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"replica 0, measured", "replica 0, simulated"}
    assert "before step 9" in text
    assert text.count("the data has drifted") == 1
    better = [Plan.read(path) for path in runs.glob("plan-step-*.yaml")]
    assert len(better) == 1
    assert better[0].stages != stages


def test_numbers_that_cannot_be_are_refused(tmp_path):
    from entrain_opt import EntrainStrategy
    from entrain_opt.errors import RuntimeConfigError
    from entrain_opt.lightning.own_callbacks import check_options

    with pytest.raises(RuntimeConfigError, match="trace_steps"):
        check_options(EntrainStrategy(trace_steps=[-1]))
    with pytest.raises(RuntimeConfigError, match="drift_check_steps"):
        check_options(EntrainStrategy(drift_check_steps=-1))
