"""Packing: nothing lost, nothing doubled, nothing that shares a row seen."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from disco.artifacts import ArtifactError, file_hash
from disco.corpus import STORED, Split
from disco.packing import IGNORED, Rows, best_fit_decreasing, pack

PAD, EOS = 1, 0


def make_split(folder, lengths, vocab=96, seed=0) -> Split:
    """A split whose document d yields lengths[d] labels; ids start at 2, 0 and 1 are special."""
    generator = np.random.default_rng(seed)
    flat, rows, offset = [], [], 0
    for length in lengths:
        flat.append(np.array([EOS, *generator.integers(2, vocab, length - 1), EOS], dtype="<u2"))
        rows.append({"source": "s", "text": "x", "tokens": length, "offset": offset, "sha256": ""})
        offset += length + 1
    np.concatenate(flat).tofile(folder / "train.tokens")
    pq.write_table(pa.Table.from_pylist(rows, schema=STORED), folder / "train.parquet")
    return split_at(folder)


def split_at(folder) -> Split:
    sha256 = {"train": file_hash(folder / "train.tokens")}
    return Split(folder, "train", {"dtype": "<u2", "pad": PAD, "sources": {"s": {}}, "tokens_sha256": sha256})


def stored(split: Split, document: int) -> list[int]:
    flat = np.fromfile(split.tokens_path, dtype=split.dtype)
    return flat[split.offset[document] :][: split.tokens[document] + 1].tolist()


def check_rows(rows: Rows, split: Split, documents) -> None:
    """Every label of every document stands once, beside its own inputs, in pieces cut from the beginning."""
    every = np.arange(len(rows))
    batch = {name: tensor.numpy() for name, tensor in rows.batch(every).items()}
    document_RL = rows.documents(every)
    length = rows.sequence_length
    assert all(array.shape == (len(rows), length) and array.dtype == np.int64 for array in batch.values())
    assert document_RL.shape == (len(rows), length) and document_RL.dtype == np.int64
    valid = batch["labels"] != IGNORED
    assert (valid == (document_RL >= 0)).all()
    assert (valid.sum(1) == rows.labels()).all() and valid.sum() == rows.total_labels
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # padding is a tail
    assert (valid[:, 0]).all()  # no row is empty
    assert (batch["input_ids"][~valid] == PAD).all()
    found = {int(document): [] for document in documents}
    for row in range(len(rows)):
        starts = np.flatnonzero(batch["position_ids"][row] == 0)
        for start, stop in itertools.pairwise([*starts, length]):
            assert (batch["position_ids"][row, start:stop] == np.arange(stop - start)).all()
            owner = set(document_RL[row, start:stop])
            assert len(owner) == 1  # a piece is one document, padding a piece of its own
            if owner != {-1}:
                inputs, labels = (batch[name][row, start:stop].tolist() for name in ("input_ids", "labels"))
                assert inputs[1:] == labels[:-1]
                found[owner.pop()].append([*inputs, labels[-1]])
    for document, pieces in found.items():
        whole = stored(split, document)
        expected = [whole[at : at + length + 1] for at in range(0, len(whole) - 1, length)]
        times = list(documents).count(document)
        assert sorted(pieces) == sorted(expected * times)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_label_stands_exactly_once(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    length = data.draw(st.integers(1, 24))
    split = make_split(tmp_path_factory.mktemp("split"), lengths)
    documents = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=30))
    for packing in ("pack", "document"):
        rows = pack(split, np.array(documents, dtype=np.int64), length, packing, seed=3)
        check_rows(rows, split, documents)
        count = sum(-(-lengths[document] // length) for document in documents)
        assert len(rows) == count if packing == "document" else len(rows) <= count
        assert rows.total_labels == sum(lengths[document] for document in documents)
        if documents:
            assert rows.padding == pytest.approx(1 - rows.total_labels / (len(rows) * length))


def fewest_rows(lengths, capacity) -> int:
    """The optimum, by trying everything."""

    def fit(rest, free):
        if not rest:
            return len(free)
        best = fit(rest[1:], (*free, capacity - rest[0]))
        for n, room in enumerate(free):
            if room >= rest[0]:
                best = min(best, fit(rest[1:], (*free[:n], room - rest[0], *free[n + 1 :])))
        return best

    return fit(tuple(lengths), ())


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 12), max_size=7), st.integers(12, 16))
def test_best_fit_decreasing_against_the_optimum(lengths, capacity):
    row_P = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    used = np.bincount(row_P, weights=lengths) if lengths else np.zeros(0)
    assert (used > 0).all() and (used <= capacity).all()
    assert len(used) <= 11 / 9 * fewest_rows(lengths, capacity) + 6 / 9


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 60))
def test_best_fit_decreasing_is_the_textbook_rule(lengths, capacity):
    row_P = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    room = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        fits = [left for left in room if left >= lengths[piece]]
        left = min(fits) if fits else capacity
        if fits:
            room.remove(left)
        room.append(left - lengths[piece])
    used = np.bincount(row_P, weights=lengths)
    assert sorted(capacity - used) == sorted(room)


def test_little_is_padding(tmp_path):
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 3000).astype(int) + 1
    split = make_split(tmp_path, lengths.tolist())
    rows = pack(split, np.arange(3000), 256, "pack", 0)
    assert rows.padding < 0.01
    assert len(rows) <= 1.01 * -(-lengths.sum() // 256)
    assert pack(split, np.arange(3000), 256, "document", 0).padding > 0.3


def test_rows_are_shuffled_by_the_seed(tmp_path):
    split = make_split(tmp_path, [5] * 200)
    documents = np.arange(200)

    def laid(seed, packing="pack"):
        rows = pack(split, documents, 16, packing, seed)
        return rows.documents(np.arange(len(rows))).tolist()

    for packing in ("pack", "document"):
        assert laid(0, packing) == laid(0, packing) != laid(1, packing)
        order = [row[0] for row in laid(0, packing)]
        assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.3


def test_take_and_concat(tmp_path):
    split = make_split(tmp_path, [3, 17, 40, 8, 9, 22, 1, 1])
    rows = pack(split, np.arange(8), 16, "pack", 0)
    chosen = np.array([2, 0, 0, len(rows) - 1])
    taken = rows.take(chosen)
    joined = Rows.concat([taken, rows, rows.take(np.array([], dtype=int))])
    assert len(joined) == 4 + len(rows)
    picked = np.array([5, 1])
    for name, tensor in taken.batch(np.arange(4)).items():
        assert (tensor == rows.batch(chosen)[name]).all()
        assert (joined.batch(np.arange(4))[name] == tensor).all()
        assert (joined.batch(np.arange(4, len(joined)))[name] == rows.batch(np.arange(len(rows)))[name]).all()
        assert (joined.batch(picked)[name][0] == rows.batch(np.array([1]))[name][0]).all()
    assert (joined.labels() == np.concatenate([rows.labels()[chosen], rows.labels()])).all()
    assert (taken.documents(np.arange(4)) == rows.documents(chosen)).all()
    with pytest.raises(ValueError, match="sequence_length 16 and 8 cannot be joined"):
        Rows.concat([rows, pack(split, np.arange(8), 8, "pack", 0)])
    (tmp_path / "other").mkdir()
    other = make_split(tmp_path / "other", [3, 4], seed=1)
    with pytest.raises(ValueError, match="tokens_sha256 .* cannot be joined"):
        Rows.concat([rows, pack(other, np.arange(2), 16, "pack", 0)])


def test_no_documents_no_rows(tmp_path):
    rows = pack(make_split(tmp_path, [3]), np.array([], dtype=int), 16, "pack", 0)
    assert (len(rows), rows.total_labels, rows.padding, rows.labels().shape) == (0, 0, 0.0, (0,))
    nothing = np.array([], dtype=int)
    assert rows.batch(nothing)["labels"].shape == (0, 16) and rows.documents(nothing).shape == (0, 16)
    assert len(Rows.concat([rows, rows.take(nothing)])) == 0
    exported = rows.export(tmp_path / "pack")
    assert len(Rows.load(tmp_path / "pack" / "rows.npz")) == 0
    assert exported.batch(nothing)["input_ids"].shape == (0, 16)


def test_what_is_not_there_is_refused(tmp_path):
    split = make_split(tmp_path, [3, 4])
    with pytest.raises(ValueError, match="document 2: the train split has documents 0 to 1"):
        pack(split, np.array([0, 2]), 16, "pack", 0)
    with pytest.raises(ValueError, match="document -1"):
        pack(split, np.array([0, -1]), 16, "pack", 0)
    with pytest.raises(ValueError, match="packing 'tight': there are pack and document"):
        pack(split, np.array([0]), 16, "tight", 0)
    with pytest.raises(ValueError, match="sequence_length is 0"):
        pack(split, np.array([0]), 0, "pack", 0)
    rows = pack(split, np.arange(2), 16, "document", 0)
    for wanted, method in itertools.product(([2], [-1]), (rows.batch, rows.documents, rows.take)):
        with pytest.raises(IndexError, match=f"row {wanted[0]} of 2 rows"):
            method(np.array(wanted))


# on disk


def same(one: Rows, other: Rows) -> bool:
    every = np.arange(len(one))
    a, b = one.batch(every), other.batch(every)
    return all((a[name] == b[name]).all() for name in a) and (one.documents(every) == other.documents(every)).all()


def test_saved_rows_open_again_and_move_with_their_tokens(tmp_path):
    (tmp_path / "run" / "prepare").mkdir(parents=True)
    split = make_split(tmp_path / "run" / "prepare", [3, 17, 40, 8, 9])
    rows = pack(split, np.arange(5), 16, "pack", 0)
    (tmp_path / "run" / "train").mkdir()
    rows.save(tmp_path / "run" / "train" / "rows.npz")
    assert same(rows, Rows.load(tmp_path / "run" / "train" / "rows.npz"))
    assert [path.name for path in (tmp_path / "run" / "train").iterdir()] == ["rows.npz"]
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    moved = Rows.load(tmp_path / "elsewhere" / "train" / "rows.npz")
    check_rows(moved, split_at(tmp_path / "elsewhere" / "prepare"), range(5))


def test_an_export_holds_the_tokens_it_needs_and_no_more(tmp_path):
    split = make_split(tmp_path, [3, 17, 40, 8, 9, 500])
    rows = pack(split, np.array([1, 2, 1]), 16, "pack", 0)
    exported = rows.export(tmp_path / "pack")
    assert same(rows, exported)
    before = rows.batch(np.arange(len(rows)))
    size = (tmp_path / "pack" / "rows.tokens").stat().st_size
    assert size == 2 * (17 + 40 + 2 + 3)  # labels, and one token more a piece: two pieces and three
    (tmp_path / "pack").rename(tmp_path / "far")
    for path in (tmp_path / "train.tokens", tmp_path / "train.parquet"):
        path.unlink()
    loaded = Rows.load(tmp_path / "far" / "rows.npz")
    assert all((tensor == before[name]).all() for name, tensor in loaded.batch(np.arange(len(rows))).items())
    assert (loaded.documents(np.arange(len(rows))) == rows.documents(np.arange(len(rows)))).all()
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["rows.npz", "rows.tokens"]


def test_damaged_rows_are_named(tmp_path):
    split = make_split(tmp_path, [3, 17, 40])
    rows = pack(split, np.arange(3), 16, "pack", 0)
    path = tmp_path / "rows.npz"
    with pytest.raises(ArtifactError, match="rows.npz: no such file"):
        Rows.load(path)
    rows.save(path)
    tokens = split.tokens_path.read_bytes()
    split.tokens_path.write_bytes(tokens[:-2])
    with pytest.raises(ArtifactError, match="train.tokens: not the token file that .* was packed from"):
        Rows.load(path, verify=False)
    split.tokens_path.write_bytes(tokens[:-2] + b"\x05\x00")
    with pytest.raises(ArtifactError, match="train.tokens: not the token file"):
        Rows.load(path)
    Rows.load(path, verify=False)
    split.tokens_path.unlink()
    with pytest.raises(ArtifactError, match="token file .*train.tokens is missing: carry it along"):
        Rows.load(path)
    for damaged in (b"", b"not a zip", path.read_bytes()[:-30]):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="rows.npz: damaged"):
            Rows.load(path)
    path.write_bytes(b"")
    np.savez(path, start=np.zeros(2))
    with pytest.raises(ArtifactError, match="rows.npz: damaged"):
        Rows.load(path)


# with a model


def cross_entropy(model, rows: Rows, batch_size: int, documents: int) -> np.ndarray:
    """Summed cross-entropy of each document, float64 [D]."""
    sums = np.zeros(documents)
    for first in range(0, len(rows), batch_size):
        chosen = np.arange(first, min(first + batch_size, len(rows)))
        batch = rows.batch(chosen)
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch, attention_mask=None, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        owner = rows.documents(chosen)
        np.add.at(sums, owner[owner >= 0], losses.numpy().astype(np.float64)[owner >= 0])
    return sums


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral"])
def test_cross_entropy_of_a_document_does_not_depend_on_its_neighbours(tmp_path, tiny_model, model_type, experts):
    model = tiny_model(model_type).eval()
    model.set_experts_implementation(experts)
    lengths = [1, 2, 5, 11, 16, 17, 30, 48, 3, 3, 9, 7]
    split = make_split(tmp_path, lengths)
    every = np.arange(len(lengths))
    # Outside our code: each piece alone, no padding, no position_ids, no packing.
    alone = np.zeros(len(lengths))
    for document in every:
        tokens = torch.tensor(stored(split, document))
        for start in range(0, len(tokens) - 1, 16):
            piece = tokens[start : start + 17]
            with torch.no_grad():
                logits = model(input_ids=piece[None, :-1]).logits[0]
            alone[document] += F.cross_entropy(logits, piece[1:], reduction="sum").item()
    assert len(set(alone.round(3))) == len(alone)
    for packing, seed, size in (("pack", 0, 3), ("pack", 1, 5), ("document", 0, 4)):
        packed = cross_entropy(model, pack(split, every, 16, packing, seed), size, len(lengths))
        assert np.abs(packed / lengths - alone / lengths).max() < 1e-5
    some = np.array([3, 6])
    packed = cross_entropy(model, pack(split, some, 16, "pack", 0), 2, len(lengths))
    assert np.abs((packed - alone) / lengths)[some].max() < 1e-5
