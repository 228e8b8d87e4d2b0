import sys
import types

import pytest

from launch.energy import meter


@pytest.fixture
def nvml(monkeypatch):
    """Two cards that have used 1 and 2 kJ; `used` is theirs to change. Millijoules, as NVML counts."""
    module = types.ModuleType("pynvml")
    module.used = {0: 1e6, 1: 2e6, "GPU-b": 7e6}
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetTotalEnergyConsumption = lambda card: module.used[card]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_energy_since_the_last_call_of_all_cards(nvml):
    since = meter(2)
    nvml.used[0] += 3.6e9  # a kWh
    nvml.used[1] += 1.8e9
    assert since() == pytest.approx(1.5) and since() == 0


def test_only_the_cards_that_cuda_sees_count(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-b")
    one, both = meter(1), meter(2)
    nvml.used |= {0: 9e9, 1: 2e6 + 3.6e9, "GPU-b": 7e6 + 3.6e9}
    assert one() == pytest.approx(1.0) and both() == pytest.approx(2.0)


def test_without_nvml_or_with_cards_elsewhere_there_is_none(nvml, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert meter(2) is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    nvml.nvmlInit = lambda: 1 / 0
    assert meter(1) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meter(1) is None
