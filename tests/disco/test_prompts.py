"""Router rows from prompts against plain transformers, one prompt at a time."""

import numpy as np
import pytest
import torch

from disco.checkpoint import Checkpoint
from disco.prompts import prompt_rows
from disco.router import initialise_router
from tests.disco.test_router import all_rows
from tests.disco.tiny_models import load, save, tiny_model


def prompts_of(rows):
    tokens = np.fromfile(rows.tokens_path, rows.dtype).astype(np.int64)
    return [torch.from_numpy(tokens[s : s + n])[None] for s, n in zip(rows.start, rows.length, strict=True)]


def directions(folder, rows, method):
    """[L, K, H]: every prompt by itself through Hugging Face's model."""
    model, made = load(folder), []
    for part in rows:
        vectors = []
        for ids in prompts_of(part):
            with torch.no_grad():
                states = model(ids, output_hidden_states=True).hidden_states[:-1]
            embedded = model.get_input_embeddings().weight[ids[0]].sum(0)
            vectors.append(
                torch.stack([state[0, -1] for state in states] if method == "hidden" else [embedded] * len(states))
            )
        mean_LH = torch.stack(vectors).double().mean(0)
        made.append(mean_LH / mean_LH.norm(dim=1, keepdim=True))
    return torch.stack(made, dim=1).detach().numpy()


@pytest.mark.parametrize("method", ["hidden", "cheap_embed"])
@pytest.mark.parametrize("name", ["qwen2_moe dense layers", "mixtral", "gpt_oss", "deepseek_v3"])
def test_rows_are_the_directions_of_every_prompt_alone(tmp_path, name, method):
    base = save(tiny_model(name, 3), tmp_path / "base")
    merged = save(tiny_model(name, 3, seed=1), tmp_path / "merged")
    before = {key: stored.read() for key, stored in Checkpoint.open(merged).tensors.items()}
    rows = all_rows(tmp_path, 3)
    wanted = directions(base, rows, method)
    np.testing.assert_allclose(prompt_rows(base, rows, method, 10**6), wanted, atol=2e-5)
    report = initialise_router(merged, rows, method=method, tokens=10**6, l2=1.0, seed=0, base=base)
    assert report == {"method": method, "layers": []}
    after = Checkpoint.open(merged)
    for key, stored in after.tensors.items():
        if after.family.role(key).kind != "router":
            assert torch.equal(stored.read(), before[key])
        elif len(stored.shape) == 1:
            assert not stored.read().any()
        else:
            layer = int(key.split("layers.")[1].split(".")[0])
            np.testing.assert_allclose(stored.read().numpy(), wanted[layer], atol=3e-5)


def test_fewer_tokens_are_fewer_prompts_and_groups_share_a_row(tmp_path):
    base = save(tiny_model("mixtral", 4), tmp_path / "base")
    merged = save(tiny_model("mixtral", 4), tmp_path / "merged")
    rows = all_rows(tmp_path, 2)
    few = [part.take(np.arange(3)) for part in rows]
    np.testing.assert_allclose(
        prompt_rows(base, rows, "hidden", 2 * 40), prompt_rows(base, few, "hidden", 10**6), atol=1e-9
    )
    initialise_router(merged, rows, method="hidden", tokens=10**6, l2=1.0, seed=0, groups=[1, 3], base=base)
    wanted = prompt_rows(base, rows, "hidden", 10**6)
    for key, stored in Checkpoint.open(merged).tensors.items():
        if "gate.weight" in key:
            layer = int(key.split("layers.")[1].split(".")[0])
            np.testing.assert_allclose(stored.read()[0].numpy(), wanted[layer, 0], atol=1e-6)
            np.testing.assert_allclose(stored.read()[1:].mean(0).numpy(), wanted[layer, 1], atol=1e-6)
            assert not torch.equal(stored.read()[1], stored.read()[2])


def test_the_pipeline_takes_them(tmp_path):
    import json

    from disco import pipeline
    from disco.config import Experiment
    from tests.disco.tiny_experiment import corpus, write

    corpus(tmp_path / "corpus", 20)
    changed = {"seed_phase": {"tokens": 0}, "finetune": {"tokens": 0, "router_tokens": 0}, "train": {"tokens": 256}}
    config = Experiment.load(write(tmp_path, merge={"router": "hidden"}, **changed))
    pipeline.run(config, until="merge", say=lambda line: None)
    assert json.loads((config.folder / "merge" / "router.json").read_text())["method"] == "hidden"
