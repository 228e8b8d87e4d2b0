from pathlib import Path

import pytest

from launch.hardware import BUILT_IN, HardwareError, load, lookup


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    return path


def test_the_papers_prices_are_dated_and_sourced():
    devices = load()
    assert devices["rtx4090"].price == 0.35 and devices["a100"].price == 2.28
    for device in devices.values():
        assert device.source and device.as_of[:2] == "20" and device.memory_gb > 0
    assert "2601.06857" in devices["a100"].source and devices["a100"].as_of == "2026-01"


def test_dollars_are_hours_times_devices_times_price():
    assert load()["a100"].dollars(9.87 * 3600) == pytest.approx(22.50, abs=0.005)  # Qwen1.5-MoE on C4, joint
    assert load()["rtx4090"].dollars(2.09 * 3600, devices=4) == pytest.approx(4 * 2.09 * 0.35)


def test_own_table_overrides_field_by_field_and_adds(tmp_path):
    table = write(
        tmp_path,
        "a100: {price: 1.5, source: our contract, as_of: 2026-10-03}\n"
        "h200: {memory_gb: 141, bf16_tflops: 989, fp32_tflops: 67, price: 3, source: us, as_of: 2026-11}\n",
    )
    devices = load(table)
    assert (devices["a100"].price, devices["a100"].as_of, devices["a100"].memory_gb) == (1.5, "2026-10-03", 80)
    assert devices["rtx4090"] == load()["rtx4090"]
    assert devices["h200"].price == 3.0


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
        ("h100: {memory_gb: 80}", "h100: bf16_tflops, fp32_tflops, price, source, as_of missing"),
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
    with pytest.raises(HardwareError, match="known devices: rtx4090, a100, cpu"):
        lookup("quantum")
    assert BUILT_IN.exists()
