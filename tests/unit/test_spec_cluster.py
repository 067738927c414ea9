"""Devices and clusters: every figure has a source, and the user's own are read or refused by name."""

import pytest
import yaml

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.planner.options import PlanOptions, device_options
from entrain_opt.spec import ClusterSpec
from entrain_opt.spec.devices import CATALOGUE, read_device
from entrain_opt.units import GIB

NAMES = ("A40", "A100-40", "A100-80", "L40S", "H100", "H200", "B200", "RTX4090", "cpu")
OWN = {
    "name": "own", "memory_gib": 96, "bfloat16_tflops": 400, "memory_gb_per_second": 2000, "link_gb_per_second": 100,
    "network_gb_per_second": 12.5,
}  # fmt: skip


@pytest.mark.parametrize("prefix", NAMES)
def test_the_catalogue_states_sources_and_plausible_figures(prefix):
    (device,) = [device for name, device in CATALOGUE.items() if name.startswith(prefix)]
    assert device.source
    assert 8 * GIB <= device.memory_bytes <= 200 * GIB
    assert device.rate("float32") <= device.flops_per_second
    assert device.network_bytes_per_second <= device.link_bytes_per_second <= device.memory_bytes_per_second
    if prefix != "cpu":
        assert device.rate("float32") <= device.rate("tensorfloat32") <= device.rate("bfloat16")


def test_a_rate_that_a_device_lacks_is_named():
    with pytest.raises(RuntimeConfigError, match="A40-48GB: no rate for float8"):
        CATALOGUE["A40-48GB"].rate("float8")
    with pytest.raises(RuntimeConfigError, match="dtype: expected one of"):
        CATALOGUE["A40-48GB"].rate("int4")


def test_a_cluster_file_names_a_device_or_describes_one(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"device": "A40-48GB", "num_nodes": 4, "devices_per_node": 4, "memory_gib": 40}))
    known = ClusterSpec.read(path)
    assert (known.device, known.num_devices, known.memory_limit_bytes) == ("A40-48GB", 16, 40 * GIB)
    path.write_text(yaml.safe_dump({"device": OWN, "devices_per_node": 8}))
    own = ClusterSpec.read(path)
    assert (own.device_spec.name, own.device_spec.flops_per_second) == ("own", 4e14)
    assert own.memory_limit_bytes == int(0.92 * 96 * GIB)
    based = read_device({"name": "A40 with less memory", "based_on": "A40-48GB", "memory_gib": 24}, "device")
    assert based.memory_bytes == 24 * GIB
    assert based.flops_per_second == CATALOGUE["A40-48GB"].flops_per_second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"device": "A41"}, r"device: expected one of .*found 'A41'"),
        ({"devices": 4}, "unknown key 'devices'"),
        ({"device": {**OWN, "memory_gb": 3}}, "device: unknown key 'memory_gb'"),
        ({"device": {**OWN, "name": "A40-48GB"}}, "device.name: expected a name that is not in the catalogue"),
        ({"device": {**OWN, "link_gb_per_second": "fast"}}, "device.link_gb_per_second: expected a number above 0"),
        ({"device": {**OWN, "memory_gib": -1}}, "device.memory_gib: expected a number above 0"),
        ({"device": {"name": "own", "memory_gib": 3}}, "bfloat16_tflops.*missing"),
        ({"device": {"name": "own", "based_on": "A41"}}, "device.based_on: .*found 'A41'"),
        ({"device": "A40-48GB", "num_nodes": 0}, "num_nodes: expected a whole number"),
        ({"device": "A40-48GB", "num_nodes": True}, "num_nodes: expected a whole number"),
        ({"device": "A40-48GB", "memory_gib": "40"}, "memory_gib: expected GiB above 0"),
        ([1], "expected a mapping"),
    ],
)
def test_bad_cluster_files_are_named(content, message, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(RuntimeConfigError, match=message) as caught:
        ClusterSpec.read(path)
    assert "cluster.yaml" in str(caught.value)


def test_missing_and_broken_files_are_errors(tmp_path):
    with pytest.raises(RuntimeConfigError, match="found no file"):
        ClusterSpec.read(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(RuntimeConfigError, match="not valid YAML"):
        ClusterSpec.read(tmp_path / "bad.yaml")


def test_options_take_a_device_of_ones_own(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"device": OWN, "memory_gib": 20}))
    for value in (OWN, str(path)):
        options = PlanOptions(**device_options(value))
        options.check()
        assert options.cluster(2, 4).device_spec.name == "own"
    assert options.cluster(2, 4).memory_limit_bytes == 20 * GIB
