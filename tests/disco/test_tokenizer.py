"""The tokenizer: what goes with the model, what a trained one knows, and that text stays text."""

import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from disco.config import ConfigError, Experiment
from disco.tokenizer import (
    END,
    check_tokenizer,
    encode,
    model_tokenizer,
    save_tokenizer,
    special_ids,
    train_bpe,
    vocabulary,
)

TEXTS = [f"the number {n} of {n * n} is written in words and figures, café 語 😀\n\n  indented" for n in range(50)]


def experiment(model: dict, **tokenizer) -> Experiment:
    sources = [{"name": "s", "files": ["*.txt"]}]
    return Experiment.parse({"name": "x", "model": model, "corpus": {"sources": sources, "tokenizer": tokenizer}})


def metaspace_tokenizer(**special) -> PreTrainedTokenizerFast:
    """SentencePiece's way: a space before the text, bytes for what is unknown, <s> and </s>."""
    vocab = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for token in ["▁", "a", "b", "s", "<", ">", "/"]:
        vocab[token] = len(vocab)
    bpe = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", **special)


@pytest.mark.parametrize(
    "model, tokenizer, message",
    [
        ({"config": {"model_type": "mixtral"}}, {}, "set corpus.tokenizer.kind=train or name a model.source"),
        ({"source": "m"}, {"kind": "train"}, "set corpus.tokenizer.kind=model"),
        (
            {"config": {"model_type": "mixtral"}},
            {"kind": "train", "vocab_size": 256},
            "vocab_size is 256: a byte-level BPE needs at least 257",
        ),
        (
            {"config": {"model_type": "mixtral", "vocab_size": 1000}},
            {"kind": "train", "vocab_size": 1001},
            "vocab_size is 1001 but model.config.vocab_size is 1000: set corpus.tokenizer.vocab_size=1000",
        ),
    ],
)
def test_a_tokenizer_that_does_not_go_with_the_model_is_refused(model, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        check_tokenizer(experiment(model, **tokenizer))


def test_a_tokenizer_that_goes_with_the_model_passes():
    check_tokenizer(experiment({"source": "m"}))
    check_tokenizer(experiment({"config": {"model_type": "mixtral"}}, kind="train", vocab_size=257))
    check_tokenizer(experiment({"config": {"model_type": "x", "vocab_size": 300}}, kind="train", vocab_size=300))


def test_a_trained_tokenizer_gives_every_text_back(tmp_path):
    tokenizer = save_tokenizer(train_bpe(TEXTS, 400), tmp_path)
    assert special_ids(tokenizer) == {"bos": 0, "eos": 0, "pad": 0}
    assert tokenizer.convert_ids_to_tokens(0) == END
    assert 257 < vocabulary(tokenizer) == len(tokenizer) <= 400
    odd = ["", "\x00\r\n\t", "unseen: żółć, ﬁ, a\u0301", f"a{END}b", " two  spaces ", "don 't , stop ."]
    for text in [*TEXTS[:3], *odd]:
        (ids,) = encode(tokenizer, [text])
        assert tokenizer.decode(ids) == text


def test_the_smallest_vocabulary_is_the_bytes(tmp_path):
    tokenizer = save_tokenizer(train_bpe(TEXTS, 257), tmp_path)
    text = "é語"
    assert vocabulary(tokenizer) == 257
    assert len(encode(tokenizer, [text])[0]) == len(text.encode())


def test_training_is_the_same_in_every_process(tmp_path):
    # Rust's hash maps are seeded by process: an order that leaked would differ between processes.
    script = (
        "import sys; from disco.tokenizer import train_bpe\n"
        "texts = [f'{n} {n * n} {n ** 3} words {chr(97 + n % 26)}' for n in range(300)]\n"
        "sys.stdout.write(train_bpe(texts, 500).backend_tokenizer.to_str())"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)
    )
    assert first == second and b"endoftext" in first


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "olmoe", "llama", "gpt_oss"])
def test_a_model_beside_the_tokenizer_does_not_change_it(tmp_path, model_type):
    # AutoTokenizer looks at config.json, and several classes rebuild the tokenizer in their model's image.
    tokenizer = save_tokenizer(train_bpe(TEXTS, 400), tmp_path)
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, f"a{END}b 123456 it's"]
    assert encode(again, texts) == encode(tokenizer, texts)
    assert special_ids(again) == special_ids(tokenizer)


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    trained = save_tokenizer(train_bpe([*TEXTS, f"{END} " * 50], 400), tmp_path / "bpe")
    for text in (END, f"a{END}b", f"{END}{END}", f"a {END} b"):
        (ids,) = encode(trained, [text])
        assert 0 not in ids and trained.decode(ids) == text
    metaspace = save_tokenizer(metaspace_tokenizer(bos_token="<s>", eos_token="</s>"), tmp_path / "spm")
    assert special_ids(metaspace) == {"bos": 1, "eos": 2, "pad": 2}
    for text in ("</s>", "a</s>b<s> a"):
        (ids,) = encode(metaspace, [text])
        assert not {1, 2} & set(ids) and metaspace.decode(ids) == text
    assert encode(metaspace, ["a b"])[0] == metaspace("a b", add_special_tokens=False).input_ids


def test_special_ids_fall_back_to_the_end_of_sequence():
    assert special_ids(metaspace_tokenizer(eos_token="</s>")) == {"bos": 2, "eos": 2, "pad": 2}
    with pytest.raises(ConfigError, match="has no end-of-sequence token: set eos_token"):
        special_ids(metaspace_tokenizer(bos_token="<s>"))


def model_folder(folder, tokenizer, vocab_size):
    AutoConfig.for_model("qwen2_moe", vocab_size=vocab_size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_models_tokenizer_is_checked_against_its_vocabulary(tmp_path):
    tokenizer = train_bpe(TEXTS, 300)
    config = experiment({"source": str(tmp_path / "m")})
    folder = model_folder(tmp_path / "m", tokenizer, 320)  # padded vocabularies are common
    assert encode(model_tokenizer(config, None), TEXTS) == encode(tokenizer, TEXTS)
    assert encode(model_tokenizer(config, folder), TEXTS) == encode(tokenizer, TEXTS)
    model_folder(folder, tokenizer, 299)
    with pytest.raises(ConfigError, match="ids up to 299 but the model's vocab_size is 299"):
        model_tokenizer(config, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be opened"):
        model_tokenizer(config, folder)
    with pytest.raises(ConfigError, match="nowhere'.* cannot be opened"):
        model_tokenizer(experiment({"source": str(tmp_path / "nowhere")}), None)


def test_a_saved_tokenizer_does_not_depend_on_where_it_came_from(tmp_path):
    tokenizer = train_bpe(TEXTS, 300)
    for name in ("one", "another/place"):
        folder = model_folder(tmp_path / name, tokenizer, 300)
        config = experiment({"source": str(folder)})
        save_tokenizer(model_tokenizer(config, folder), tmp_path / "out" / name)
    files = [sorted((tmp_path / "out" / name).iterdir()) for name in ("one", "another/place")]
    for one, other in zip(*files, strict=True):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()
