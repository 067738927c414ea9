"""Measured costs: lines fitted to points, written and read back, kept under a name that covers what they depend on."""

import pytest

from entrain_opt.cost import Line, MeasuredCosts, ModuleCosts, PartCosts
from entrain_opt.cost.profile import TimedPass, fit_line, profile_path
from entrain_opt.errors import RuntimeConfigError


def timed(line: Line, segments: list[int], noise: float = 0.0) -> TimedPass:
    squares, tokens = float(sum(n * n for n in segments)), float(sum(segments))
    seconds = float(line.item_seconds(squares, tokens, len(segments))) + line.fixed_seconds
    return TimedPass(squares=squares, tokens=tokens, segments=len(segments), seconds=seconds * (1 + noise))


PASSES = [[64], [64] * 4, [256], [512], [128] * 8, [1024], [512, 512], [2048]]


def test_exact_points_give_their_line():
    line = Line(square_seconds=2e-9, token_seconds=3e-6, segment_seconds=2e-5, fixed_seconds=1e-4)
    found, error = fit_line([timed(line, segments) for segments in PASSES])
    assert error < 1e-9
    for name in ("square_seconds", "token_seconds", "segment_seconds", "fixed_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(line, name), rel=1e-6)


def test_noise_shows_in_the_residual_and_short_passes_count_as_much_as_long_ones():
    line = Line(token_seconds=3e-6, fixed_seconds=1e-4)
    noisy = [timed(line, segments, noise=0.05 * (-1) ** i) for i, segments in enumerate(PASSES)]
    found, error = fit_line(noisy, columns=("token_seconds", "fixed_seconds"))
    assert 0.02 < error < 0.06
    for segments in ([64], [2048]):
        seconds = found.token_seconds * sum(segments) + found.fixed_seconds
        assert seconds == pytest.approx(timed(line, segments).seconds, rel=0.06)


def test_nothing_measured_is_an_error():
    with pytest.raises(RuntimeConfigError, match="at least one pass"):
        fit_line([])


def test_written_and_read_back_unchanged(tmp_path):
    part = PartCosts(forward=Line(token_seconds=1e-6), backward=Line(square_seconds=1e-9))
    costs = MeasuredCosts(
        modules={"vision": ModuleCosts(layer=part), "llm": ModuleCosts(output=part)},
        message_latency_seconds=None,
        message_bytes_per_second=None,
        step_seconds_per_parameter=1e-9,
        action_seconds=1e-5,
        residuals={"vision layer forward": 0.01},
        frozen=("vision_tower",),
    )
    costs.write(tmp_path / "deep" / "profile.yaml")
    assert MeasuredCosts.read(tmp_path / "deep" / "profile.yaml") == costs


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1", "expected a mapping"), ("modules: {llm: {layr: {}}}", "unknown field 'layr'"), ("modules: [", "profile")],
)
def test_broken_files_are_named(tmp_path, content, message):
    (tmp_path / "p.yaml").write_text(content)
    with pytest.raises(RuntimeConfigError, match=message):
        MeasuredCosts.read(tmp_path / "p.yaml")


def test_the_cache_name_covers_what_the_numbers_depend_on(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    names = {
        profile_path("cache", tmp_path),
        profile_path("cache", tmp_path, frozen=("projector",)),
        profile_path("cache", tmp_path, precision="bf16-true"),
        profile_path("cache", tmp_path, num_processes_busy=2),
        profile_path("cache", tmp_path, device="H100-80GB"),
    }
    assert len(names) == 5
    assert profile_path("cache", tmp_path) in names
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    assert profile_path("cache", tmp_path) not in names
