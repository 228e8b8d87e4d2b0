"""Experts added to a finished MoE: old tensors keep their bits, new rows maximise the likelihood, all families."""

import json

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForCausalLM, AutoTokenizer

from disco import pipeline
from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint, identity
from disco.cli import app
from disco.config import ConfigError, Experiment
from disco.extend import extend, favourite, fit_centroid, fit_new_rows, fit_probe, known_text
from disco.family import moe_blocks, num_experts
from disco.split import split, write_submodel_note
from disco.stages import stages
from tests.disco.test_merge import perturb
from tests.disco.test_router import all_rows
from tests.disco.tiny_experiment import corpus, tiny_experiment, write
from tests.disco.tiny_models import FAMILIES, load, same_bits, save, tiny_model

UNGROUPED = [name for name in FAMILIES if name != "deepseek_v2 grouped"]


def new_expert(old, folder, begin=0, index=0, of=1, seed=0):
    """A submodel of `old` whose expert has moved, and nothing else."""
    split(old, begin, folder)
    checkpoint = Checkpoint.open(folder)
    generator = torch.Generator().manual_seed(seed)
    for key, stored in checkpoint.tensors.items():
        if checkpoint.family.role(key).kind == "expert" and ".experts.0." in key:
            values = stored.read()
            stored.write((values + torch.randn(values.shape, generator=generator)).to(values.dtype))
    experts = num_experts(Checkpoint.open(old).config)
    write_submodel_note(
        folder, base=identity(old), expert=index, experts=of, clustering="", group=[experts + index]
    )
    return folder


def tokenized(folder):
    """A tokenizer of 61 ids at most beside the model: ids are what the tests give, text only has to be encoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<bos>", "<eos>", "<pad>", *(f"w{n}" for n in range(50))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    return folder


EVERY = [(name, torch.float32) for name in UNGROUPED] + [("olmoe", torch.bfloat16), ("gpt_oss", torch.float16)]


@pytest.mark.parametrize("name, dtype", EVERY)
def test_old_tensors_keep_their_bits_and_new_experts_come_last(tmp_path, name, dtype):
    old = save(tiny_model(name, 3, dtype), tmp_path / "old")
    parts = [new_expert(old, tmp_path / f"new{n}", begin=n, index=n, of=2, seed=n) for n in range(2)]
    extend(old, parts, tmp_path / "out", seed=7)
    before, after = Checkpoint.open(old), Checkpoint.open(tmp_path / "out")
    assert num_experts(after.config) == 5
    assert json.loads((tmp_path / "out" / "extend.json").read_text())["old"] == 3
    for key, stored in before.tensors.items():
        found = after.tensors[key].read()
        if before.family.role(key).kind == "router":
            assert found.shape[0] == 5
            if found.dim() == 1:
                assert torch.equal(found[3:], stored.read().double().mean().to(found.dtype).expand(2))
            found = found[:3]
        assert same_bits(found, stored.read()), key
    for n, part in enumerate(parts):
        for key, stored in Checkpoint.open(part).tensors.items():
            role = before.family.role(key)
            if role.kind == "expert" and role.expert == 0:
                assert same_bits(after.tensors[role.template.format(e=3 + n)].read(), stored.read())
    logits = load(tmp_path / "out")(torch.arange(12).reshape(1, 12)).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_extended_model_is_the_old_one_where_new_experts_are_never_chosen(tmp_path, name):
    model = tiny_model(name, 3)
    old = save(model, tmp_path / "old")
    extend(old, [new_expert(old, tmp_path / "new")], tmp_path / "out")
    longer = load(tmp_path / "out")
    with torch.no_grad():
        for block in moe_blocks(longer):
            for tensor_name, tensor in block.router.state_dict().items():
                if tensor_name != "weight":
                    tensor[3:] = -1e4
            if name in ("qwen2_moe", "mixtral"):
                block.router.register_forward_pre_hook(
                    lambda module, args: module.weight.__setitem__(slice(3, 4), _away(args[0]))
                )
    ids = torch.arange(20).reshape(2, 10)
    if name in ("qwen2_moe", "mixtral"):  # no bias: a row that is against every position, one position at a time
        ids = ids[:1, :1]
    with torch.no_grad():
        one, other = longer(ids).logits, load(old)(ids).logits
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def _away(hidden):
    flat = hidden.reshape(-1, hidden.shape[-1])
    return -1e4 * flat.sum(0) / flat.square().sum()


def test_what_does_not_belong_is_refused(tmp_path):
    old = save(tiny_model("mixtral", 3), tmp_path / "old")
    moved = new_expert(old, tmp_path / "new")
    perturb(moved, 3)
    with pytest.raises(ArtifactError, match=r"new: .* is not that of .*old: train it with a frozen shared part"):
        extend(old, [moved], tmp_path / "out")
    other = save(tiny_model("mixtral", 3, seed=1), tmp_path / "other")
    with pytest.raises(ArtifactError, match="was trained from another base"):
        extend(other, [moved], tmp_path / "out")
    grouped = save(tiny_model("deepseek_v2 grouped", 4), tmp_path / "grouped")
    with pytest.raises(ConfigError, match="n_group is 4 and topk_group 2, which does not fit 5 experts"):
        extend(grouped, [new_expert(grouped, tmp_path / "one")], tmp_path / "out")


@pytest.mark.parametrize("name", UNGROUPED)
@pytest.mark.parametrize("method", ["probe", "centroid"])
def test_new_rows_are_fitted_front_to_back_and_old_ones_kept(tmp_path, name, method):
    old = tokenized(save(tiny_model(name, 3), tmp_path / "old"))
    parts = [new_expert(old, tmp_path / f"new{n}", index=n, of=2, seed=n) for n in range(2)]
    extend(old, parts, tmp_path / "out")
    before = {key: stored.read() for key, stored in Checkpoint.open(tmp_path / "out").tensors.items()}
    rows = all_rows(tmp_path, 2)
    keys = dict(method=method, tokens=300, l2=1.0, seed=0, old=old)
    report = fit_new_rows(tmp_path / "out", rows, **keys)
    after = Checkpoint.open(tmp_path / "out")
    for key, stored in after.tensors.items():
        found, role = stored.read(), after.family.role(key)
        if role.kind == "router" and found.dim() == 2:
            assert same_bits(found[:3], before[key][:3]) and not torch.equal(found[3:], before[key][3:])
        else:
            assert same_bits(found, before[key])
    assert [row["layer"] for row in report["layers"]] == [
        block.layer for block in moe_blocks(load(tmp_path / "out"))
    ]
    assert report["old_text"] == "drawn" and all(row["accuracy"] > 0.4 for row in report["layers"])


def test_fits_maximise_the_likelihood():
    generator = np.random.default_rng(0)
    class_N = generator.integers(0, 2, 300)
    features_NH = generator.normal(size=(300, 5)) + class_N[:, None] * [1, 0, -1, 0, 0.5]
    scale_H = np.sqrt((features_NH**2).mean(0))
    # One new expert, an old logit of 0, old text that counts 3 times: scikit-learn's weighted regression.
    reference = LogisticRegression(C=0.7, fit_intercept=False, tol=1e-10, max_iter=1000)
    reference.fit(features_NH / scale_H, class_N == 0, sample_weight=np.where(class_N == 1, 3.0, 1.0))
    found = fit_probe(features_NH, class_N, np.zeros(300), 1, 3.0, 0.7)
    np.testing.assert_allclose(found, reference.coef_ / scale_H, atol=1e-4)

    # Two new experts beside given logits: nothing near the result is better (the objective is convex).
    class_N, offset_N = generator.integers(0, 3, 300), generator.normal(size=300)

    def loss(rows_nH, l2=None):
        logits = np.concatenate([features_NH @ rows_nH.T, offset_N[:, None]], axis=1)
        weight = np.where(class_N == 2, 4.0, 1.0)
        total = -(weight * log_softmax(logits, axis=1)[np.arange(300), class_N]).sum()
        return total + (((rows_nH * scale_H) ** 2).sum() / (2 * l2) if l2 else 0)

    rows = fit_probe(features_NH, class_N, offset_N, 2, 4.0, 0.5)
    for _ in range(50):
        assert loss(rows, 0.5) <= loss(rows + 0.05 * generator.normal(size=rows.shape), 0.5)
    centroid = fit_centroid(features_NH, class_N, offset_N, 2, 4.0, 0.5)
    for factor in (0.5, 0.9, 1.1, 2):
        assert loss(centroid) <= loss(centroid * factor)


def test_old_text_from_files_or_drawn(tmp_path):
    old = tokenized(save(tiny_model("qwen2_moe", 3), tmp_path / "old"))
    drawn = known_text(old, 12, 100, 0)
    assert drawn.shape == (9, 12) and (drawn[:, 0] == 0).all() and torch.equal(drawn, known_text(old, 12, 100, 0))
    assert not torch.equal(drawn, known_text(old, 12, 100, 1))
    (tmp_path / "text").write_text("w1 w2 w3 w4 " * 40)
    rows = known_text(old, 12, 100, 0, [tmp_path / "text"])
    assert rows.shape == (9, 12) and set(rows.unique().tolist()) == {4, 5, 6, 7}
    with pytest.raises(ConfigError, match="1 files hold 160 tokens, 500 are needed"):
        known_text(old, 100, 100, 0, [tmp_path / "text"])


def test_the_favourite_is_the_expert_chosen_most(tmp_path):
    model = tiny_model("mixtral", 4, num_experts_per_tok=1)
    with torch.no_grad():
        for block in moe_blocks(model):
            block.router.weight.zero_()
            block.router.weight[1] = 1e-3  # by the sign of the sum of its input
            block.router.weight[2] = -1e-3
    folder = save(model, tmp_path / "old")
    rows = all_rows(tmp_path, 2)[0]
    counts = np.zeros(4)
    inputs = rows.batch(np.arange(len(rows)))
    kept = rows.documents(np.arange(len(rows))).ravel() >= 0
    hooks = [
        block.router.register_forward_hook(
            lambda module, args, output: np.add.at(counts, output[2].flatten().numpy()[kept], 1)
        )
        for block in moe_blocks(model)
    ]
    with torch.no_grad():
        model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
    assert hooks and favourite(folder, rows) == counts.argmax()


def extension(folder, old, **changed):
    raw = tiny_experiment(folder, name="longer", model={}, **changed)
    raw["model"] = {"source": str(old), "extend": {"experts": 1}}
    raw["corpus"]["tokenizer"] = {"kind": "model"}
    raw["corpus"]["sources"] = raw["corpus"]["sources"][1:]
    raw["seed_phase"], raw["finetune"] = {}, {"batch_size": 4}
    return raw


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on one domain's words, with its merged model."""
    folder = tmp_path_factory.mktemp("old")
    corpus(folder / "corpus")
    raw = Experiment.load(write(folder, seed_phase={"tokens": 0}, finetune={"tokens": 0, "router_tokens": 0}))
    pipeline.run(raw, until="merge", say=lambda text: None)
    return folder, raw.folder / "merge"


def test_the_command_extends_a_model_end_to_end(finished, monkeypatch):
    from typer.testing import CliRunner

    folder, old = finished
    monkeypatch.chdir(folder)
    path = write(folder, name="longer", merge={"probe_tokens": 400}, baselines=["joint"])
    done = CliRunner().invoke(app, ["extend", str(old), str(path)])
    assert done.exit_code == 0, done.output + repr(done.exception)
    out = folder / "runs" / "longer" / "merge"
    assert f"extended model: {out}" in done.output.replace("\n", "")
    before, after = Checkpoint.open(old), Checkpoint.open(out)
    assert (num_experts(before.config), num_experts(after.config)) == (2, 3)
    for key, stored in before.tensors.items():
        found = after.tensors[key].read()
        assert same_bits(
            found[: len(stored.read())] if after.family.role(key).kind == "router" else found, stored.read()
        )
    begin = json.loads((out.parent / "split" / "0" / "submodel.json").read_text())["expert"]
    key = next(key for key in after.tensors if ".experts.2." in key)
    assert not torch.equal(after.tensors[key].read(), before.tensors[key.replace("s.2.", f"s.{begin}.")].read())
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = AutoTokenizer.from_pretrained(out)("the whale and the court", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    results = json.loads((out.parent / "evaluate" / "results.json").read_text())["models"]
    assert {"start", "submodel 0", "merged"} <= set(results)
    assert (out.parent / "report" / "report.html").exists()


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"train": {"mode": "full"}}, "train.mode is 'full', with model.extend it has to be 'expert'"),
        ({"cluster": {"k": 3}}, "cluster.k is 3, with model.extend it has to be 1"),
        ({"baselines": ["joint"]}, "baselines is"),
        (
            {"merge": {"router": "original"}},
            "merge.router is 'original': rows of new experts are probe,",
        ),
        ({"merge": {"shared": "ties"}}, "merge.shared is 'ties'"),
    ],
)
def test_settings_that_an_extension_cannot_have_are_refused(tmp_path, changed, message):
    raw = extension(tmp_path, "somewhere")
    for key, value in changed.items():
        raw[key] = raw.get(key, {}) | value if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        Experiment.parse(raw)


def test_defaults_and_stages_of_an_extension(finished, tmp_path):
    folder, old = finished
    raw = extension(folder, old)
    config = Experiment.parse(raw)
    assert (config.train.mode, config.seed_phase.tokens, config.finetune.tokens) == ("expert", 0, 0)
    assert [name for name in stages(config) if "finetune" not in name] == list(stages(config))
    assert Experiment.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    for begin, text, message in ((2, [], "extend.begin is 2: .* has 2 experts"), (0, ["no*.txt"], "matches? no")):
        raw["model"]["extend"] = {"begin": begin, "old_text": text}
        with pytest.raises(ConfigError, match=message):
            pipeline.run(Experiment.parse(raw), say=lambda line: None)
