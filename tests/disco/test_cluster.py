"""The cluster stage: agreement with sources, balance, persistence, refusals."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import sparse
from sklearn.metrics import normalized_mutual_info_score
from threadpoolctl import threadpool_limits
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from disco import cluster as stage
from disco.artifacts import ArtifactError
from disco.cluster import assign, assignments, cluster
from disco.config import Cluster, ConfigError, Experiment, SeedPhase
from disco.corpus import Corpus, prepare

TOPICS = {
    "sea": "whale ship captain harpoon sail anchor tide mast reef storm",
    "law": "court judge statute appeal verdict clause treaty senate bill vote",
    "code": "kernel pointer buffer thread mutex compile linker stack heap opcode",
    "garden": "rose soil seed prune hedge blossom compost orchard vine shovel",
}


class Split:
    """Documents in memory with what the stage asks of a corpus split."""

    def __init__(self, texts, source, tokens=None):
        self._texts = texts
        self.sources = sorted(TOPICS)
        self.source = np.asarray(source, np.int32)
        self.tokens = np.asarray([len(text.split()) for text in texts] if tokens is None else tokens, np.int64)

    def __len__(self):
        return len(self._texts)

    def texts(self, documents=None):
        yield from (self._texts[d] for d in (range(len(self)) if documents is None else documents))


class Documents:
    def __init__(self, train, validation=None):
        self._splits = {"train": train, "validation": validation or Split([], [])}

    def split(self, name):
        return self._splits[name]


def topical(per_topic, seed=0):
    """A split of documents from four topics of very unequal size, 30 words each, some of another topic."""
    rng = np.random.default_rng(seed)
    texts, source = [], []
    every = " ".join(TOPICS.values()).split()
    for code, (name, count) in enumerate(zip(sorted(TOPICS), per_topic, strict=True)):
        for _ in range(count):
            own, other = rng.choice(TOPICS[name].split(), 24), rng.choice(every, rng.integers(2, 10))
            texts.append(" ".join([*own, *other]))
            source.append(code)
    order = rng.permutation(len(texts))
    return Split([texts[d] for d in order], [source[d] for d in order])


def experiment(seed_phase=0, seed=0, **section):
    return Experiment.parse(
        {
            "name": "test",
            "seed": seed,
            "model": {"config": {"model_type": "mixtral"}},
            "corpus": {"sources": [{"name": "a", "text": ["a.txt"]}], "sequence_length": 16},
            "seed_phase": {"tokens": seed_phase},
            "cluster": section,
        }
    )


def run(out, train, *, k=4, validation=None, config=None, **more):
    out.mkdir(parents=True, exist_ok=True)
    corpus = Documents(train, validation)
    cluster(config or experiment(), corpus, out, k=k, model_folder=None, progress=lambda message: None, **more)
    return json.loads((out / "clusters.json").read_text())


def test_topics_are_found_and_new_texts_join_them(tmp_path):
    train, validation = topical([40, 60, 50, 55]), topical([5, 5, 5, 5], seed=1)
    notes = run(tmp_path, train, validation=validation, config=experiment(balance="none"))
    label_D = assignments(tmp_path, "train")
    assert label_D.dtype == np.int64 and len(label_D) == len(train)
    assert normalized_mutual_info_score(train.source, label_D) > 0.95
    assert notes["purity"] > 0.97 and notes["silhouette"] > 0.3
    assert notes["documents"] == np.bincount(label_D, minlength=4).tolist()
    assert notes["tokens"] == np.bincount(label_D, train.tokens, 4).astype(int).tolist()
    assert np.sum(notes["contingency"]) == len(train)
    for code, name in enumerate(sorted(TOPICS)):
        mine = int(np.argmax(np.bincount(label_D[train.source == code], minlength=4)))
        assert len(set(notes["terms"][mine]) & set(TOPICS[name].split())) >= 8
        assert assign(tmp_path, [TOPICS[name]]).tolist() == [mine]
    assert (assign(tmp_path, validation.texts()) == assignments(tmp_path, "validation")).all()
    assert (assign(tmp_path, train.texts()) == label_D).all()
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "features.tmp").exists()
    with np.load(tmp_path / "map.npz") as picture:
        assert (label_D[picture["document"]] == picture["cluster"]).all()
        assert np.isfinite(picture["xy"]).all()


def test_balance_gives_every_cluster_the_same_tokens(tmp_path):
    train = topical([20, 150, 40, 30])
    notes = run(tmp_path, train)
    load_K = np.bincount(assignments(tmp_path, "train"), train.tokens, 4)
    assert np.abs(load_K - train.tokens.sum() / 4).max() <= train.tokens.max()
    assert notes["moved"] > 0 and notes["largest"] < 1.1
    table = pq.read_table(tmp_path / "train.parquet")
    assert (assign(tmp_path, train.texts()) == table["nearest"].to_numpy()).all()
    assert table.schema.names == ["document", "cluster", "nearest", "distance"]
    assert (table["document"].to_numpy() == np.arange(len(train))).all()


def test_random_is_balanced_seeded_and_needs_no_features(tmp_path):
    train, validation = topical([20, 150, 40, 30]), topical([9, 9, 9, 9], seed=2)
    notes = run(tmp_path / "a", train, validation=validation, method="random")
    run(tmp_path / "b", train, validation=validation, method="random")
    run(tmp_path / "c", train, validation=validation, method="random", config=experiment(seed=1))
    first, second, other = (assignments(tmp_path / name, "train") for name in "abc")
    assert (first == second).all() and (first != other).any()
    load_K = np.bincount(first, train.tokens, 4)
    assert np.abs(load_K - train.tokens.sum() / 4).max() <= train.tokens.max()
    assert notes["nmi"] < 0.1
    held_out = assignments(tmp_path / "a", "validation")
    assert (assign(tmp_path / "a", validation.texts()) == held_out).all() and len(set(held_out)) == 4
    assert not (tmp_path / "a/centroids.npy").exists()


def test_the_same_seed_gives_the_same_files(tmp_path):
    train = topical([20, 60, 40, 30])
    first, second = run(tmp_path / "a", train), run(tmp_path / "b", train)
    assert first["files"] == second["files"]
    assert (tmp_path / "a/map.png").read_bytes() == (tmp_path / "b/map.png").read_bytes()


def test_the_number_of_threads_changes_no_bit(tmp_path):
    train, files = topical([60, 80, 100, 120]), []
    for threads in (1, 2):
        with threadpool_limits(threads):
            files.append(run(tmp_path / str(threads), train)["files"])
    assert files[0] == files[1]


def test_top_terms_exceed_the_mean():
    tfidf_DV = sparse.csr_matrix(np.array([[1, 0, 0.5, 1], [1, 0, 0.5, 1], [0, 1, 0.5, 0]]))
    found = stage.top_terms(tfidf_DV, ["a", "b", "c", "#number"], np.array([0, 0, 1]), 3)
    assert found == [["a"], ["b"], []]


@pytest.mark.parametrize("k", [1, 7])
def test_odd_numbers_of_clusters(tmp_path, k):
    train = topical([2, 2, 2, 1])
    notes = run(tmp_path, train, k=k)
    assert sorted(assignments(tmp_path, "train").tolist()) == sorted((list(range(k)) * 7)[:7])
    assert notes["silhouette"] is None


def test_embedding_and_hidden_features(tmp_path, monkeypatch):
    """With a stand-in vectorizer: the model-reading ones have their own tests."""
    train = topical([30, 30, 30, 30])
    fitted, _ = stage.features.fit_tfidf(train.texts(), dimensions=8, max_terms=99, seed=0)
    monkeypatch.setattr(stage, "_model_vectorizer", lambda *arguments: fitted)
    notes = run(tmp_path, train, config=experiment(features="embedding"))
    assert notes["features"] == "embedding" and notes["purity"] > 0.95 and len(notes["terms"][0]) >= 9


@pytest.mark.parametrize("features", ["embedding", "hidden"])
def test_an_untrained_model_has_no_features(tmp_path, features):
    for config, folder in ((experiment(features=features), tmp_path), (experiment(9, features=features), None)):
        with pytest.raises(ConfigError, match=f"cluster.features is '{features}' but the model is untrained"):
            cluster(config, Documents(topical([4, 4, 4, 4])), tmp_path, k=4, model_folder=folder)


def test_refuses_bad_k(tmp_path):
    with pytest.raises(ConfigError, match="cluster.k is 0"):
        run(tmp_path, topical([4, 4, 4, 4]), k=0)
    for method in ("kmeans", "random"):
        with pytest.raises(ConfigError, match="4 training documents, fewer than cluster.k=5.*passage_chars"):
            run(tmp_path, topical([1, 1, 1, 1]), k=5, method=method)


def test_refuses_identical_vectors(tmp_path):
    same = Split([f"record {i} closed by clerk" for i in range(10, 40)], [0] * 30)
    with pytest.raises(ConfigError, match="all 30 training documents are identical.*cluster.method=random"):
        run(tmp_path, same)
    two = Split([f"record {i} closed" if i % 2 else f"whale {i} sighted" for i in range(10, 40)], [0] * 30)
    with pytest.raises(ConfigError, match="only 2 different ones, cluster.k is 3"):
        run(tmp_path, two, k=3)
    assert not (tmp_path / "features.tmp").exists()


def test_refuses_clusters_below_a_batch(tmp_path):
    train = topical([5, 90, 50, 55])
    with pytest.raises(ConfigError, match=r"less than one batch of 900 .*cluster.balance=tokens"):
        run(tmp_path, train, config=experiment(balance="none"), minimum_tokens=900)
    with pytest.raises(ConfigError, match=r"less than one batch of 9000 .*lower train.batch_size"):
        run(tmp_path, train, minimum_tokens=9000)
    with pytest.raises(ConfigError, match="less than one batch"):
        run(tmp_path, train, minimum_tokens=9000, method="random")
    run(tmp_path, train, minimum_tokens=900)


def test_refuses_clusters_without_tokens(tmp_path):
    train = Split([*TOPICS.values(), "whale ship"], [0, 1, 2, 3, 0], tokens=[5, 5, 0, 0, 0])
    with pytest.raises(ConfigError, match="of 0 tokens.*passage_chars"):
        run(tmp_path, train, method="random")


def test_refuses_features_that_are_not_finite(tmp_path, monkeypatch):
    class Broken:
        def save(self, folder):
            pass

        def transform(self, texts):
            x_BS = np.ones((len(list(texts)), 3), np.float32)
            x_BS[5, 1] = np.nan
            yield x_BS

    monkeypatch.setattr(stage, "_model_vectorizer", lambda *arguments: Broken())
    with pytest.raises(ConfigError, match="training document 5 are not finite"):
        run(tmp_path, topical([4, 4, 4, 4]), config=experiment(features="hidden"))


def test_damage_is_named(tmp_path):
    train = topical([9, 9, 9, 9])
    run(tmp_path, train)
    np.save(tmp_path / "centroids.npy", np.zeros((4, 3), np.float32))
    with pytest.raises(ArtifactError, match="centroids.npy: differs"):
        assign(tmp_path, ["whale"])
    (tmp_path / "centroids.npy").unlink()
    with pytest.raises(ArtifactError, match="centroids.npy: missing"):
        assign(tmp_path, ["whale"])
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ArtifactError, match="train.parquet: damaged"):
        assignments(tmp_path, "train")
    with pytest.raises(ArtifactError, match="test.parquet: no such file"):
        assignments(tmp_path, "test")


def tiny_model(folder, vocabulary):
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_prepared_corpus(tmp_path):
    rng = np.random.default_rng(0)
    sources = []
    for name, words in TOPICS.items():
        lines = [" ".join(rng.choice(words.split(), 20)) for _ in range(40)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        sources.append({"name": name, "text": [str(tmp_path / f"{name}.txt")]})
    config = Experiment.parse(
        {
            "name": "test",
            "model": {"config": {"model_type": "mixtral"}},
            "corpus": {
                "sources": sources,
                "sequence_length": 32,
                "tokenizer": {"kind": "train", "vocab_size": 300},
            },
        }
    )
    (tmp_path / "prepare").mkdir()
    (tmp_path / "cluster").mkdir()
    prepare(config, tmp_path / "prepare", progress=lambda message: None)
    corpus = Corpus.open(tmp_path / "prepare")
    cluster(config, corpus, tmp_path / "cluster", k=4, model_folder=None)
    train = corpus.split("train")
    label_D = assignments(tmp_path / "cluster", "train")
    assert normalized_mutual_info_score(train.source, label_D) > 0.8
    assert np.abs(np.bincount(label_D, train.tokens) - train.tokens.sum() / 4).max() <= train.tokens.max()
    assert len(assignments(tmp_path / "cluster", "validation")) == len(corpus.split("validation"))
    assert len(label_D) == len(corpus.split("train"))

    model_folder = tiny_model(tmp_path / "model", corpus.meta["vocab_size"])
    for kind in ("embedding", "hidden"):
        out = tmp_path / kind
        out.mkdir()
        looking = config.model_copy(update={"cluster": Cluster(features=kind), "seed_phase": SeedPhase(tokens=9)})
        cluster(looking, corpus, out, k=4, model_folder=model_folder, progress=lambda message: None)
        assert json.loads((out / "clusters.json").read_text())["dimensions"] == 16
        held_out = corpus.split("validation")
        assert (assign(out, held_out.texts()) == assignments(out, "validation")).all()
