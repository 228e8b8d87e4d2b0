"""Ways to make the shared part, against their formulas written out in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disco.checkpoint import Checkpoint
from disco.combine import Shared, task_arithmetic, threshold, ties
from disco.config import ConfigError, Experiment
from disco.merge import merge
from tests.disco.test_merge import perturb, split_all
from tests.disco.tiny_experiment import tiny_experiment
from tests.disco.tiny_models import same_bits, save, tiny_model


def raw(values) -> bytearray:
    return bytearray(np.array(values, np.float32).tobytes())


def values(data) -> list[float]:
    return np.frombuffer(bytes(data), np.float32).tolist()


def test_ties_by_hand():
    base = [0.0, 0.0, 0.0, 1.0, 0.0]
    thetas = [[4.0, 1.0, -2.0, 1.0, 0.5], [2.0, -3.0, -4.0, 2.0, 0.5], [-1.0, -1.0, 8.0, 1.0, -0.5]]
    found = ties(raw(base), [raw(t) for t in thetas], [1 / 3] * 3, [1.0, 1.0, 1.0], 1.0, "F32")
    # signs +, -, +, +, none kept; means of those that agree: (4 + 2) / 2, (-3 - 1) / 2, 8, 1, 0
    assert values(found) == [3.0, -2.0, 8.0, 2.0, 0.0]
    half = ties(raw(base), [raw(t) for t in thetas], [1 / 3] * 3, [1.0, 1.0, 1.0], 0.5, "F32")
    assert values(half) == [1.5, -1.0, 4.0, 1.5, 0.0]
    weighted = ties(raw([0.0]), [raw([3.0]), raw([1.0])], [0.75, 0.25], [0.0, 0.0], 1.0, "F32")
    assert values(weighted) == [2.5]


def test_task_arithmetic_by_hand():
    found = task_arithmetic(raw([1.0, 2.0]), [raw([2.0, 2.0]), raw([0.5, 4.0])], 0.5, "F32")
    assert values(found) == [1.25, 3.0]


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60), st.floats(0.01, 1.0), st.integers(1, 60))
def test_the_threshold_keeps_the_wanted_share_and_little_more(changes, density, cut):
    chunks = [changes[:cut], changes[cut:]]
    pairs = [(raw([0.0] * len(chunk)), raw(chunk)) for chunk in chunks if chunk]
    found = threshold(pairs, density, "F32")
    size = np.abs(np.array(changes, np.float32))
    kept = size >= found
    assert kept.sum() >= density * len(size)
    exact = np.sort(size)[::-1][int(np.ceil(density * len(size))) - 1]
    assert found <= exact and (exact < 1e-37 or found > exact * (1 - 2**-6))


@pytest.fixture
def trained(tmp_path):
    full = save(tiny_model("mixtral", 3), tmp_path / "full")
    folders = split_all(full, tmp_path, 3)
    for seed, folder in enumerate(folders):
        perturb(folder, seed)
    return full, folders


def shared_part(folder) -> dict[str, torch.Tensor]:
    model = Checkpoint.open(folder)
    return {key: item.read() for key, item in model.tensors.items() if model.family.role(key).kind == "shared"}


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_whole_shared_part(tmp_path, trained, method):
    full, folders = trained
    merge(full, folders, tmp_path / "out", shared=Shared(method, density=0.5), weights=[1, 2, 1])
    base, subs = shared_part(full), [shared_part(folder) for folder in folders]
    for key, found in shared_part(tmp_path / "out").items():
        anchor = base[key].double()
        taus = [sub[key].double() - anchor for sub in subs]
        if method == "task_arithmetic":
            wanted = anchor + 0.4 * sum(taus)
        else:
            for index, tau in enumerate(taus):
                limit = threshold([(raw(base[key]), raw(subs[index][key]))], 0.5, "F32")
                taus[index] = torch.where(tau.abs() >= limit, tau, 0)
            sign = sum(w * tau for w, tau in zip([0.25, 0.5, 0.25], taus, strict=True)).sign()
            mass = sum(w * ((t.sign() == sign) & (t != 0)) for w, t in zip([0.25, 0.5, 0.25], taus, strict=True))
            total = sum(w * t * (t.sign() == sign) for w, t in zip([0.25, 0.5, 0.25], taus, strict=True))
            wanted = anchor + torch.where(mass > 0, total / mass, 0)
        torch.testing.assert_close(found, wanted.float(), rtol=0, atol=1e-6)


def test_keep_and_weights_by_layer(tmp_path, trained):
    full, folders = trained
    merge(full, folders, tmp_path / "kept", shared=Shared("keep", keep=1))
    for key, found in shared_part(tmp_path / "kept").items():
        assert same_bits(found, shared_part(folders[1])[key])
    layers = {"model.layers": [1, 1, 0], "model.layers.1": [0, 0, 5]}
    merge(full, folders, tmp_path / "layers", shared=Shared(layers=layers))
    subs = [shared_part(folder) for folder in folders]
    for key, found in shared_part(tmp_path / "layers").items():
        if key.startswith("model.layers.1."):
            torch.testing.assert_close(found, subs[2][key], rtol=0, atol=1e-6)
        elif key.startswith("model.layers."):
            torch.testing.assert_close(found, (subs[0][key] + subs[1][key]) / 2)
        else:
            torch.testing.assert_close(found, sum(sub[key] for sub in subs) / 3)


@pytest.mark.parametrize(
    "shared, match",
    [
        (Shared("keep", keep=3), "merge.keep is 3 but there are 3 submodels"),
        (Shared("keep"), "merge.shared is keep and merge.keep None: they go together"),
        (Shared("average", keep=1), "they go together"),
        (Shared(layers={"model.layer": [1, 1, 1]}), "no shared tensor's name begins with 'model.layer'"),
        (Shared(layers={"model.layers": [1, 1]}), "has 2 weights for 3 submodels"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, trained, shared, match):
    full, folders = trained
    with pytest.raises(ConfigError, match=match):
        merge(full, folders, tmp_path / "out", shared=shared)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("section", [{"shared": "keep"}, {"keep": 0}, {"shared": "keep", "keep": 2}])
def test_refused_before_a_run(tmp_path, section):
    from disco.check import check
    from tests.disco.tiny_experiment import corpus

    corpus(tmp_path / "corpus")
    with pytest.raises(ConfigError, match="keep names one of the 2 submodels"):
        check(Experiment.parse(tiny_experiment(tmp_path, merge=section)))
