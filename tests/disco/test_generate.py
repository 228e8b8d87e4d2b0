"""Continuations against transformers' own, and the experts against the routers."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from disco.artifacts import ArtifactError
from disco.cli import main
from disco.family import moe_blocks
from disco.generate import generate
from tests.disco.tiny_models import load, save, tiny_model

WORDS = [f"w{i}" for i in range(61)]


@pytest.fixture
def folder(tmp_path):
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    model = tiny_model("olmoe", 3)
    model.generation_config.eos_token_id = None
    save(model, tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_greedy_and_its_experts(folder):
    found = generate(folder, "w5 w6 w7", tokens=6)
    model, chosen = load(folder), []
    for block in moe_blocks(model):
        block.router.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    ids, counts = [5, 6, 7], np.zeros((2, 3), dtype=int)
    for _ in range(6):
        chosen.clear()
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        for layer, indices in enumerate(chosen):
            counts[layer] += np.bincount(indices[-1], minlength=3)
    assert found.text.split() == [WORDS[i] for i in ids[3:]] and found.tokens == 6
    assert (found.counts_LE == counts).all()


def test_drawn_text_depends_on_the_seed(folder):
    texts = [generate(folder, "w5", tokens=12, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_command(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["disco", "generate", str(folder), "w5 w6", "--tokens", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "w5 w6" in shown and "expert 2" in shown and "%" in shown


def test_refused(folder):
    with pytest.raises(ValueError, match="the text is empty"):
        generate(folder, "")
    for tokens in (0, 100):
        with pytest.raises(
            ValueError, match=f"{tokens} tokens after 1 of text do not fit the model's 64 positions"
        ):
            generate(folder, "w5", tokens=tokens)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match="has no tokenizer"):
        generate(folder, "w5")
