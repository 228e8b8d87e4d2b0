import re

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint, tokenizer_identity
from disco.config import ConfigError, Experiment
from disco.family import moe_blocks, num_experts, top_k
from disco.start import full_config, initial_model, locate, model_config
from tests.disco.tiny_models import (
    DTYPES,
    FAMILIES,
    cast,
    load,
    same_bits,
    same_tensors,
    save,
    tiny_config,
    tiny_model,
)


class Words:
    """The part of a corpus that a start needs: its tokenizer."""

    def __init__(self, count: int):
        words = ["<s>", "</s>", *(f"w{i}" for i in range(count - 2))]
        self.model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))

    def tokenizer(self):
        return PreTrainedTokenizerFast(tokenizer_object=self.model, bos_token="<s>", eos_token="</s>")


def raw_config(name: str = "qwen2_moe", **keys) -> dict:
    raw = tiny_config(name).to_diff_dict()
    dropped = ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    return {key: value for key, value in raw.items() if key not in dropped} | keys


def experiment(model: dict, seed: int = 0) -> Experiment:
    raw = {"name": "t", "seed": seed, "model": model, "corpus": {"sources": [{"name": "a", "text": ["a"]}]}}
    return Experiment.parse(raw)


def start(tmp_path, config, corpus, single_expert=False, name="start"):
    (out := tmp_path / name).mkdir()
    initial_model(config, corpus, out, single_expert)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_from_scratch(tmp_path, name, dtype):
    dtype_name = str(dtype).removeprefix("torch.")
    config = experiment({"config": raw_config(name), "dtype": dtype_name})
    full = load(start(tmp_path, config, Words(50)))
    assert full.dtype == dtype and full.config.vocab_size == 50
    assert (full.config.bos_token_id, full.config.eos_token_id) == (0, 1)
    assert full.generation_config.eos_token_id == 1
    assert type(full).__name__ in full.config.architectures
    single = load(start(tmp_path, config, Words(50), True, "single"))
    assert (num_experts(single.config), top_k(single.config)) == (1, 1)
    own = re.compile(r"mlp\.(experts|gate|router)\.")
    shared = {key: value for key, value in full.state_dict().items() if not own.search(key)}
    assert same_tensors(shared, {key: single.state_dict()[key] for key in shared})
    merged = full_config(config, tmp_path / "single")
    assert (num_experts(merged), top_k(merged)) == (3, 2)
    assert sorted(path.name for path in (tmp_path / "single").iterdir()) == sorted(
        path.name for path in (tmp_path / "start").iterdir()
    )


def test_seed_decides_and_global_generator_is_left_alone(tmp_path):
    model = {"config": raw_config()}
    before = torch.random.get_rng_state()
    folders = [start(tmp_path, experiment(model, seed), Words(50), name=str(i)) for i, seed in enumerate([3, 3, 4])]
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]


def test_initial_weights_have_the_configured_spread(tmp_path):
    config = experiment({"config": raw_config(initializer_range=0.1)})
    model = load(start(tmp_path, config, Words(50)))
    for parameter in (model.lm_head.weight, moe_blocks(model)[0].experts.gate_up_proj):
        assert parameter.std().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(24))


def test_tokenizer_is_saved_and_vocabulary_checked(tmp_path):
    out = start(tmp_path, experiment({"config": raw_config(vocab_size=64)}), Words(50))
    assert tokenizer_identity(out) and Checkpoint.open(out).config.vocab_size == 64
    with pytest.raises(ConfigError, match="model.config.vocab_size is 40 but the tokenizer has 50 tokens"):
        start(tmp_path, experiment({"config": raw_config(vocab_size=40)}), Words(50), name="small")


@pytest.mark.parametrize(
    "keys, match",
    [
        (dict(num_expert=4), "unknown key model.config.num_expert: did you mean 'num_experts'?"),
        (dict(blub=4), "unknown key model.config.blub: Qwen2MoeConfig has no such key"),
        (dict(model_type="llama"), "model.config.model_type is 'llama': known families are deepseek_v2"),
        (dict(hidden_size="wide"), "model.config: .*hidden_size"),
        (dict(hidden_size=0), "model.config.hidden_size is 0: it has to be at least 1"),
        (dict(num_experts=0), "model.config.num_experts is 0"),
        (dict(num_experts_per_tok=4), "num_experts_per_tok is 4 but the model has 3 experts: set it to 1..3"),
        (dict(num_attention_heads=3), "num_attention_heads is 3, no multiple of num_key_value_heads 2"),
        (dict(hidden_size=26), "hidden_size is 26, no multiple of num_attention_heads 4"),
        (dict(hidden_size=20), "heads are 5 wide, rotary positions need an even width"),
    ],
)
def test_bad_model_config(keys, match):
    with pytest.raises(ConfigError, match=match):
        model_config(raw_config(**keys))


def test_numbers_that_yaml_takes_for_text():
    raw = yaml.safe_load("{rms_norm_eps: 1e-5, rope_parameters: {rope_type: default, rope_theta: 1e6}}")
    assert raw["rms_norm_eps"] == "1e-5"
    config = model_config(raw_config(**raw))
    assert config.rms_norm_eps == 1e-5 and config.rope_parameters["rope_theta"] == 1e6


def test_older_keys_are_known():
    raw = raw_config(rope_theta=5000.0)
    raw.pop("rope_parameters", None)
    assert model_config(raw).rope_parameters["rope_theta"] == 5000.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_source_is_copied_in_the_wanted_dtype(tmp_path, name, dtype):
    model = tiny_model(name, 3)
    save(model, tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text("x")
    config = experiment({"source": str(tmp_path / "source"), "dtype": str(dtype).removeprefix("torch.")})
    out = start(tmp_path, config, None)
    assert same_tensors(cast(model, dtype).state_dict(), load(out).state_dict())
    assert (out / "chat_template.jinja").read_text() == "x"
    again = start(tmp_path, experiment({"source": str(out), "dtype": config.model.dtype}), None, name="again")
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
    assert num_experts(full_config(config, out)) == 3


def test_source_refused(tmp_path):
    save(tiny_model("mixtral", 3), tmp_path / "source")
    config = experiment({"source": str(tmp_path / "source")})
    with pytest.raises(ConfigError, match="has 3 experts to keep: set seed_phase.model=full"):
        start(tmp_path, config, None, True)
    with pytest.raises(ConfigError, match="vocab_size is 61 but the tokenizer has 80 tokens"):
        start(tmp_path, config, Words(80), name="large")
    with pytest.raises(ConfigError, match="no such folder, and not a hub name"):
        locate(str(tmp_path / "nowhere"))
    with pytest.raises(ArtifactError, match="has no config.json"):
        start(tmp_path, experiment({"source": str(tmp_path)}), None, name="none")


def test_hub_name_that_cannot_be_had(monkeypatch):
    import huggingface_hub

    def refuse(*args, **keys):
        raise OSError("offline\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match="model.source is 'a/b': .* the hub did not give it: offline$"):
        locate("a/b")


def test_hub_name(monkeypatch, tmp_path):
    import huggingface_hub

    save(tiny_model("olmoe", 1, num_experts_per_tok=1), tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **keys: str(tmp_path))
    assert locate("a/b") == tmp_path
    config = experiment({"source": "a/b"})
    (out := tmp_path / "out").mkdir()
    initial_model(config, None, out, True)
    assert same_bits(load(out).lm_head.weight, load(tmp_path).lm_head.weight)
