import json

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForCausalLM

from disco.artifacts import ArtifactError, file_hash
from disco.checkpoint import Checkpoint, identity
from disco.config import ConfigError
from disco.family import family_of, moe_blocks, num_experts, set_trainable, with_experts
from disco.merge import merge
from disco.packing import Rows
from disco.router import choose, fit_centroid, fit_probe, initialise_router
from disco.split import write_submodel_note
from tests.disco.tiny_models import DTYPES, FAMILIES, load, same_bits, save, tiny_config, tiny_model

VOCABULARY = 61


def cluster_rows(folder, cluster, clusters, documents=20, length=16, pieces=1, seed=0) -> Rows:
    """Documents whose tokens come mostly from the cluster's own part of the vocabulary."""
    generator = np.random.default_rng([seed, cluster])
    width = VOCABULARY // clusters
    shape = (documents * pieces, length + 1)
    own = generator.integers(cluster * width, (cluster + 1) * width, shape)
    tokens = np.where(generator.random(shape) < 0.7, own, generator.integers(0, VOCABULARY, shape))
    path = folder / f"{cluster}-{seed}.tokens"
    tokens.astype(np.uint16).tofile(path)
    count = documents * pieces
    return Rows(
        tokens_path=path,
        tokens_sha256=file_hash(path),
        dtype=np.dtype(np.uint16),
        sequence_length=length + 2,  # two positions of padding
        pad=0,
        pointer=np.arange(count + 1),
        start=np.arange(count) * (length + 1),
        length=np.full(count, length),
        document=1000 * cluster + np.arange(count) // pieces,
    )


def all_rows(folder, clusters, **keys):
    return [cluster_rows(folder, cluster, clusters, **keys) for cluster in range(clusters)]


def router_inputs(model, batch):
    """What each router sees and answers in one plain forward pass: lists of [N, H] and of [N, top_k] experts."""
    inputs, experts = [], []

    def keep(module, args, output):
        inputs.append(args[0].flatten(0, -2))
        experts.append(output[2])

    handles = [block.router.register_forward_hook(keep) for block in moe_blocks(model)]
    with torch.no_grad():
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs, experts


@pytest.mark.parametrize("experts", [2, 3, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_probe_is_the_regression_on_what_each_router_sees_in_the_fitted_model(tmp_path, name, experts):
    folder = save(tiny_model(name, experts), tmp_path / "model")
    rows = all_rows(tmp_path, experts)
    report = initialise_router(folder, rows, method="probe", tokens=experts * 100, l2=0.7, seed=3)
    probe = choose(rows, experts * 100, 3)
    model = load(folder)
    inputs, chosen = router_inputs(model, probe.inputs)
    assert [row["layer"] for row in report["layers"]] == [block.layer for block in moe_blocks(model)]
    for row, block, features, top in zip(report["layers"], moe_blocks(model), inputs, chosen, strict=True):
        features = features.double().numpy()
        scale = np.sqrt((features[probe.fitted_N] ** 2).mean(0))
        reference = LogisticRegression(C=0.7, fit_intercept=False, max_iter=500)
        reference.fit(features[probe.fitted_N] / scale, probe.cluster[probe.fitted_N])
        logits = features @ block.router.weight.detach().double().numpy().T
        wanted = reference.predict_log_proba(features / scale)
        np.testing.assert_allclose(log_softmax(logits, axis=1), wanted, atol=2e-3)
        settled = np.sort(wanted, axis=1)
        settled = settled[:, -1] - settled[:, -2] > 4e-3  # elsewhere float32 may decide either way
        assert settled.mean() > 0.98
        first = logits.argmax(1)
        assert (first == reference.predict(features / scale))[settled].all()
        assert (top.numpy() == first[:, None]).any(1)[settled].all()
        right = first == probe.cluster
        assert row["held_out_accuracy"] == pytest.approx(right[probe.held_out_N].mean(), abs=0.02)
        assert row["accuracy"] == pytest.approx(right[probe.fitted_N].mean(), abs=0.02)
    assert json.loads((folder / "router.json").read_text()) == report


@pytest.mark.parametrize("method", ["probe", "centroid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_only_router_tensors_change_and_the_bytes_are_reproducible(tmp_path, name, dtype, method):
    model = tiny_model(name, 3, dtype)
    rows = all_rows(tmp_path, 3)
    written = []
    for attempt in range(2):
        folder = save(model, tmp_path / str(attempt))
        initialise_router(folder, rows, method=method, tokens=200, l2=1.0, seed=0)
        written.append((folder / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    after = load(folder)
    assert after.dtype == dtype
    family = family_of(model.config)
    for (key, old), (_, new) in zip(model.state_dict().items(), after.state_dict().items(), strict=True):
        assert same_bits(old, new) != (family.role(key).kind == "router"), key


@pytest.mark.parametrize("method", ["probe", "centroid"])
def test_permuting_clusters_permutes_router_rows(tmp_path, method):
    order = [2, 0, 1]
    model = tiny_model("olmoe", 3)
    rows = all_rows(tmp_path, 3)
    keys = dict(method=method, tokens=300, l2=1.0, seed=0)
    weights = []
    for name, permuted in (("a", range(3)), ("b", order)):
        with torch.no_grad():
            for block in moe_blocks(model):
                block.experts.gate_up_proj.copy_(block.experts.gate_up_proj[list(permuted)])
                block.experts.down_proj.copy_(block.experts.down_proj[list(permuted)])
        folder = save(model, tmp_path / name)
        initialise_router(folder, [rows[i] for i in permuted], **keys)
        weights.append(load(folder).model.layers[0].mlp.gate.weight.detach())
    difference = (weights[0][order] - weights[1]).norm() / weights[1].norm()
    assert difference < 1e-3


@pytest.mark.parametrize("method", ["probe", "centroid"])
def test_experts_of_a_group_share_their_clusters_row(tmp_path, method):
    rows, groups = all_rows(tmp_path, 3), [2, 1, 3]
    cluster = np.repeat([0, 1, 2], groups)
    model = tiny_model("olmoe", 6)
    keys = dict(method=method, tokens=300, l2=1.0, seed=0)
    with torch.no_grad():
        before = [block.router.weight.double().numpy().copy() for block in moe_blocks(model)]
    folder = save(model, tmp_path / "model")
    report = initialise_router(folder, rows, groups=groups, **keys)
    for row, block, own in zip(report["layers"], moe_blocks(load(folder)), before, strict=True):
        weight = block.router.weight.detach().double().numpy()
        for index in range(3):
            mine = cluster == index
            centred = own[mine] - own[mine].mean(0)
            np.testing.assert_allclose(weight[mine] - weight[mine].mean(0), centred, atol=1e-6)
        assert 0 < row["accuracy"] <= 1
    with pytest.raises(ConfigError, match="3 clusters of 5 experts but the merged model has 6 experts"):
        initialise_router(folder, rows, groups=[2, 1, 2], **keys)


@pytest.mark.parametrize("method", ["original", "random"])
def test_methods_that_leave_the_merge_alone(tmp_path, method):
    folder = save(tiny_model("mixtral", 3), tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    report = initialise_router(folder, all_rows(tmp_path, 3), method=method, tokens=9, l2=1.0, seed=0)
    assert report == {"method": method, "layers": []}
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("method", ["probe", "centroid"])
def test_one_expert(tmp_path, method):
    folder = save(tiny_model("qwen2_moe", 1, num_experts_per_tok=1), tmp_path / "model")
    report = initialise_router(folder, all_rows(tmp_path, 1), method=method, tokens=50, l2=1.0, seed=0)
    assert all(row["accuracy"] == 1 for row in report["layers"])
    assert torch.isfinite(load(folder).model.layers[0].mlp.gate.weight).all()


def test_shards_are_written_in_place(tmp_path):
    model = tiny_model("mixtral", 3)
    keys = dict(method="probe", tokens=100, l2=1.0, seed=0)
    for name, size in (("one", "1GB"), ("many", "9KB")):
        save(model, tmp_path / name, max_shard_size=size)
        initialise_router(tmp_path / name, all_rows(tmp_path, 3), **keys)
    one, many = Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "many")
    assert len({stored.path for stored in many.tensors.values()}) > 2
    for key in one.tensors:
        assert torch.allclose(one.tensors[key].read(), many.tensors[key].read(), atol=1e-4)


class TestChoose:
    def test_counts_and_documents(self, tmp_path):
        rows = all_rows(tmp_path, 3, documents=10, pieces=3)
        probe = choose(rows, 300, 0)
        both = np.concatenate([probe.fitted_N, probe.held_out_N])
        assert len(set(both)) == len(both) == 300
        assert (np.bincount(probe.cluster[both]) == 100).all()
        assert probe.inputs["input_ids"].shape[1] == 16  # the two columns of padding are cut off
        for index in range(3):
            held = probe.held_out_N[probe.cluster[probe.held_out_N] == index]
            assert 0 < len(held) <= 50

    def test_documents_are_disjoint(self, tmp_path):
        rows = all_rows(tmp_path, 2, documents=6, pieces=4)
        probe = choose(rows, 10_000, 1)
        documents = np.concatenate([part.documents(np.arange(len(part)))[:, :16].ravel() for part in rows])
        fitted, held = set(documents[probe.fitted_N]), set(documents[probe.held_out_N])
        assert fitted and held and not fitted & held and -1 not in fitted | held
        assert len(probe.fitted_N) + len(probe.held_out_N) == 2 * 24 * 16

    def test_repeated_rows_count_once(self, tmp_path):
        rows = cluster_rows(tmp_path, 0, 1)
        twice = rows.take(np.repeat(np.arange(len(rows)), 2))
        probe = choose([twice], 10_000, 0)
        assert len(probe.inputs["input_ids"]) == len(rows)

    def test_one_document_leaves_nothing_to_hold_out(self, tmp_path):
        folder = save(tiny_model("mixtral", 2), tmp_path / "model")
        rows = all_rows(tmp_path, 2, documents=1)
        report = initialise_router(folder, rows, method="probe", tokens=9, l2=1.0, seed=0)
        assert all(row["held_out_accuracy"] is None for row in report["layers"])


def test_centroids_closed_form():
    """Two clusters: directions are +-(difference of the means), the scale is the maximum of the likelihood."""
    generator = np.random.default_rng(0)
    cluster = np.repeat([0, 1], 500)
    features = generator.normal(size=(1000, 4)) + np.where(cluster[:, None] == 0, 1, -1) * [1, 0, 0, 0]
    weight = fit_centroid(features, cluster, 2, 1.0)
    gap = features[cluster == 0].mean(0) - features[cluster == 1].mean(0)
    unit = gap / np.linalg.norm(gap)
    scale = np.linalg.norm(weight[0])
    np.testing.assert_allclose(weight, scale * np.stack([unit, -unit]), rtol=1e-9)

    def loss(s):
        logits = s * features @ np.stack([unit, -unit]).T
        return -log_softmax(logits, axis=1)[np.arange(1000), cluster].mean()

    assert loss(scale) < min(loss(scale * 1.01), loss(scale / 1.01))


def test_clusters_that_cannot_be_told_apart_get_a_flat_router():
    features = np.ones((90, 5))
    cluster = np.repeat([0, 1, 2], 30)
    assert np.abs(fit_centroid(features, cluster, 3, 1.0)).max() == 0
    logits = features @ fit_probe(features, cluster, 3, 1.0).T
    np.testing.assert_allclose(logits - logits[:, :1], 0, atol=1e-3)


def test_a_feature_that_is_always_zero():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(60, 3)) * [1, 0, 1000]
    assert np.isfinite(fit_probe(features, np.arange(60) % 3, 3, 1.0)).all()


def train(model, rows, steps, rate):
    generator = np.random.default_rng(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        loss = cross_entropy(model, rows, generator.integers(0, len(rows[0]), 24 // len(rows)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cross_entropy(model, rows, chosen):
    parts = [part.batch(chosen) for part in rows]
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    labels = batch.pop("labels").flatten()
    logits = model(**batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_a_fitted_router_serves_trained_experts_better_than_a_random_one(tmp_path, name):
    """Three domains with rules of their own: token x is followed by x + 1, x + 2 or x + 3."""
    shifts, train_rows, held_rows = (1, 2, 3), [], []
    for cluster, shift in enumerate(shifts):
        for rows, count, seed in ((train_rows, 300, 0), (held_rows, 40, 1)):
            part = cluster_rows(tmp_path, cluster, 3, documents=count, seed=seed)
            tokens = np.fromfile(part.tokens_path, np.uint16).reshape(count, -1)
            tokens = (tokens[:, :1] + shift * np.arange(tokens.shape[1])) % VOCABULARY
            tokens.astype(np.uint16).tofile(part.tokens_path)
            rows.append(part)
    keys = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_experts_per_tok=1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, 1, **keys))
    train(model, train_rows, 20, 5e-3)
    start, folders = save(model, tmp_path / "start"), []
    for cluster, part in enumerate(train_rows):
        submodel = load(start)
        set_trainable(submodel, "experts")
        train(submodel, [part], 40, 5e-3)
        folder = save(submodel, tmp_path / f"sub{cluster}")
        write_submodel_note(folder, base=identity(start), expert=cluster, experts=3, clustering="c")
        folders.append(folder)
    config = with_experts(model.config, 3, 2)
    losses = {}
    for method in ("random", "centroid", "probe"):
        out = tmp_path / method
        merge(start, folders, out, full_config=config)
        initialise_router(out, train_rows, method=method, tokens=3000, l2=1.0, seed=0)
        with torch.no_grad():
            losses[method] = cross_entropy(load(out), held_rows, np.arange(40)).item()
    assert losses["probe"] < losses["centroid"] < losses["random"] - 0.05


class TestRefused:
    def refuse(self, folder, rows, match, error=ConfigError):
        with pytest.raises(error, match=match):
            initialise_router(folder, rows, method="probe", tokens=50, l2=1.0, seed=0)

    def test_other_number_of_clusters(self, tmp_path):
        folder = save(tiny_model("mixtral", 3), tmp_path / "model")
        self.refuse(folder, all_rows(tmp_path, 2), "2 clusters of 2 experts but the merged model has 3")

    def test_empty_cluster(self, tmp_path):
        folder = save(tiny_model("mixtral", 2), tmp_path / "model")
        rows = all_rows(tmp_path, 2)
        self.refuse(folder, [rows[0], rows[1].take(np.arange(0))], "cluster 1 has no tokens")

    def test_other_lengths(self, tmp_path):
        folder = save(tiny_model("mixtral", 2), tmp_path / "model")
        rows = [cluster_rows(tmp_path, 0, 2), cluster_rows(tmp_path, 1, 2, length=8)]
        self.refuse(folder, rows, r"rows of \[10, 18\] positions")

    def test_not_finite(self, tmp_path):
        model = tiny_model("mixtral", 2)
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj.fill_(float("inf"))
        folder = save(model, tmp_path / "model")
        before = (folder / "model.safetensors").read_bytes()
        self.refuse(folder, all_rows(tmp_path, 2), "router input of layer 1 is not finite", ArtifactError)
        assert (folder / "model.safetensors").read_bytes() == before
        assert num_experts(Checkpoint.open(folder).config) == 2
