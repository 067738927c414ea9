"""Two encoders in one model, from sizes to plans: costs apart, side by side or merged, and the faster one chosen."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_model, make_plan, make_samples

from entrain_opt import BatchCosts, PipelineShape, assign_microbatches, simulate
from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError, WorkloadError
from entrain_opt.plan import ParallelDegrees
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.limits import with_memory_caps
from entrain_opt.spec import ClusterSpec
from entrain_opt.workload.samples import MEDIA_KINDS

BATCH = 24


def two_encoders(*, llm_layers, frozen=()):
    """The hand-built model with a second tower, half as deep, for audio."""
    model = make_model(llm_layers=llm_layers, frozen=frozen)
    audio = replace(model.encoders[0], name="audio", num_layers=6, trained="audio_tower" not in frozen)
    return replace(model, encoders=(model.encoders[0], audio))


def mixed_samples(count=96, *, seed=0):
    """Samples with pictures, clips, both or neither."""
    samples = make_samples(count, seed=seed)
    kinds = np.random.default_rng(seed).integers(0, 2, samples.num_media)
    return replace(samples, media_kind=np.where(kinds == 1, MEDIA_KINDS.index("audio"), MEDIA_KINDS.index("image")))


def costs_of(model, devices=3):
    return CostModel(model, ClusterSpec(devices_per_node=devices))


PARALLEL = [("vision", 0, 12, 0), ("audio", 0, 6, 1)]
MERGED = [("vision", 0, 12, 0), ("audio", 0, 6, 0)]


def test_each_item_costs_its_own_encoder_alone():
    costs, samples = costs_of(two_encoders(llm_layers=4)), mixed_samples(12)
    batch = costs.batch_costs(samples, make_plan([*PARALLEL, ("llm", 0, 4, 2)]))
    is_audio = samples.media_kind == MEDIA_KINDS.index("audio")
    assert 0 < is_audio.sum() < len(is_audio)
    assert np.array_equal(batch.encoder_index, is_audio)
    vision, audio, _ = batch.stages.forward_seconds
    assert not vision[is_audio].any()
    assert not audio[~is_audio].any()
    assert (vision + audio > 0).all()
    assert np.allclose(vision + audio, batch.encoder_seconds)
    sent_by_vision, sent_by_audio, _ = batch.stages.send_seconds
    assert np.array_equal(sent_by_vision > 0, ~is_audio)
    assert np.array_equal(sent_by_audio > 0, is_audio)


def test_what_a_stage_holds_follows_from_its_own_media():
    costs, samples = costs_of(two_encoders(llm_layers=4)), mixed_samples(12)
    stage = make_plan([*PARALLEL, ("llm", 0, 4, 2)]).stages[0]
    is_audio = samples.media_kind == MEDIA_KINDS.index("audio")
    merging = replace(samples, media_tokens=np.where(is_audio, 1, samples.media_tokens))
    one, two = (costs.activation_bytes(stage, table, ParallelDegrees()) for table in (samples, merging))
    assert one == two


def test_media_without_an_encoder_name_the_sample():
    with pytest.raises(WorkloadError, match=r"sample s\d+: .* has encoders \['vision'\], none for audio"):
        costs_of(make_model()).batch_costs(mixed_samples(12), make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 0)]))


@pytest.mark.parametrize("count", [1, 4])
def test_closed_forms_side_by_side_and_merged(count):
    """Every sample has one picture and one clip of `e` seconds each; the language model takes `l`."""
    e, l = 1.0, 0.5  # noqa: E741
    costs = BatchCosts(
        encoder_seconds=np.full(2 * count, e), llm_seconds=np.full(count, l),
        media_offsets=np.arange(0, 2 * count + 1, 2), media_encoder=np.tile([0, 1], count),
    )  # fmt: skip
    spans = {}
    for name, ranks in (("parallel", (0, 1, 2)), ("merged", (0, 0, 1))):
        shape = PipelineShape(encoder_stages=(1, 1), llm_stages=1, stage_ranks=ranks)
        batch = assign_microbatches(costs, shape, num_microbatches=count, policy="in_order")
        batch.check(costs, shape)
        spans[name] = simulate(costs, batch, shape, schedule="eager").makespan_seconds
    # The encoders are the slowest ranks; with several microbatches they never wait for the language model.
    waits = 3 * l if count == 1 else 0.0
    assert spans["parallel"] == pytest.approx(3 * count * e + waits)
    assert spans["merged"] == pytest.approx(6 * count * e + waits)


def simulated_seconds(costs, plan, samples):
    """Mean over three global batches."""
    spans = []
    for first in range(0, 3 * BATCH, BATCH):
        batch = costs.batch_costs(samples.take(np.arange(first, first + BATCH)), plan)
        assignment = assign_microbatches(
            batch, plan.pipeline_shape, num_microbatches=plan.num_microbatches, policy="joint"
        )
        spans.append(simulate(batch, assignment, plan.pipeline_shape, schedule="eager").makespan_seconds)
    return float(np.mean(spans))


@pytest.mark.parametrize(("llm_layers", "faster"), [(4, "parallel"), (36, "merged")])
def test_the_planner_takes_the_faster_of_parallel_and_merged(llm_layers, faster):
    """Three ranks: the encoders side by side and a short language model, or on one rank and a long one on two."""
    model, samples = two_encoders(llm_layers=llm_layers), mixed_samples()
    costs, half = costs_of(model), llm_layers // 2
    plans = {
        "parallel": make_plan([*PARALLEL, ("llm", 0, llm_layers, 2)], num_microbatches=8),
        "merged": make_plan([*MERGED, ("llm", 0, half, 1), ("llm", half, llm_layers, 2)], num_microbatches=8),
    }
    seconds = {name: simulated_seconds(costs, plan, samples) for name, plan in plans.items()}
    other = "merged" if faster == "parallel" else "parallel"
    assert seconds[faster] < 0.8 * seconds[other]
    options = PlanOptions(
        cost_model="analytic", data_degree=1, pipeline_degree=3, num_microbatches=8, policy="joint", schedule="eager"
    )
    chosen = solve_plan(model, samples, costs.cluster, global_batch_size=BATCH, options=options)
    ranks = {
        name: {stage.rank for stage in chosen.stages if stage.module == name} for name in ("vision", "audio", "llm")
    }
    if faster == "parallel":
        assert ranks["vision"] | ranks["audio"] == {0, 1}
    else:
        assert ranks["vision"] == ranks["audio"] == {0}
    assert simulated_seconds(costs, chosen, samples) <= seconds[faster] * 1.0001


def test_caps_count_a_samples_media_of_both_encoders():
    """The assigner counts patches of all encoders against the cap, so the planner must not promise less."""
    costs, samples = costs_of(two_encoders(llm_layers=4)), mixed_samples(seed=3)
    plan = make_plan([*PARALLEL, ("llm", 0, 4, 2)])
    demand = estimate_demand(samples, costs, BATCH)
    most = samples.sum_media(samples.media_patches).max()
    alone = max(samples.sum_media(samples.media_patches * (samples.media_kind == kind)).max() for kind in (0, 1))
    assert alone < most
    found = set()
    for mib in range(100, 1000, 10):
        try:
            capped = with_memory_caps(plan, costs, demand, mib * 2**20)
        except PlanError:
            found.add("refused")
        else:
            assert capped.patches_in_flight >= most
            found.add("capped")
    assert found == {"refused", "capped"}
