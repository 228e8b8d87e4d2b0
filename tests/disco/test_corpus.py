"""The prepared corpus: what is stored, what is dropped, what is held out, and what is refused."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from disco import corpus as module
from disco.artifacts import ArtifactError
from disco.config import ConfigError, Experiment
from disco.corpus import Corpus, hold_out, prepare
from disco.tokenizer import END, encode, train_bpe

WORDS = "the a of model expert token router layer weight cluster and is to in train loss".split()


def sentences(count: int, seed: int = 0, words: int = 30) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(8, words))) + f" {seed}.{n}" for n in range(count)]


def write(folder, name: str, texts: list[str]):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def experiment(folder, names, *, seed=0, model=None, **keys) -> Experiment:
    """An experiment over jsonl files; `names` are source names or (name, keys of the source)."""
    given = [(name, {}) if isinstance(name, str) else name for name in names]
    listed = [{"name": name, "jsonl": [f"{name}.jsonl"], "root": str(folder), **own} for name, own in given]
    tokenizer = {"kind": "train", "vocab_size": 300}
    section = {"sources": listed, "tokenizer": tokenizer, "sequence_length": 16, "validation": 0.1, **keys}
    model = model or {"config": {"model_type": "mixtral"}}
    return Experiment.parse({"name": "x", "seed": seed, "model": model, "corpus": section})


def prepared(tmp_path, names, out="out", model_folder=None, **keys) -> Corpus:
    folder = tmp_path / out
    folder.mkdir()
    lines = []
    prepare(experiment(tmp_path, names, **keys), folder, model_folder=model_folder, progress=lines.append)
    assert lines
    return Corpus.open(folder)


def held(corpus: Corpus) -> dict[str, set[str]]:
    """Texts of each split."""
    return {name: set(corpus.split(name).texts()) for name in ("train", "validation")}


def test_every_document_is_stored_once_with_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)  # several row groups
    one, two = sentences(40, 1), sentences(20, 2)
    write(tmp_path, "one", one)
    write(tmp_path, "two", two)
    corpus = prepared(tmp_path, ["one", "two"])
    tokenizer = corpus.tokenizer()
    found = {"one": [], "two": []}
    for name in ("train", "validation"):
        split = corpus.split(name)
        flat = np.fromfile(split.tokens_path, dtype=corpus.meta["dtype"])
        table = pq.read_table(split.path).to_pydict()
        assert list(table) == ["source", "text", "tokens", "offset", "sha256"]
        assert [split.sources[code] for code in split.source] == table["source"]
        end = 0
        for n, text in enumerate(split.texts()):
            assert split.offset[n] == end
            end += split.tokens[n] + 1
            stored = flat[split.offset[n] : end].tolist()
            assert stored[0] == stored[-1] == corpus.meta["eos"] == corpus.meta["bos"]
            assert stored[1:-1] == encode(tokenizer, [text])[0] and tokenizer.decode(stored[1:-1]) == text
            found[table["source"][n]].append(text)
        assert len(split) == len(table["text"]) and end == len(flat)
    assert sorted(found["one"]) == sorted(one) and sorted(found["two"]) == sorted(two)
    counts = corpus.meta["sources"]
    assert {name: count["documents"] for name, count in counts.items()} == {"one": 40, "two": 20}
    for name, texts in (("one", one), ("two", two)):
        assert counts[name]["characters"] == counts[name]["bytes"] == sum(map(len, texts))
        assert counts[name]["validation_documents"] == len(texts) // 10
        assert counts[name]["tokens"] == counts[name]["train_tokens"] + counts[name]["validation_tokens"]
    assert sum(count["train_tokens"] for count in counts.values()) == corpus.split("train").tokens.sum()
    assert sorted(path.name for path in corpus.folder.iterdir()) == sorted(
        ["corpus.json", "tokenizer", *(f"{s}.{k}" for s in ("train", "validation") for k in ("parquet", "tokens"))]
    )


def test_the_folder_is_the_same_bit_for_bit_every_time(tmp_path):
    write(tmp_path, "one", sentences(40))
    first, second = (prepared(tmp_path, ["one"], out=out).folder for out in ("first", "second"))
    for path in sorted(first.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path


def test_duplicates_are_dropped_across_sources_and_counted(tmp_path):
    one, two = sentences(20, 1), sentences(20, 2)
    write(tmp_path, "one", [*one, *one[:3]])
    write(tmp_path, "two", [*one[:5], *two, "short", two[0] + " "])
    corpus = prepared(tmp_path, ["one", "two"])
    splits = held(corpus)
    assert splits["train"] | splits["validation"] == {*one, *two, two[0] + " "}
    assert not splits["train"] & splits["validation"]
    counts = corpus.meta["sources"]
    assert [counts[name]["duplicates"] for name in ("one", "two")] == [3, 5]
    assert [counts[name]["too_short"] for name in ("one", "two")] == [0, 1]
    assert [counts[name]["documents"] for name in ("one", "two")] == [20, 21]


def test_the_split_depends_on_content_and_seed_alone(tmp_path):
    one, two = sentences(60, 1), sentences(60, 2)
    write(tmp_path, "one", one)
    write(tmp_path, "shuffled", one[::-1])
    write(tmp_path, "two", two)
    alone = held(prepared(tmp_path, ["one"], out="a"))
    assert len(alone["validation"]) == 6
    assert held(prepared(tmp_path, ["shuffled"], out="b")) == alone
    beside = held(prepared(tmp_path, ["two", "one"], out="c"))
    assert beside["validation"] & set(one) == alone["validation"]
    assert len(beside["validation"] & set(two)) == 6
    assert held(prepared(tmp_path, ["one"], out="d", seed=1)) != alone


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2**64 - 1)), min_size=2, max_size=80),
    st.floats(0.001, 0.499),
)
def test_held_out_share(documents, share):
    text_D = np.array([text for text, _ in documents])
    key_D = np.array([key for _, key in documents], dtype=np.uint64)
    aim = min(max(1, round(share * len(documents))), len(documents) - 1)
    held_D, by = hold_out(key_D, text_D, share)
    assert 1 <= held_D.sum() < len(documents)
    if by == "text":
        assert aim / 2 <= held_D.sum() <= 1.25 * aim
        assert not set(text_D[held_D]) & set(text_D[~held_D])
    else:
        assert held_D.sum() == aim
    uncut_D, by = hold_out(key_D, np.arange(len(documents)), share)
    assert (by, uncut_D.sum()) == ("text", aim)
    assert key_D[uncut_D].max() <= key_D[~uncut_D].min()


def test_passages_of_one_text_go_to_one_split(tmp_path):
    generator = np.random.default_rng(0)
    texts = [" ".join(sentences(generator.integers(1, 5), n + 1)) for n in range(80)]
    write(tmp_path, "many", texts)
    write(tmp_path, "single", [" ".join(sentences(80, 99))])
    corpus = prepared(tmp_path, [("many", {"passage_chars": 100}), ("single", {"passage_chars": 100})])
    counts = corpus.meta["sources"]
    assert (counts["many"]["held_out_by"], counts["single"]["held_out_by"]) == ("text", "passage")
    splits = {name: list(corpus.split(name).texts()) for name in ("train", "validation")}
    origin = {name: {n for n, t in enumerate(texts) for p in splits[name] if p in t} for name in splits}
    assert origin["validation"] and not origin["train"] & origin["validation"]


def test_max_bytes_and_max_documents(tmp_path):
    texts = sentences(40)
    write(tmp_path, "one", texts)
    limit = sum(map(len, texts[:10]))
    for cap, kept in ((limit, 10), (limit - 1, 9), (limit + 1, 10), (10**9, 40)):
        corpus = prepared(tmp_path, [("one", {"max_bytes": cap})], out=f"bytes-{cap}")
        assert set().union(*held(corpus).values()) == set(texts[:kept])
    corpus = prepared(tmp_path, [("one", {"max_documents": 7})], out="documents")
    assert set().union(*held(corpus).values()) == set(texts[:7])


def test_a_capped_source_is_not_read_beyond_its_cap(tmp_path):
    source = {"jsonl": None, "files": ["one.txt"], "passage_chars": 100, "max_bytes": 2_000}
    (tmp_path / "one.txt").write_bytes(" ".join(str(n) for n in range(5_000)).encode() + b" " * (1 << 20) + b"\xff")
    corpus = prepared(tmp_path, [("one", source)])
    assert 1_800 < corpus.meta["sources"]["one"]["bytes"] <= 2_000


def test_the_tokenizer_is_trained_on_the_training_split_alone(tmp_path, monkeypatch):
    texts = sentences(60)
    write(tmp_path, "one", texts)
    corpus = prepared(tmp_path, ["one"])
    train = list(corpus.split("train").texts())
    expected = train_bpe(train, 300).backend_tokenizer.to_str()
    assert corpus.tokenizer().backend_tokenizer.to_str() == expected
    assert train_bpe(texts, 300).backend_tokenizer.to_str() != expected
    monkeypatch.setattr(module, "TOKENIZER_CHARS", sum(map(len, texts)) // 4 + 1)
    every_fourth = prepared(tmp_path, ["one"], out="sampled").tokenizer().backend_tokenizer.to_str()
    assert every_fourth == train_bpe(train[::4], 300).backend_tokenizer.to_str()


def test_text_that_spells_the_end_of_a_document_does_not_end_it(tmp_path):
    forged = [f"{text} {END}{END} {text}" for text in sentences(30)]
    write(tmp_path, "one", forged)
    corpus = prepared(tmp_path, ["one"])
    for name in ("train", "validation"):
        split = corpus.split(name)
        flat = np.fromfile(split.tokens_path, dtype=split.dtype)
        assert (flat == corpus.meta["eos"]).sum() == 2 * len(split)


def test_nul_bytes_line_ends_and_any_language_come_back(tmp_path):
    texts = [f"{n} nul\x00 cr\r\n tab\t café 語 😀 a\u0301 \ufeff" for n in range(10)]
    write(tmp_path, "one", texts)
    assert set().union(*held(prepared(tmp_path, ["one"])).values()) == set(texts)


def model_folder(folder, tokenizer, vocab_size):
    AutoConfig.for_model("mixtral", vocab_size=vocab_size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_models_own_tokenizer_with_a_large_vocabulary(tmp_path):
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, 70_000)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}  # saved in a folder of its own
    folder = model_folder(tmp_path / "model", tokenizer, 70_016)
    write(tmp_path, "one", [f"w{n} w{69_999 - n} w68000 unknown" for n in range(100, 120)])
    keys = {"model": {"source": str(folder)}, "tokenizer": {"kind": "model"}}
    corpus = prepared(tmp_path, ["one"], model_folder=folder, **keys)
    assert corpus.meta["vocab_size"] == 70_000 and corpus.meta["dtype"] == "<u4"
    assert [corpus.meta[name] for name in ("bos", "eos", "pad")] == [0, 1, 1]
    split = corpus.split("train")
    flat = np.fromfile(split.tokens_path, dtype="<u4").reshape(-1, 6)
    for stored, text in zip(flat.tolist(), split.texts(), strict=True):
        first, second = (int(word[1:]) for word in text.split()[:2])
        assert stored == [0, first, second, 68_000, 2, 1]


def test_texts_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
    write(tmp_path, "one", sentences(40))
    split = prepared(tmp_path, ["one"]).split("train")
    everything = list(split.texts())
    assert len(everything) == len(split) == 36
    for documents in ([3, 4, 20, 35], [35, 0, 17, 17, 3], [], np.arange(36)[::-1]):
        documents = np.array(documents, dtype=np.int64)
        assert list(split.texts(documents)) == [everything[n] for n in documents]


# refusals


@pytest.mark.parametrize(
    "texts, source, message",
    [
        (["x" * 30], {}, "keeps 1 documents .0 duplicates and 0 shorter than 20 .*set passage_chars"),
        (["x" * 30] * 5, {}, "keeps 1 documents .4 duplicates"),
        (["short", ""], {}, "keeps 0 documents .0 duplicates and 2 shorter than 20 .*lower corpus.min_chars"),
        (
            ["x" * 50, "y" * 50],
            {"max_bytes": 49},
            "next document has 50 bytes and max_bytes is 49: raise it",
        ),
        (["x" * 50, "y" * 50], {"max_bytes": 99}, "keeps 1 documents .*max_bytes is 99"),
        (["x" * 50, "y" * 50], {"max_documents": 1}, "max_documents is 1: raise it"),
        ([WORDS[0] * 10, WORDS[1] * 30], {}, "keeps 0 documents .2 duplicates .*earlier source.*remove the source"),
    ],
)
def test_a_source_without_two_documents_is_refused(tmp_path, texts, source, message):
    write(tmp_path, "first", [*sentences(10), WORDS[0] * 10, WORDS[1] * 30])
    write(tmp_path, "second", texts)
    with pytest.raises(ConfigError, match=f"source 'second' {message}|source 'second'.*{message}"):
        prepared(tmp_path, ["first", ("second", source)])


def test_empty_documents_are_dropped_even_with_min_chars_0(tmp_path):
    write(tmp_path, "one", ["", "a", "b", "", "c"])
    corpus = prepared(tmp_path, ["one"], min_chars=0)
    assert corpus.meta["sources"]["one"]["documents"] == 3 and corpus.meta["sources"]["one"]["too_short"] == 2


def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path, "one", sentences(10))
    out = tmp_path / "out"
    out.mkdir()
    bad = [
        (experiment(tmp_path, ["one", "missing"]), "source 'missing': .*matches no file"),
        (experiment(tmp_path, [("one", {"column": "body"})]), "no column 'body'"),
        (experiment(tmp_path, ["one"], tokenizer={"kind": "model"}), "corpus.tokenizer.kind is model but"),
        (experiment(tmp_path, ["one"], tokenizer={"kind": "train", "vocab_size": 10}), "vocab_size is 10"),
    ]
    for config, message in bad:
        with pytest.raises(ConfigError, match=message):
            prepare(config, out)
    assert not list(out.iterdir())
    folder = model_folder(tmp_path / "model", train_bpe(sentences(10), 300), 299)
    config = experiment(tmp_path, ["one"], model={"source": str(folder)}, tokenizer={"kind": "model"})
    with pytest.raises(ConfigError, match="ids up to 299 but the model's vocab_size is 299"):
        prepare(config, out, model_folder=folder)
    assert not list(out.iterdir())


def test_too_little_disk_is_refused(tmp_path, monkeypatch):
    write(tmp_path, "one", sentences(10))
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("disco.artifacts.shutil.disk_usage", lambda place: usage)
    with pytest.raises(ArtifactError, match="the prepared corpus needs about"):
        prepared(tmp_path, ["one"])


def test_a_damaged_corpus_is_named(tmp_path):
    write(tmp_path, "one", sentences(20))
    corpus = prepared(tmp_path, ["one"])
    with pytest.raises(ValueError, match="split 'test': there are train and validation"):
        corpus.split("test")
    tokens = corpus.folder / "train.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(ArtifactError, match="train.tokens: .* bytes, .* expected"):
        corpus.split("train")
    tokens.write_bytes(whole)
    table = corpus.folder / "train.parquet"
    table.write_bytes(table.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match="out: damaged"):
        corpus.split("train")
    table.unlink()
    with pytest.raises(ArtifactError, match="out: damaged"):
        corpus.split("train")
    (corpus.folder / "corpus.json").write_text("{")
    with pytest.raises(ArtifactError, match="corpus.json: damaged"):
        Corpus.open(corpus.folder)
    with pytest.raises(ArtifactError, match="corpus.json: no such file"):
        Corpus.open(tmp_path / "nowhere")
