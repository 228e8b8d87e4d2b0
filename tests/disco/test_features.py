"""Features against scikit-learn's tf-idf and the models themselves."""

import math

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2MoeConfig

from disco import features

WORDS = [f"{a}{b}" for a in ("alpha", "beta", "gamma", "delta", "kappa") for b in ("", "s", "ing", "tor")]


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(5, 15))) for _ in range(count)]


def all_of(vectorizer, documents):
    return np.concatenate(list(vectorizer.transform(documents)))


def test_terms_mask_numbers_lower_case_and_split_scripts_without_spaces():
    counts = features.terms_of("The 3 cats, 42nd CATS; in 1999 x ab_c naïve 漢字")
    assert counts == {
        "the": 1,
        "cats": 2,
        "in": 1,
        features.NUMBER: 2,  # "42nd" and "1999"; "3" and "x" are single characters
        "ab_c": 1,
        "naïve": 1,
        "漢": 1,
        "字": 1,
    }


def test_tfidf_equals_scikit_learn():
    documents = texts(200)
    fitted, tfidf_DV = features.fit_tfidf(documents, dimensions=4, max_terms=1000, seed=0)
    other = TfidfVectorizer(sublinear_tf=True, vocabulary=fitted.terms, token_pattern=r"(?u)\b\w\w+\b")
    np.testing.assert_allclose(tfidf_DV.toarray(), other.fit_transform(documents).toarray(), atol=1e-6)
    unseen = texts(20, seed=1) + ["nothing known"]
    np.testing.assert_allclose(fitted.tfidf(unseen).toarray(), other.transform(unseen).toarray(), atol=1e-6)


def test_tfidf_features_are_unit_vectors_in_the_leading_singular_space():
    documents = texts(300)
    fitted, tfidf_DV = features.fit_tfidf(documents, dimensions=5, max_terms=1000, seed=0)
    x_DS = all_of(fitted, documents)
    assert x_DS.dtype == np.float32 and x_DS.shape == (300, 5)
    np.testing.assert_allclose(np.linalg.norm(x_DS, axis=1), 1, atol=1e-5)
    _, singular, right = np.linalg.svd(tfidf_DV.toarray(), full_matrices=False)
    captured = np.linalg.norm(tfidf_DV @ fitted.components_SV.T)
    assert captured == pytest.approx(np.sqrt((singular[:5] ** 2).sum()), rel=1e-3)


def test_terms_are_neither_stop_words_nor_rare_nor_everywhere_and_the_most_frequent():
    documents = ["the common once" if i == 0 else f"the common {'left' if i % 2 else 'right'}" for i in range(30)]
    fitted, _ = features.fit_tfidf(documents, dimensions=8, max_terms=50, seed=0)
    assert sorted(fitted.terms) == ["left", "right"]
    assert "the" in ENGLISH_STOP_WORDS
    fitted, _ = features.fit_tfidf(documents + ["left"] * 3 + ["mid"] * 9, dimensions=8, max_terms=1, seed=0)
    assert fitted.terms == ["left"] and fitted.components_SV.shape == (1, 1)


def test_texts_from_one_template_keep_their_common_words():
    fitted, _ = features.fit_tfidf([f"record {i} closed" for i in range(10, 40)], dimensions=8, max_terms=9, seed=0)
    assert set(fitted.terms) >= {"record", "closed"}


def test_no_common_word_is_refused():
    with pytest.raises(ValueError, match="share no word"):
        features.fit_tfidf(["uno", "dos", "tres"], dimensions=2, max_terms=10, seed=0)
    with pytest.raises(ValueError, match="share no word"):
        features.fit_tfidf(["", ""], dimensions=2, max_terms=10, seed=0)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_dimensions_are_clipped_to_the_documents(count):
    fitted, _ = features.fit_tfidf(texts(count, seed=2) + ["alpha beta"], dimensions=128, max_terms=99, seed=0)
    assert 1 <= fitted.components_SV.shape[0] <= count


def test_tfidf_rows_do_not_depend_on_their_block_and_survive_a_round_trip(tmp_path):
    documents = [*texts(50), "", "   ", "unknown words only", "漢"]
    fitted, _ = features.fit_tfidf(documents, dimensions=8, max_terms=1000, seed=0)
    fitted.save(tmp_path)
    again = features.load(tmp_path)
    whole_DS = all_of(fitted, documents)
    one_by_one_DS = np.concatenate([all_of(again, [text]) for text in documents])
    assert whole_DS.tobytes() == one_by_one_DS.tobytes()
    assert not whole_DS[50:].any()
    assert not list(tmp_path.glob("*.pkl"))
    assert list(again.transform([])) == []


def test_fit_is_reproducible():
    documents = texts(400)
    first, second = (features.fit_tfidf(documents, dimensions=8, max_terms=99, seed=3)[0] for _ in range(2))
    assert first.terms == second.terms
    assert first.components_SV.tobytes() == second.components_SV.tobytes()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint with a word-level tokenizer, its folder, model and tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: index for index, word in enumerate(["[unk]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]")
    config = Qwen2MoeConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def test_mean_embedding_is_the_mean_of_the_input_embeddings(checkpoint, tmp_path):
    folder, model, tokenizer = checkpoint
    documents = [*texts(10), ""]
    vectorizer = features.mean_embedding(folder, tokenizer)
    x_DS = all_of(vectorizer, documents)
    with torch.no_grad():
        for text, x_S in zip(documents[:-1], x_DS, strict=False):
            ids = torch.tensor(tokenizer(text)["input_ids"])
            expected = model.get_input_embeddings()(ids).mean(0)
            np.testing.assert_allclose(x_S, expected.numpy(), atol=1e-6)
    assert not x_DS[-1].any()
    vectorizer.save(tmp_path)
    assert all_of(features.load(tmp_path), documents).tobytes() == x_DS.tobytes()


def test_mean_hidden_is_the_mean_of_the_last_state_in_windows(checkpoint, tmp_path):
    folder, model, tokenizer = checkpoint
    documents = [*texts(10), "", "alpha " * 19]
    vectorizer = features.mean_hidden(folder, tokenizer, window=8)
    x_DS = all_of(vectorizer, documents)
    for text, x_S in zip(documents, x_DS, strict=True):
        ids = torch.tensor(tokenizer(text)["input_ids"]).long()
        states = [
            model.model(input_ids=ids[None, start : start + 8]).last_hidden_state[0].detach()
            for start in range(0, len(ids), 8)
        ]
        expected = torch.cat(states).mean(0) if states else torch.zeros(16)
        np.testing.assert_allclose(x_S, expected.numpy(), atol=1e-5)
    vectorizer.save(tmp_path)
    np.testing.assert_allclose(all_of(features.load(tmp_path), documents), x_DS, atol=1e-6)


def test_hidden_features_need_their_model(checkpoint, tmp_path):
    folder, _, tokenizer = checkpoint
    vectorizer = features.mean_hidden(folder, tokenizer, window=8)
    object.__setattr__(vectorizer, "model_folder", tmp_path / "gone")
    vectorizer.save(tmp_path)
    with pytest.raises(ValueError, match="gone.*no longer there"):
        features.load(tmp_path)


def test_a_token_beyond_the_embeddings_is_refused(checkpoint):
    folder, _, tokenizer = checkpoint
    vectorizer = features.mean_embedding(folder, tokenizer)
    small = features.MeanEmbedding(tokenizer=tokenizer, table_VH=vectorizer.table_VH[:3])
    with pytest.raises(ValueError, match="3 embeddings"):
        all_of(small, texts(5))


def test_a_checkpoint_without_embeddings_is_refused(checkpoint, tmp_path):
    folder, _, tokenizer = checkpoint
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="no safetensors file holds model.embed_tokens.weight"):
        features.mean_embedding(tmp_path, tokenizer)


def test_idf_is_the_smoothed_logarithm():
    fitted, _ = features.fit_tfidf(["aa bb", "aa cc", "bb cc", "cc dd dd", "dd"], dimensions=2, max_terms=9, seed=0)
    expected = {term: math.log(6 / 3) + 1 for term in ("aa", "bb", "dd")} | {}
    idf = dict(zip(fitted.terms, fitted.idf_V.tolist(), strict=True))
    assert {term: idf[term] for term in expected} == pytest.approx(expected)
