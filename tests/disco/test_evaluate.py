"""Losses against Hugging Face on each document alone; routing against its router logits; the results file."""

import json
import math
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

from disco.config import ConfigError, Experiment, Task
from disco.corpus import Corpus, prepare
from disco.evaluate import (
    Measured,
    difference,
    evaluate,
    final,
    find_tasks,
    loss_of,
    losses,
    measure,
    models,
    run_tasks,
)
from disco.packing import pack
from disco.routing import RouterCounts, summary

LENGTH = 24


def small(family, experts, vocabulary):
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "num_experts_per_tok": min(2, experts),
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
    }
    if family == "mixtral":
        return MixtralConfig(**common, num_local_experts=experts)
    if family == "olmoe":
        return OlmoeConfig(**common, num_experts=experts)
    return Qwen2MoeConfig(
        **common, num_experts=experts, moe_intermediate_size=12, shared_expert_intermediate_size=8
    )


def build(family="qwen2_moe", experts=4, vocabulary=300, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(small(family, experts, vocabulary)).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a prepared corpus of two sources and hand-made clusters, and its experiment."""
    root = tmp_path_factory.mktemp("evaluate")
    generator = np.random.default_rng(0)
    for source, words in (("birds", "crow wren gull owl"), ("metals", "iron zinc lead tin")):
        (root / source).mkdir()
        for n in range(12):
            text = " ".join(generator.choice(words.split(), size=4 + 9 * (n % 5)))
            (root / source / f"{n}.txt").write_text(f"{n} {text}")
    sources = [{"name": name, "files": [str(root / name / "*.txt")]} for name in ("birds", "metals")]
    config = Experiment.parse(
        {
            "name": "tiny",
            "runs": str(root / "runs"),
            "model": {"config": small("qwen2_moe", 4, 300).to_dict(), "experts": "eager"},
            "corpus": {
                "sources": sources,
                "tokenizer": {"kind": "train", "vocab_size": 300},
                "sequence_length": LENGTH,
                "validation": 0.4,
                "min_chars": 5,
            },
            "evaluate": {"batch_size": 3},
        }
    )
    folder = config.folder
    (folder / "prepare").mkdir(parents=True)
    prepare(config, folder / "prepare")
    corpus = Corpus.open(folder / "prepare")
    (folder / "cluster").mkdir()
    for name in ("train", "validation"):
        source = corpus.split(name).source
        table = {"document": np.arange(len(source)), "cluster": source.astype(np.int32)}
        table["distance"] = np.zeros(len(source), dtype=np.float32)
        pq.write_table(pa.table(table), folder / "cluster" / f"{name}.parquet")
    return config


def pieces(split):
    """(document, inputs, labels) of every document cut at LENGTH, from the token file."""
    tokens = np.fromfile(split.tokens_path, dtype=split.dtype).astype(np.int64)
    for document in range(len(split)):
        start, count = split.offset[document], split.tokens[document]
        stored = torch.from_numpy(tokens[start : start + count + 1])
        for begin in range(0, count, LENGTH):
            end = min(begin + LENGTH, count)
            yield document, stored[None, begin:end], stored[None, begin + 1 : end + 1]


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("packing", ["pack", "document"])
def test_losses_are_those_of_each_document_alone(run, family, packing):
    split = Corpus.open(run.folder / "prepare").split("validation")
    model = build(family)
    rows = pack(split, np.arange(len(split)), LENGTH, packing, seed=1)
    sums_D, labels_D = losses(model, rows, 3, len(split), chunk=7)
    expected_D = np.zeros(len(split))
    with torch.no_grad():
        for document, inputs, labels in pieces(split):
            logits = model(input_ids=inputs).logits
            expected_D[document] += F.cross_entropy(logits[0], labels[0], reduction="sum").item()
    assert split.tokens.max() > LENGTH  # some documents are cut
    np.testing.assert_array_equal(labels_D, split.tokens)
    np.testing.assert_allclose(sums_D, expected_D, rtol=1e-5)
    assert sums_D.dtype == np.float64 and labels_D.dtype == np.int64


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe"])
def test_routing_counts_equal_the_top_experts_of_the_router_logits(run, family):
    split = Corpus.open(run.folder / "prepare").split("validation")
    model = build(family)
    rows = pack(split, np.arange(len(split)), LENGTH, "pack", seed=0)
    entry, routing, *_ = measure(model, rows, split, split.source, 2, batch_size=2)
    expected = np.zeros((2, 2, 4), dtype=int)
    with torch.no_grad():
        for document, inputs, _ in pieces(split):
            logits = model(input_ids=inputs, output_router_logits=True).router_logits
            for layer, logits_NE in enumerate(logits):
                for expert in logits_NE.topk(2).indices.flatten().tolist():
                    expected[layer, split.source[document], expert] += 1
    assert routing["counts"] == expected.tolist()
    assert np.sum(routing["counts"]) == 2 * 2 * split.tokens.sum()
    assert entry["tokens"] == split.tokens.sum()


def test_groups_add_up_and_perplexity_is_weighted_by_tokens(run):
    split = Corpus.open(run.folder / "prepare").split("validation")
    rows = pack(split, np.arange(len(split)), LENGTH, "pack", seed=0)
    entry, routing, *_ = measure(build(experts=1), rows, split, split.source, 3, batch_size=4)
    assert routing is None  # one expert: nothing to route
    assert entry["perplexity"] == pytest.approx(math.exp(entry["cross_entropy"]))
    for kind, groups in (("by_cluster", 3), ("by_source", 2)):
        parts = entry[kind].values()
        assert len(parts) == groups and sum(part["tokens"] for part in parts) == entry["tokens"]
        total = sum(part["cross_entropy"] * part["tokens"] for part in parts if part["tokens"])
        assert total / entry["tokens"] == pytest.approx(entry["cross_entropy"])
    assert entry["by_cluster"]["2"] == {"cross_entropy": None, "perplexity": None, "tokens": 0}
    assert entry["by_source"]["birds"] == entry["by_cluster"]["0"]


def test_losses_that_are_not_numbers_or_too_large():
    assert loss_of(np.array([np.nan]), np.array([3]))["cross_entropy"] is None
    huge = loss_of(np.array([9000.0]), np.array([3]))
    assert huge["cross_entropy"] == 3000 and huge["perplexity"] is None
    assert loss_of(np.array([2.0, 4.0]), np.array([1, 3]))["cross_entropy"] == 1.5


def test_summary_of_routing_in_closed_form():
    own = np.eye(4, dtype=int)[None] * 7
    assert summary(own)["entropy"] == [pytest.approx(1)]
    assert summary(own)["specialisation"] == [pytest.approx(1)] and summary(own)["dead"] == [[]]
    alike = np.ones((1, 2, 3), dtype=int)
    assert summary(alike)["specialisation"] == [pytest.approx(0, abs=1e-12)]
    one = np.zeros((1, 2, 3), dtype=int)
    one[0, :, 1] = 5
    assert summary(one)["entropy"] == [0] and summary(one)["dead"] == [[0, 2]]
    rare = np.array([[[9970, 30]]])  # 0.3 % is less than 1 % of a half
    assert summary(rare)["dead"] == [[1]] and summary(rare)["specialisation"] == [0]
    nothing = summary(np.zeros((1, 2, 2), dtype=int))
    assert nothing["entropy"] == [0] and nothing["dead"] == [[0, 1]]
    assert summary(np.ones((1, 2, 1), dtype=int))["entropy"] == [1.0]


def test_positions_without_a_cluster_do_not_count():
    model = build()
    with RouterCounts(model, 2) as routers:
        model(input_ids=torch.arange(6)[None])
        routers.add(np.array([-1, 0, 0, 1, -1, 1]))
    assert routers.counts_LKE.sum(axis=(0, 2)).tolist() == [2 * 2 * 2, 2 * 2 * 2]
    assert not any(len(module._forward_hooks) for module in model.modules())


def test_difference_has_the_error_of_paired_documents():
    generator = np.random.default_rng(0)
    labels = np.full(500, 40)
    common = generator.normal(200, 60, 500)  # hard and easy documents: they cancel
    gap = generator.normal(4, 2, 500)
    one, other = (Measured({}, None, sums, labels) for sums in (common + gap, common))
    found = difference(one, other)
    assert found["nats"] == pytest.approx(gap.mean() / 40)
    assert found["standard_error"] == pytest.approx(gap.std(ddof=1) / np.sqrt(500) / 40)
    assert difference(one, one) == {"nats": 0.0, "standard_error": 0.0}


def test_standard_error_agrees_with_a_bootstrap_over_uneven_documents():
    generator = np.random.default_rng(1)
    labels = generator.integers(1, 80, 400)
    gap = labels * generator.normal(0.1, 0.3, 400)
    zero = np.zeros(400)
    found = difference(Measured({}, None, gap, labels), Measured({}, None, zero, labels))
    drawn = generator.integers(0, 400, (4000, 400))
    bootstrap = (gap[drawn].sum(1) / labels[drawn].sum(1)).std()
    assert found["standard_error"] == pytest.approx(bootstrap, rel=0.08)


def fill(run, names):
    for seed, (name, experts) in enumerate(names.items()):
        build(experts=experts, seed=seed).save_pretrained(run.folder / name)


def test_evaluate_measures_every_model_there_is(run, tmp_path):
    fill(run, {"start": 1, "train/0": 1, "train/1": 1, "merge": 4})
    evaluate(run, run.folder, tmp_path, progress=lambda line: None)
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["models"]) == ["start", "submodel 0", "submodel 1", "merged"]
    assert list(results["routing"]) == ["merged"] and results["tasks"] == {}
    assert set(results["models"]["submodel 1"]["by_cluster"]) == {"0", "1"}
    assert results["validation"]["rows_used"] == results["validation"]["rows"]

    fill(run, {"finetune": 4, "baselines/joint": 4, "baselines/random_split/merge": 4})
    fill(run, {"finetune_router": 4})
    lines = []
    fewer = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"max_rows": 2})})
    evaluate(fewer, run.folder, tmp_path, lines.append)
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["models"])[3:] == ["merged", "router tuned", "tuned", "joint", "random_split merged"]
    assert results["validation"]["rows_used"] == 2 and len(lines) == 8
    assert list(results["differences"]) == ["tuned - joint", "random_split merged - tuned"]
    gap = results["models"]["tuned"]["cross_entropy"] - results["models"]["joint"]["cross_entropy"]
    assert results["differences"]["tuned - joint"]["nats"] == pytest.approx(gap)
    assert final(models(run.folder, 2)) == "tuned"
    assert final(results["models"], "random_split ") == "random_split merged" and final({}) is None


def test_a_model_of_nan_leaves_null_and_no_difference(run, tmp_path):
    fill(run, {"merge": 4, "finetune": 4, "baselines/joint": 4})
    model = build()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(run.folder / "baselines/joint")
    evaluate(run, run.folder, tmp_path, progress=lambda line: None)
    text = (tmp_path / "results.json").read_text()
    results = json.loads(text)
    assert "NaN" not in text and results["models"]["joint"]["cross_entropy"] is None
    assert "tuned - joint" not in results["differences"]


def test_tasks_without_the_package_or_the_folder_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="tiny: include_path is '.*none', which is no folder"):
        find_tasks([Task(name="tiny", include_path=str(tmp_path / "none"))])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match="needs the package lm_eval: pip install"):
        find_tasks([Task(name="tiny")])


@pytest.fixture
def fake_lm_eval(monkeypatch):
    """Modules with the few names of lm_eval that are used; `calls` is what simple_evaluate was given."""
    calls = []

    class TaskManager:
        def __init__(self, include_path=None):
            self.all_tasks = ["known"] + (["local"] if include_path else [])

    def simple_evaluate(**kwargs):
        calls.append(kwargs)
        task = kwargs["tasks"][0]
        values = {"alias": task, "sample_len": 3, "acc,none": 0.25, "acc_stderr,none": "N/A"}
        return {"results": {task: values | {"acc_norm_stderr,none": 0.1}}}

    for name, values in {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda **kwargs: kwargs},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_tasks_run_on_the_final_models_only(run, tmp_path, fake_lm_eval):
    fill(run, {"start": 1, "train/0": 1, "merge": 4, "finetune": 4})
    task = Task(name="local", include_path=str(tmp_path), limit=2)
    config = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"tasks": [task]})})
    evaluate(config, run.folder, tmp_path, progress=lambda line: None)
    tasks = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert tasks["tuned"] == {"local": {"acc": 0.25}}
    assert "start" in tasks and "merged" not in tasks and "submodel 0" not in tasks
    assert fake_lm_eval[0]["limit"] == 2 and fake_lm_eval[0]["num_fewshot"] is None
    with pytest.raises(ConfigError, match="no task is called 'locale' in lm_eval or below"):
        find_tasks([Task(name="locale", include_path=str(tmp_path))])


@pytest.mark.slow
def test_a_local_task_with_the_real_package(run, tmp_path):
    pytest.importorskip("lm_eval")
    lines = [{"question": f"crow and {n} is", "choices": [" gull", " zinc"], "answer": n % 2} for n in range(4)]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files: {tmp_path}/tiny.jsonl\n"
        "test_split: train\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list:\n  - metric: acc\n"
    )
    tasks = [Task(name="tiny_choice", include_path=str(tmp_path), limit=3)]
    tokenizer = Corpus.open(run.folder / "prepare").tokenizer()
    scores = run_tasks(build(), tokenizer, tasks, find_tasks(tasks), batch_size=2, seed=0)
    assert scores["tiny_choice"]["acc"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
