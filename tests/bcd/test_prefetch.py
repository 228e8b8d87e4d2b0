import pytest
import torch

import bcd
from bcd.prefetch import Prefetch
from tests.bcd.models import batch, build, llama_config

SETTINGS = {"lr": 1e-2, "steps_per_block": 2, "dtype": "bf16", "always_on": ["*norm*"], "no_decay": ["*norm*"]}


def run(engine, updates, first=0):
    for index in range(first, first + updates):
        engine.backward(engine(**batch(index)).loss)
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("order", ["ascending", "shuffled", "importance"])
@pytest.mark.parametrize("active", [1, 2])
def test_trains_bit_for_bit_as_without(order, active, tmp_path):
    settings = SETTINGS | {"order": order, "active_blocks": active}
    expected = run(bcd.initialize(model=build(llama_config(layers=3)), config=settings), 31)
    engine = bcd.initialize(model=build(llama_config(layers=3)), config=settings | {"prefetch": True})
    run(engine, 19)
    engine.save_checkpoint(tmp_path)  # between the copy and the switch
    through = run(engine, 12, first=19)
    again = bcd.initialize(model=build(llama_config(layers=3), seed=5), config=settings | {"prefetch": True})
    again.load_checkpoint(tmp_path)
    resumed = run(again, 12, first=19)
    for name, value in expected.items():
        assert torch.equal(value, through[name]) and torch.equal(value, resumed[name]), name


def test_what_is_fetched_is_the_next_block_s_and_only_before_the_switch(monkeypatch):
    engine = bcd.initialize(model=build(llama_config()), config=SETTINGS | {"prefetch": True})
    begun, taken = [], []
    begin, take = Prefetch.begin, Prefetch.take
    monkeypatch.setattr(Prefetch, "begin", lambda self, states: begun.append(set(states)) or begin(self, states))
    monkeypatch.setattr(Prefetch, "take", lambda self: taken.append(take(self)) or taken[-1])
    blocks = len(engine.partition.blocks)
    run(engine, 2 * blocks)
    names = [block.name for block in engine.partition.blocks]
    assert begun == [set()] * (blocks - 1) + [{names[0]}]  # in the first cycle the others have no state yet
    for index in range(2 * blocks):
        run(engine, 1)
        assert (engine._prefetch.states == {}) == (index % 2 == 1)
    assert begun[blocks:] == [{name} for name in [*names[1:], names[0]]]
    assert [set(states) for states in taken[-blocks:]] == begun[blocks:]


def test_its_bytes_are_predicted():
    plain, ahead = (
        bcd.memory(llama_config(), config=SETTINGS | {"prefetch": prefetch}, dtype="bf16", sequence=16)
        for prefetch in (False, True)
    )
    engine = bcd.initialize(model=build(llama_config()), config=SETTINGS)
    largest = max(block.numel for block in engine.partition.blocks)
    always = sum(piece.numel for piece in engine.partition.always_on)
    assert ahead.total - plain.total == ahead.buffers - plain.buffers == 12 * (largest + always)
