import pytest
import torch

import bcd
from tests.bcd.models import batch, build, llama_config

ABOVE = ["model.layers.2", "model.norm", "lm_head"]


def start(model, **config):
    return bcd.initialize(model=model, config={"lr": 1e-2, "expansion": {"lr_ratio": 0.5}, **config})


def names_moved(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(engine, index=0):
    engine.backward(engine(**batch(index)).loss)
    engine.step()


def test_layers_above_move_along_the_normalised_gradient():
    reference = build(llama_config(layers=3))
    reference(**batch(0)).loss.backward()
    model = build(llama_config(layers=3))
    engine = start(model, granularity=["model.layers.1", "model.embed_tokens", "model.layers.0", *ABOVE])
    before = snapshot(model)
    step(engine)
    below = {name for name in before if "layers.0" in name or "embed" in name}
    assert names_moved(before, model) == before.keys() - below
    for name in ("lm_head.weight", "model.layers.2.mlp.up_proj.weight"):
        gradient = reference.get_parameter(name).grad
        expected = before[name] - 1e-2 * 0.5 * gradient / gradient.square().mean().sqrt()
        torch.testing.assert_close(model.get_parameter(name).data, expected)
        assert model.get_parameter(name).grad is None


def test_updates_happen_at_accumulation_boundaries_and_follow_the_switch():
    model = build(llama_config())
    engine = start(model, gradient_accumulation_steps=2, steps_per_block=1, order="ascending")
    before = snapshot(model)
    step(engine)
    assert names_moved(before, model) == set()
    step(engine, 1)
    assert names_moved(before, model) == before.keys()
    for index in range(2, 6):
        step(engine, index)
    assert engine.active_blocks == ("head",)
    before = snapshot(model)
    step(engine, 6)
    step(engine, 7)
    assert names_moved(before, model) == {"model.norm.weight", "lm_head.weight"}


def test_frozen_stays_frozen_and_bad_gradients_move_nothing():
    model = build(llama_config())
    model.lm_head.weight.requires_grad_(False)
    engine = start(model)
    before = snapshot(model)
    engine.backward(engine(**batch(0)).loss * float("nan"))
    engine.step()
    assert names_moved(before, model) == set()
    step(engine)
    assert "lm_head.weight" not in names_moved(before, model)


def test_small_updates_of_bf16_weights_are_not_lost():
    """Rounded to the nearest, a step of 1e-4 never moves a bf16 weight of 1."""
    model = build(llama_config(), dtype=torch.bfloat16)
    engine = start(model, lr=2e-4, steps_per_block=1000)
    norms = model.model.norm.weight
    for index in range(20):
        step(engine, index)
    moved = (norms != 1).float().mean().item()
    assert 0.05 < moved < 0.95  # about 20 steps of a fortieth of the spacing


def test_resume_is_bit_exact(tmp_path):
    through = start(build(llama_config(), dtype=torch.bfloat16), steps_per_block=2)
    for index in range(3):
        step(through, index)
    through.save_checkpoint(tmp_path)
    other = start(build(llama_config(), seed=4, dtype=torch.bfloat16), steps_per_block=2)
    other.load_checkpoint(tmp_path)
    for index in range(3, 7):
        step(through, index)
        step(other, index)
    for name, value in through.module.state_dict().items():
        assert torch.equal(value, other.module.state_dict()[name])


def test_with_deepspeed_is_refused():
    with pytest.raises(ValueError, match="without DeepSpeed"):
        bcd.initialize(model=build(llama_config()), config={"expansion": {}}, ds_config={})
