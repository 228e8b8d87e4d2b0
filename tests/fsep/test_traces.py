import numpy as np
import pytest

from fsep import LoadTrace, synthesize
from fsep.traces import KINDS

SIZES = dict(devices=4, experts=12, steps=6, layers=2, microbatches=3, tokens_per_device=100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_synthesized_traces_are_seeded_and_conserve_tokens(kind, skew):
    trace = synthesize(kind, **SIZES, skew=skew, seed=7)
    assert trace.tokens.shape == (6, 2, 3, 4, 12)
    assert (trace.tokens.sum(-1) == 100).all()
    assert np.array_equal(trace.tokens, synthesize(kind, **SIZES, skew=skew, seed=7).tokens)
    assert not np.array_equal(trace.tokens, synthesize(kind, **SIZES, skew=skew, seed=8).tokens)


def share(kind, **changes):
    trace = synthesize(kind, **{**SIZES, "tokens_per_device": 20000, "device_spread": 0.0} | changes)
    load = trace.tokens.sum((2, 3)).astype(float)
    return load / load.sum(-1, keepdims=True)


def test_kinds_have_their_shapes():
    ranks = np.sort(share("zipf", skew=1.0)[0, 0])[::-1]
    expected = 1 / np.arange(1, 13)
    np.testing.assert_allclose(ranks, expected / expected.sum(), atol=0.01)
    assert share("hot-set", skew=1.0)[:, 0].max(-1) == pytest.approx(np.full(6, 0.5 + 0.5 / 12), abs=0.02)
    hot = share("rotating", skew=1.0)[:, 0].argmax(-1)
    assert ((hot[1:] - hot[:-1]) % 12 == 1).all()
    peaks = share("burst", steps=60, skew=3.0)[:, 0].max(-1)
    assert 3 <= (peaks > 0.7).sum() <= 25 and ((peaks > 0.7) | (peaks < 0.1)).all()
    clustered = share("clustered", skew=1.0)[0, 0]
    top = np.sort(np.argsort(clustered)[-3:])
    assert ((np.diff(top) == 1) | (np.diff(top) >= 9)).all()


def test_round_trip(tmp_path):
    trace = synthesize("zipf", **SIZES)
    trace = LoadTrace(trace.tokens, np.arange(6) * 100, np.array([3, 9]))
    trace.save(tmp_path / "t.npz")
    back = LoadTrace.load(tmp_path / "t.npz")
    assert np.array_equal(back.tokens, trace.tokens) and back.tokens.dtype == np.int16
    assert back.iteration.tolist() == [0, 100, 200, 300, 400, 500] and back.layer.tolist() == [3, 9]
    assert (back.steps, back.layers, back.microbatches, back.devices, back.experts) == (6, 2, 3, 4, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]
    LoadTrace(np.full((1, 1, 1, 1, 1), 40000)).save(tmp_path / "big.npz")
    assert LoadTrace.load(tmp_path / "big.npz").tokens.item() == 40000


def test_tokens_alone_will_do(tmp_path):
    np.savez(tmp_path / "t.npz", tokens=np.ones((2, 1, 1, 2, 3)))
    trace = LoadTrace.load(tmp_path / "t.npz")
    assert trace.iteration.tolist() == [0, 1] and trace.layer.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tokens=np.ones((2, 3))), r"trace.tokens has shape \(2, 3\)"),
        (dict(tokens=np.ones((1, 1, 1, 0, 1))), "trace.tokens has shape"),
        (dict(tokens=np.full((1, 1, 1, 1, 1), 0.5)), "fractions"),
        (dict(tokens=np.full((1, 1, 1, 1, 1), np.nan)), "non-finite"),
        (dict(tokens=np.full((1, 1, 1, 1, 1), -1)), "holds -1"),
        (dict(tokens=np.array([[[[["a"]]]]])), "dtype"),
        (dict(tokens=np.ones((1, 1, 1, 1, 1)), iteration=np.arange(2)), "trace.iteration has shape"),
        (dict(tokens=np.ones((1, 1, 1, 1, 1)), layer=np.array([0.5])), "trace.layer"),
    ],
)
def test_refuses_bad_contents(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoadTrace(**arguments)


def test_refuses_bad_files(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        LoadTrace.load(tmp_path / "none.npz")
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "text.npz").write_bytes(b"hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "array.npy", np.ones(3))
    np.savez(tmp_path / "other.npz", load=np.ones(3))
    for name in ("junk.npz", "text.npz", "empty.npz"):
        with pytest.raises(ValueError, match="can't be read"):
            LoadTrace.load(tmp_path / name)
    with pytest.raises(ValueError, match="bare array"):
        LoadTrace.load(tmp_path / "array.npy")
    with pytest.raises(ValueError, match="no array `tokens`"):
        LoadTrace.load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kind="gauss"), "kind is 'gauss': choose one of zipf"),
        (dict(devices=0), "devices is 0"),
        (dict(skew=-1.0), "skew is -1"),
        (dict(device_spread=float("nan")), "device_spread is nan"),
    ],
)
def test_synthesize_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        synthesize(**dict(kind="zipf", **SIZES) | changes)
