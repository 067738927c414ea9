"""Measured costs of every family: each piece is timed, on what the cost model multiplies its line with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from entrain_opt.cost import CostModel
from entrain_opt.cost.profile import MeasuredCosts
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.runtime.families import INPUT, OUTPUT, UNUSED
from entrain_opt.runtime.measure import combine_passes, fit_modules, measure_costs
from entrain_opt.runtime.measure_pieces import typical_units
from entrain_opt.runtime.measure_worker import MeasureWorker
from entrain_opt.runtime.short_model import shorten, typical_layers
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.media import media_rule
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

MODELS = Path(__file__).parents[2] / "models"
_COVERED = "tiny-compose-qwen2_5-vit-llama"  # By the composed folder with two encoders.
FOLDERS = ("idefics3", "experts", *sorted({path.name for path in MODELS.glob("tiny-*")} - {_COVERED}))
#: Passes of more tokens are left out here: what is tested does not depend on them.
MOST_TOKENS = 200


@pytest.fixture
def folder_of(tmp_path):
    """A shipped folder, or one made of them: Idefics3 is SmolVLM under other names."""

    def find(name):
        if name == "experts":
            shutil.copytree(MODELS / "tiny-internvl", tmp_path / name)
            config = json.loads((tmp_path / name / "config.json").read_text())
            config = {key: config[key] for key in ("vision_config", "text_config", "image_token_id")}
            config |= {"model_type": "entrain_composed", "vision_projector": {"kind": "linear", "merge": 2}}
            config["text_config"] |= {
                "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "decoder_sparse_step": 2, "head_dim": 24,
            }  # fmt: skip
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name != "idefics3":
            return tmp_path / name if (tmp_path / name).exists() else MODELS / name
        shutil.copytree(MODELS / "tiny-smolvlm", tmp_path / name)
        for path in (tmp_path / name).glob("*config.json"):
            path.write_text(path.read_text().replace("smolvlm", "idefics3").replace("SmolVLM", "Idefics3"))
        return tmp_path / name

    return find


def worker_of(folder, scratch, frozen=()):
    request = {
        "model_folder": str(folder), "frozen": list(frozen), "precision": "32-true", "device": "cpu", "rank": 0,
        "num_workers": 1, "scratch": str(scratch),
    }  # fmt: skip
    return MeasureWorker(request)


def table_of(sizes, kind):
    """One sample per media item, with some text."""
    column = lambda name: np.array([getattr(size, name) for size in sizes], dtype=np.int64)  # noqa: E731
    return SampleTable(
        sample_ids=np.array([f"s{index}" for index in range(len(sizes))]),
        text_tokens=np.full(len(sizes), 20),
        label_tokens=np.full(len(sizes), 8),
        media_offsets=np.arange(len(sizes) + 1),
        media_kind=np.full(len(sizes), MEDIA_KINDS.index(kind)),
        media_patches=column("patches"),
        media_segments=column("segments"),
        media_tokens=column("tokens"),
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_measured_costs_cover_the_model_and_a_plan_follows(name, folder_of, tmp_path):
    folder = folder_of(name)
    worker = worker_of(folder, tmp_path)
    family, model, spec = worker.short.family, worker.model, ModelSpec.from_pretrained(folder)
    for encoder in worker.short.spec.encoders:
        units = typical_units(worker.short, encoder.name, media_rule(folder))
        pieces = {
            kind: [p for p in worker.pieces if p.name == f"{encoder.name} {kind}"] for kind in ("layer", "output")
        }
        for one, layer, output in zip(units, pieces["layer"], pieces["output"], strict=True):
            # The model makes as many rows of a unit as the planner counts.
            assert layer.tokens == one.patches == layer.leaf.numel() // encoder.hidden_size
            with torch.no_grad():
                assert layer.run(layer.leaf).shape == layer.leaf.shape
                assert len(output.run(output.leaf)) == sum(one.unit.features)
    named = {"input": INPUT, "output": OUTPUT}
    timed = {piece.name: piece.parameters for piece in worker.pieces}
    for parameter_name, parameter in model.named_parameters():
        place = family.place(parameter_name)
        if place.position != UNUSED and parameter.requires_grad:
            kind = next((kind for kind, position in named.items() if place.position == position), "layer")
            assert any(parameter is one for one in timed[f"{place.module} {kind}"]), parameter_name

    smallest = {piece.name: piece.tokens for piece in reversed(worker.pieces)}
    worker.pieces = [p for p in worker.pieces if p.tokens <= max(MOST_TOKENS, 2 * smallest[p.name])]
    passes = combine_passes([worker.measure(0.0)])
    modules, residuals = fit_modules(passes)
    assert set(modules) == {module.name for module in spec.modules}
    assert set(timed) == {name.rpartition(" ")[0] for name in residuals}
    for costs in modules.values():
        for part in (costs.input, costs.layer, costs.output):
            for line in (part.forward, part.backward):
                assert line.item_seconds(64.0**2, 64.0, 1.0) + line.fixed_seconds > 0
    measured = MeasuredCosts(
        modules=modules,
        message_latency_seconds=None,
        message_bytes_per_second=None,
        step_seconds_per_parameter=1e-9,
        action_seconds=1e-6,
    )
    cluster = ClusterSpec(device="cpu", devices_per_node=2)
    costs = CostModel(spec, cluster, measured=measured)
    rule = media_rule(folder)
    if "image" in rule.kinds:
        samples = table_of([rule.image(side, side) for side in (60, 112, 200, 300, 500, 900)], "image")
    else:
        samples = table_of([rule.audio(seconds) for seconds in (0.3, 0.5, 0.8, 1.3)], "audio")
    # A larger picture is never predicted to be cheaper.
    encoder_seconds, llm_seconds = costs.module_seconds(samples)
    assert list(encoder_seconds) == sorted(encoder_seconds)
    assert list(llm_seconds) == sorted(llm_seconds)
    plan = solve_plan(spec, samples, cluster, global_batch_size=4, options=PlanOptions(method="search"), costs=costs)
    assert plan.provenance.cost_source == "measured"


def test_layers_of_every_kind_stand_for_the_whole():
    """Windows and experts: a short model has each kind, most of what most layers are."""
    qwen = ModelSpec.from_pretrained(MODELS / "qwen2_5-vl-3b").module("vision")
    full = next(kind for kind in qwen.kinds if kind.window is None).layers
    chosen = typical_layers(qwen, 3)
    assert (len(chosen), len(set(chosen) & set(full))) == (3, 1)
    assert len(typical_layers(qwen, 1)) == 2
    gemma = ModelSpec.from_pretrained(MODELS / "gemma-3-4b").llm
    assert sum(
        gemma.kinds[0].window is not None and layer in gemma.kinds[0].layers for layer in typical_layers(gemma, 3)
    )
    llama = ModelSpec.from_pretrained(MODELS / "qwen2_5-vit-llama3_2-3b").llm
    assert typical_layers(llama, 1) == [0]
    assert typical_layers(llama, 9) == [0, 1, 2]


def test_a_short_model_has_experts_where_its_layers_had_them(folder_of, tmp_path):
    folder = folder_of("experts")
    short = shorten(folder, tmp_path / "short", frozen=(), weight_bytes=4)
    assert [kind.num_experts for kind in ModelSpec.from_pretrained(folder).llm.kinds] == [4, 0]
    assert {kind.num_experts: len(kind.layers) for kind in short.spec.llm.kinds} == {4: 2, 0: 1}
    with torch.device("meta"):
        layers = short.family.language_model(short.family.build()).layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True, True]


def test_a_frozen_tower_has_no_backward_but_its_projector_has(tmp_path):
    worker = worker_of(MODELS / "tiny-qwen2_5-vl", tmp_path, frozen=("vision_tower",))
    trained = {piece.name: (piece.trained, piece.upstream) for piece in worker.pieces}
    assert trained["vision input"] == trained["vision layer"] == (False, False)
    assert trained["vision output"] == (True, False)
    assert trained["llm input"] == (True, False)
    assert trained["llm layer"] == trained["llm output"] == (True, True)


def test_what_is_planned_for_only_is_refused_with_the_way_out(tmp_path):
    shutil.copytree(MODELS / "tiny-compose-qwen2_5-vit-llama", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "kosmos-2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeConfigError, match=r"cannot execute model_type 'kosmos-2'.*plan for it with `cost_model"):
        measure_costs(tmp_path)
