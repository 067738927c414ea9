"""Loss and every gradient equal the plain model's, for every split, policy, schedule and set of frozen parts."""

from dataclasses import dataclass, field
from functools import lru_cache

from cases import MIXED_TILES, SPLITS, SyntheticReader, assert_exact, make_plan, reference, run_pipeline, write_model
from ranks import run_ranks

ALL_FROZEN = [(), ("vision_tower",), ("vision_tower", "projector"), ("vision_tower", "language_model")]


@dataclass(frozen=True)
class Case:
    split: object
    policy: str = "pairwise"
    frozen: tuple = ()
    schedule: str = "1f1b"
    data: int = 1
    rows: tuple = tuple(range(len(MIXED_TILES)))
    tied: bool = False
    vision_feature_layer: int = -1
    num_microbatches: int = 4
    recompute: tuple = ()
    fields: dict = field(default_factory=dict)

    def plan(self, folder):
        return make_plan(
            folder, self.split, data=self.data, frozen=self.frozen, policy=self.policy, schedule=self.schedule,
            num_microbatches=self.num_microbatches, recompute=self.recompute,
        )  # fmt: skip


def model_folder(root, case):
    folder = root / f"tied{case.tied}layer{case.vision_feature_layer}"
    if not folder.exists():
        # Features from before the last layer leave that layer unused: the plan's four layers come from a model of five.
        layer = case.vision_feature_layer
        write_model(folder, tied=case.tied, vision_feature_layer=layer, vision_layers=3 - layer)
    return folder


@lru_cache
def expected_of(folder, rows, frozen):
    return reference(folder, SyntheticReader(MIXED_TILES), list(rows), frozen=frozen)


def run_cases(root, cases):
    """On each rank: the result of every case."""
    reader = SyntheticReader(MIXED_TILES)
    return [run_pipeline(case.plan(root / model_folder(root, case).name), reader, list(case.rows)) for case in cases]


def assert_cases_exact(root, cases, results_of_ranks):
    """And replicas agree on what they ran."""
    for index, case in enumerate(cases):
        results = [results[index] for results in results_of_ranks]
        assert_exact(expected_of(model_folder(root, case), case.rows, case.frozen), results, case)
        agreements = {result[3]["agreement"] for result in results}
        assert len({agreement.split for agreement in agreements}) == 1, case
        assert len(agreements) == len({agreement.replica for agreement in agreements}), case


def standard_cases(split):
    return [Case(split, policy=policy, frozen=frozen) for policy in ("pairwise", "in_order") for frozen in ALL_FROZEN]


def special_cases(split):
    return [
        Case(split, policy="karmarkar_karp"),
        Case(split, tied=True),
        Case(split, vision_feature_layer=-2),
        Case(split, rows=(1, 5)),  # text only
        Case(split, rows=(9,)),  # one sample
        Case(split, rows=(0, 3, 1, 2, 8, 6, 7), num_microbatches=3),
        Case(split, schedule="gpipe"),
        Case(split, schedule="eager"),
        *(Case(split, schedule="zero_bubble", frozen=frozen) for frozen in ALL_FROZEN),
        *(Case(split, schedule="eager_split", frozen=frozen) for frozen in ALL_FROZEN),
        Case(split, schedule="zero_bubble", tied=True),
        Case(split, schedule="search"),
        Case(split, schedule="search", frozen=("vision_tower",)),
        Case(split, recompute=("vision", "llm")),
        Case(split, recompute=("llm",), frozen=("vision_tower", "language_model")),
        Case(split, recompute=("vision",), schedule="zero_bubble", tied=True),
    ]


def test_one_rank(tmp_path):
    cases = standard_cases(SPLITS[1]) + special_cases(SPLITS[1])
    assert_cases_exact(tmp_path, cases, [run_cases(tmp_path, cases)])


def test_two_ranks(tmp_path):
    cases = standard_cases(SPLITS[2]) + special_cases(SPLITS[2])
    cases += [Case(SPLITS[1], data=2), Case(SPLITS[1], data=2, rows=(9,)), Case(SPLITS[1], data=2, rows=(0, 1, 5))]
    interleaved = [("vision", (0, 2), 0), ("vision", (2, 4), 1), ("llm", (0, 1), 0), ("llm", (1, 3), 1)]
    cases.append(Case(interleaved, schedule="interleaved"))
    cases.append(Case(interleaved, schedule="1f1b", tied=True))
    for case in cases:
        model_folder(tmp_path, case)
    assert_cases_exact(tmp_path, cases, run_ranks(run_cases, 2, tmp_path, cases))


def test_three_ranks(tmp_path):
    cases = standard_cases(SPLITS[3]) + standard_cases(SPLITS["3-llm"]) + special_cases(SPLITS["3-llm"])
    for case in cases:
        model_folder(tmp_path, case)
    assert_cases_exact(tmp_path, cases, run_ranks(run_cases, 3, tmp_path, cases))


def test_pipelines_and_replicas_together(tmp_path):
    cases = [
        Case(SPLITS[2], data=2),
        Case(SPLITS[2], data=2, rows=(9,)),  # one replica has nothing to do
        Case(SPLITS[2], data=2, rows=(0, 1, 5)),  # media on one replica only
        Case(SPLITS[2], data=2, tied=True),
    ]
    for case in cases:
        model_folder(tmp_path, case)
    assert_cases_exact(tmp_path, cases, run_ranks(run_cases, 4, tmp_path, cases))


def test_deferral_is_exercised(tmp_path):
    case = Case(SPLITS[1])
    assert run_cases(tmp_path, [case])[0][3]["deferred"] > 0
