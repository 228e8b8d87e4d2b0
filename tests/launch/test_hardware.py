from pathlib import Path

import pytest

from launch.hardware import BUILT_IN, HardwareError, identify, load, lookup


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    return path


def test_the_papers_prices_are_dated_and_sourced():
    devices = load()
    assert devices["rtx4090"].price == 0.35 and devices["a100"].price == 2.28
    for device in devices.values():
        assert (device.price is None) == (device.source is None) == (device.as_of is None)
        assert (device.spot_price is None) == (device.spot_source is None) == (device.spot_as_of is None)
        assert device.spot_price is None or device.spot_price < device.price
    assert "2601.06857" in devices["a100"].source and devices["a100"].as_of == "2026-01"


def test_dollars_are_hours_times_devices_times_price():
    assert load()["a100"].dollars(9.87 * 3600) == pytest.approx(22.50, abs=0.005)  # Qwen1.5-MoE on C4, joint
    assert load()["rtx4090"].dollars(2.09 * 3600, devices=4) == pytest.approx(4 * 2.09 * 0.35)


def test_own_table_overrides_field_by_field_and_adds(tmp_path):
    table = write(
        tmp_path,
        "a100: {price: 1.5, source: our contract, as_of: 2026-10-03}\n"
        "b200: {memory_gb: 180, bf16_tflops: 2250, fp32_tflops: 75, price: 3, source: us, as_of: 2026-11}\n",
    )
    devices = load(table)
    assert (devices["a100"].price, devices["a100"].as_of, devices["a100"].memory_gb) == (1.5, "2026-10-03", 80)
    assert devices["rtx4090"] == load()["rtx4090"]
    assert devices["b200"].price == 3.0 and devices["b200"].link_gb_s is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("a100: {price: -1, source: x, as_of: 2026-01}", "a100: price is -1: it must be"),
        ("a100: {price: .nan, source: x, as_of: 2026-01}", "a100: price is nan"),
        ("a100: {price: cheap, source: x, as_of: 2026-01}", "a100: price is 'cheap'"),
        ("a100: {price: true, source: x, as_of: 2026-01}", "a100: price is True"),
        ("a100: {memory_gb: 0}", "memory_gb is 0: it must be a number above 0"),
        ("a100: {price: 1}", "a price needs its source and its date"),
        ("a100: {prise: 1}", "unknown field prise: did you mean 'price'"),
        ("a100: {zzzz: 1}", "unknown field zzzz: fields are"),
        ("b200: {memory_gb: 180}", "b200: bf16_tflops, fp32_tflops missing: a new device gives"),
        ("a100: {spot_price: 1}", "a spot_price needs its source and its date: add spot_source and spot_as_of"),
        ("a100: {spot_price: -1, spot_source: x, spot_as_of: 2026-01}", "spot_price is -1"),
        ("a100: {price: 1, source: x, as_of: soon}", "as_of is 'soon': it must be YYYY-MM"),
        ("a100: {price: 1, source: ' ', as_of: 2026-01}", "price without source"),
        ("a800: {price: 1, source: null, as_of: 2026-01}", "price without source"),
        ("a100: {utilization: 40}", "utilization is 40.0: it must be 1 or less"),
        ("a100: {link_gb_s: .inf}", "link_gb_s is inf"),
        ("- a100", "must map device names to fields"),
        ("a100: 2", "must map device names to fields"),
        ("", "must map device names to fields"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_bad_tables_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(HardwareError, match=message.replace("'", ".")):
        load(write(tmp_path, text))


def test_missing_and_unreadable_tables(tmp_path):
    with pytest.raises(HardwareError, match="no such hardware table"):
        load(tmp_path / "none.yaml")
    with pytest.raises(HardwareError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a100: {source: \xff}")
    with pytest.raises(HardwareError, match="cannot be read"):
        load(tmp_path / "latin.yaml")


def test_a_free_device_is_allowed(tmp_path):
    assert load(write(tmp_path, "cpu: {price: 0, source: ours, as_of: 2026-01}"))["cpu"].price == 0


@pytest.mark.parametrize("typed, meant", [("RTX 4090", "rtx4090"), ("4090", "rtx4090"), ("A-100", "a100")])
def test_typos_get_the_nearest_name(typed, meant):
    with pytest.raises(HardwareError, match=f"hardware.train is '{typed}'.*did you mean '{meant}'"):
        lookup(typed, place="hardware.train")


def test_lookup_finds_or_lists_all():
    assert lookup("a100").name == "a100"
    with pytest.raises(HardwareError, match="known devices: rtx3090, rtx4090,"):
        lookup("quantum")
    assert BUILT_IN.exists()


def test_every_device_of_the_table_is_there_with_its_links():
    devices = load()
    named = "rtx3090 rtx4090 rtx5090 l40s a6000 v100 a100-40 a100 a800 h100 h200 cpu".split()
    assert set(named) <= set(devices)
    for name in set(named) - {"cpu"}:
        device = devices[name]
        assert device.memory_gb_s > device.link_gb_s > device.network_gb_s > 0
        assert 0 < device.utilization <= 1
    assert devices["a800"].link_gb_s < devices["a100"].link_gb_s  # its only difference
    assert devices["a100"].peak("bf16") == 312e12 and devices["a100"].peak("fp32") == 19.5e12
    with pytest.raises(HardwareError, match="precision is 'fp8'"):
        devices["a100"].peak("fp8")


def test_a_price_that_nobody_gave_is_asked_for_where_it_is_needed(tmp_path):
    devices = load()
    with pytest.raises(
        HardwareError, match="no price of 'a800' is known: write 'a800: {price: DOLLARS.*hardware.table"
    ):
        devices["a800"].dollars(3600)
    with pytest.raises(HardwareError, match="no spot price of 'rtx5090'.*spot_source"):
        devices["rtx5090"].rate(spot=True)
    given = load(write(tmp_path, "a800: {price: 1.2, source: ours, as_of: 2026-10-03}"))["a800"]
    assert given.dollars(3600, 2) == 2.4 and given.priced() == "$1.2/h (ours, 2026-10-03)"
    assert devices["rtx4090"].priced(spot=True).startswith("$0.22/h spot (RunPod")
    assert devices["rtx4090"].dollars(7200, spot=True) == 0.44


@pytest.mark.parametrize(
    "card, memory, name",
    [
        ("NVIDIA A100-SXM4-80GB", 85.1, "a100"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "a100-40"),
        ("NVIDIA GeForce RTX 4090", 25.4, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2, None),
        ("NVIDIA H100 80GB HBM3", 85.0, "h100"),
        ("NVIDIA H200", 150.1, "h200"),
        ("Tesla V100-SXM2-16GB", 16.9, "v100-16"),
        ("NVIDIA RTX A6000", 50.9, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 50.9, None),
        ("cpu", None, "cpu"),
        ("Radeon", 24.0, None),
    ],
)
def test_cards_are_known_by_what_their_driver_calls_them(card, memory, name):
    assert identify(card, memory) == name
