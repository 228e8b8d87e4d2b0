"""Blocks in a training stage: how long each stays, and what is refused before anything starts."""

import pytest
import yaml

import bcd
from disco.config import BlockDescent, ConfigError, Experiment, Optimizer
from disco.descent import blocks_of, engine_config, with_stay
from disco.loss import CausalLoss
from tests.disco.tiny_models import tiny_config
from tests.disco.tiny_models import tiny_model as any_model

ADAMW = Optimizer()
MOE = tiny_config()  # two layers: embeddings, 2 x (dense, experts), head


def stay(updates, settings=None, **keys):
    return with_stay(BlockDescent(**(settings or {})), ADAMW, MOE, updates, place="train/1", **keys).steps_per_block


@pytest.mark.parametrize(
    "updates, settings, expected",
    [
        (6, {}, 1),
        (11, {}, 1),
        (12, {}, 2),
        (300, {}, 50),  # one cycle of the default
        (301, {}, 25),  # more makes two of half the length, not one and a bit
        (100, {"active_blocks": 2}, 33),
        (100, {"steps_per_block": 7}, 7),
        (100, {"always_on": ["*norm*", "lm_head"]}, 20),  # the head's block is gone
        (100, {"order": "ends", "expansion": {}}, 33),  # three turns: embeddings and head alone
    ],
)
def test_blocks_stay_so_that_cycles_are_whole(updates, settings, expected):
    assert bcd.Config().steps_per_block == 50, "the expected values follow the default"
    assert stay(updates, settings) == expected


def test_every_block_trains_and_the_rest_is_less_than_a_turn_a_cycle():
    for updates in range(6, 2000, 7):
        turn = stay(updates)
        cycles = updates // (6 * turn)
        assert cycles >= 1 and turn <= 50 and updates - 6 * turn * cycles < 6 * cycles


@pytest.mark.parametrize(
    "updates, settings, message",
    [
        (5, {}, r"train/1 makes 5 updates but one cycle over 6 blocks takes 6 .* or set bcd.active_blocks=2"),
        (60, {"steps_per_block": 11}, r"takes 66 \(6 turns of 11\).* set bcd.steps_per_block=10"),
        (5, {"steps_per_block": 11}, r"or set no bcd.steps_per_block"),
        (60, {"always_on": ["model.nrm"]}, r"^bcd: always_on pattern 'model.nrm' matches no parameter"),
        (60, {"granularity": ["model.layers.1"]}, r"no pattern covers parameter 'model.embed_tokens.weight'"),
        (2, {"order": "ends", "expansion": {}}, r"takes 3 \(3 turns of 1\).*or set another bcd.order"),
        (60, {"granularity": "layers"}, r"granularity is 'layers': use 'layer', 'module'"),
        (60, {"expert_groups": 4}, r"expert_groups is 4 but .* has 3 experts"),
        (60, {"active_blocks": 7}, r"bcd.active_blocks is 7 but there are 6 blocks: set it to 1 to 6"),
        (60, {"max_block_gb": 1e-12}, r"max_block_gb is 1e-12 but one row"),
    ],
)
def test_what_cannot_work_is_refused(updates, settings, message):
    with pytest.raises(ConfigError, match=message):
        stay(updates, settings)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_cut_by_rows_is_refused_with_zero_3(tied):
    settings = BlockDescent(max_block_gb=12 * 500 / 1e9)
    model = tiny_config(tie_word_embeddings=tied)
    blocks_of(settings, ADAMW, model)
    with pytest.raises(ConfigError, match="by rows; with zero_stage 3 that cannot be: set zero_stage=2"):
        blocks_of(settings, Optimizer(zero_stage=3), model)


def test_an_expansion_is_refused_with_zero_3_and_a_prefix_cache_always():
    with pytest.raises(ConfigError, match="bcd.expansion is set with zero_stage 3.*set zero_stage=2"):
        blocks_of(BlockDescent(expansion={}), Optimizer(zero_stage=3), MOE)
    raw = {"name": "t", "model": {"config": {"model_type": "qwen2_moe"}}}
    raw["corpus"] = {"sources": [{"name": "a", "text": ["a"]}]}
    with pytest.raises(ConfigError, match="bcd: prefix_cache would never be hit: .* leave it out"):
        Experiment.parse(raw | {"bcd": {"prefix_cache": {}}})


def test_only_the_trainable_part_has_blocks():
    names = [block.name for block in blocks_of(BlockDescent(), ADAMW, MOE, "experts").blocks]
    assert names == ["layers.0.experts", "layers.1.experts"]


def test_the_engine_gets_the_stage_s_settings_and_the_user_s_patterns():
    section = Optimizer(learning_rate=2e-3, betas=(0.8, 0.9), weight_decay=0.2)
    settings = BlockDescent(
        granularity={"a": ["model.layers", "*embed*"], "b": ["lm_head"]}, always_on=["model.norm"]
    )
    module = CausalLoss(any_model())
    config = bcd.config.read(engine_config(settings, section, module, seed=3))
    assert (config.lr, config.betas, config.weight_decay, config.seed) == (2e-3, (0.8, 0.9), 0.2, 3)
    vectors = {name for name, parameter in module.named_parameters() if parameter.dim() < 2}
    assert set(config.no_decay) == vectors and "model.model.norm.weight" in vectors
    cut = bcd.partition(module, config.granularity, always_on=config.always_on)
    assert [block.name for block in cut.blocks] == ["a", "b"]
    assert [piece.name for piece in cut.blocks[1].pieces] == ["model.lm_head.weight"]
    assert [piece.name for piece in cut.always_on] == ["model.model.norm.weight"]
    listed = engine_config(BlockDescent(granularity=["model", "lm_head"]), section, module, seed=3)
    assert len(bcd.partition(module, listed["granularity"]).blocks) == 2


def test_mode_and_optimizer_say_the_same():
    raw = {"name": "t", "model": {"config": {"model_type": "qwen2_moe"}}}
    raw["corpus"] = {"sources": [{"name": "a", "text": ["a"]}]}

    def train(**keys):
        return Experiment.parse(raw | {"train": keys}).train

    assert train(mode="bcd") == train(optimizer="bcd") == train(mode="full", optimizer="bcd")
    assert (train(mode="bcd").mode, train(mode="bcd").optimizer) == ("bcd", "bcd")
    assert (train(mode="expert", optimizer="bcd").mode, train().optimizer) == ("expert", "adamw")
    with pytest.raises(ConfigError, match="mode is 'bcd' but optimizer is 'adamw': set mode=full"):
        train(mode="bcd", optimizer="adamw")
    with pytest.raises(ConfigError, match="unknown key bcd.lr: known are granularity"):
        Experiment.parse(raw | {"bcd": {"lr": 1}})
    with pytest.raises(ConfigError, match="unknown key bcd.steps_per_blok: did you mean 'steps_per_block'"):
        Experiment.parse(raw | {"bcd": {"steps_per_blok": 1}})
    with pytest.raises(ConfigError, match="bcd.steps_per_block is 0"):
        Experiment.parse(raw | {"bcd": {"steps_per_block": 0}})
    with pytest.raises(ConfigError, match="bcd: active_blocks is 0: it must be at least 1"):
        Experiment.parse(raw | {"bcd": {"active_blocks": 0}})
    whole = Experiment.parse(raw | {"train": {"mode": "bcd"}, "bcd": {"expansion": {}, "always_on": ["*norm*"]}})
    assert Experiment.parse(yaml.safe_load(whole.dump())) == whole
