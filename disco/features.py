"""Feature vectors of documents: tf-idf with SVD, or means of a model's embeddings or hidden states.

A vectorizer is an object with `transform(texts) -> iterator of float32 [B, S]` blocks in the texts' order and
`save(folder)`; `load(folder)` opens any of them again. Nothing is pickled. Rows of `transform` do not depend on
the block they fall in (for `hidden`: up to float rounding).

Shape suffixes: D documents, B a block of documents, V terms or vocabulary, S feature dimensions, H hidden,
T tokens.
"""

import array
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open
from scipy import sparse
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from sklearn.preprocessing import normalize
from sklearn.utils.extmath import randomized_svd

from disco.artifacts import read_json, write_json

BLOCK = 2048  # documents
NUMBER = "#number"
# Words of two characters and more; scripts written without spaces give one term a character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]{2,}")


class Vectorizer(Protocol):
    def transform(self, texts: Iterable[str]) -> Iterator[np.ndarray]: ...
    def save(self, folder: Path) -> None: ...


def blocks(texts: Iterable[str], size: int = BLOCK) -> Iterator[list[str]]:
    iterator = iter(texts)
    while block := list(itertools.islice(iterator, size)):
        yield block


def terms_of(text: str) -> Counter:
    """Counts of a text's terms: lower-cased words, every word that starts with a digit as `#number`."""
    counts = Counter(WORD.findall(text.lower()))
    numbers = [term for term in counts if term[0].isdigit()]
    if numbers:
        counts[NUMBER] = sum(counts.pop(term) for term in numbers)
    return counts


@dataclass(frozen=True, kw_only=True)
class TfIdf:
    """Sublinear tf-idf over fixed terms, projected on singular vectors and scaled to unit length.

    The features of c-BTM (Gururangan et al., 2023, section 2.1). A text without a known term is the zero vector.
    """

    terms: list[str]
    idf_V: np.ndarray
    components_SV: np.ndarray

    def tfidf(self, texts: Iterable[str]) -> sparse.csr_matrix:
        """Unit rows [B, V] of (1 + log tf) * idf."""
        position = {term: index for index, term in enumerate(self.terms)}
        return _weigh(_count(texts, position), self.idf_V)

    def transform(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        position = {term: index for index, term in enumerate(self.terms)}
        components_VS = np.ascontiguousarray(self.components_SV.T)
        for block in blocks(texts):
            yield normalize(_weigh(_count(block, position), self.idf_V) @ components_VS)

    def save(self, folder: Path) -> None:
        write_json(folder / "vectorizer.json", {"kind": "tfidf", "terms": self.terms})
        np.save(folder / "idf.npy", self.idf_V)
        np.save(folder / "components.npy", self.components_SV)


def fit_tfidf(
    texts: Iterable[str], *, dimensions: int, max_terms: int, seed: int
) -> tuple[TfIdf, sparse.csr_matrix]:
    """Fit terms, idf and singular vectors on `texts`, read once; also returns their tf-idf rows [D, V].

    Terms occur in at least 2 documents (3 from 1,000, 5 from 10,000 on) and in at most half of them (where there
    are such), are no English stop words, and are the `max_terms` that occur most. `dimensions` is clipped to
    what the rank allows.
    Raises ValueError if no term is left.
    """
    position: dict[str, int] = {}
    counts_DV = _count(texts, position, grow=True)
    documents = counts_DV.shape[0]
    in_documents_V = np.bincount(counts_DV.indices, minlength=len(position))
    least = 2 + (documents >= 1_000) + 2 * (documents >= 10_000)
    keep_V = in_documents_V >= least
    keep_V &= np.fromiter((term not in ENGLISH_STOP_WORDS for term in position), bool, len(position))
    rare_V = keep_V & (in_documents_V <= max(least, 0.5 * documents))
    # Where nothing but common words is left (texts from one template), they are better than nothing.
    chosen = np.flatnonzero(rare_V if rare_V.any() else keep_V)
    if not len(chosen):
        raise ValueError(
            f"the {documents} documents share no word (one that {least} of them hold, and no stop word): "
            "there is nothing to cluster on; check corpus.sources, or set cluster.method=random"
        )
    total_V = np.asarray(counts_DV.sum(0)).ravel()
    if len(chosen) > max_terms:
        chosen = np.sort(chosen[np.argsort(-total_V[chosen], kind="stable")[:max_terms]])
    names = list(position)
    idf_V = (np.log((1 + documents) / (1 + in_documents_V[chosen])) + 1).astype(np.float32)
    tfidf_DV = _weigh(counts_DV[:, chosen], idf_V)
    # The smallest singular value of a full decomposition is noise, and the randomised one wants fewer.
    dimensions = max(1, min(dimensions, documents - 1, len(chosen) - 1))
    _, _, components_SV = randomized_svd(tfidf_DV, dimensions, n_iter=5, random_state=seed)
    fitted = TfIdf(
        terms=[names[index] for index in chosen],
        idf_V=idf_V,
        components_SV=np.ascontiguousarray(components_SV, np.float32),
    )
    return fitted, tfidf_DV


def _count(texts: Iterable[str], position: dict[str, int], grow: bool = False) -> sparse.csr_matrix:
    """Term counts [B, V] float32; unknown terms are left out, or with `grow` added to `position`."""
    indices, values, ends = array.array("i"), array.array("f"), array.array("q", [0])
    for text in texts:
        for term, count in terms_of(text).items():
            index = position.setdefault(term, len(position)) if grow else position.get(term)
            if index is not None:
                indices.append(index)
                values.append(count)
        ends.append(len(indices))
    counts = sparse.csr_matrix(
        (np.frombuffer(values, np.float32), np.frombuffer(indices, np.int32), np.frombuffer(ends, np.int64)),
        shape=(len(ends) - 1, len(position)),
    )
    counts.sort_indices()
    return counts


def _weigh(counts_BV: sparse.csr_matrix, idf_V: np.ndarray) -> sparse.csr_matrix:
    weighed = counts_BV.astype(np.float32, copy=True)
    weighed.data = (1 + np.log(weighed.data)) * idf_V[weighed.indices]
    return normalize(weighed, copy=False)


@dataclass(frozen=True, kw_only=True)
class MeanEmbedding:
    """Mean of the token embeddings over a document's tokens: the sentence vector of MoE-DisCo."""

    tokenizer: Any
    table_VH: np.ndarray

    def transform(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        vocabulary, width = self.table_VH.shape
        for block in blocks(texts, 256):
            features_BH = np.zeros((len(block), width), np.float32)
            for row, ids_T in enumerate(_token_ids(self.tokenizer, block)):
                if len(ids_T):
                    _check_vocabulary(ids_T, vocabulary)
                    tokens, counts = np.unique(ids_T, return_counts=True)
                    weight = (counts / len(ids_T)).astype(np.float32)
                    features_BH[row] = (weight[:, None] * self.table_VH[tokens]).sum(0, dtype=np.float32)
            yield features_BH

    def save(self, folder: Path) -> None:
        write_json(folder / "vectorizer.json", {"kind": "embedding"})
        np.save(folder / "embedding.npy", self.table_VH)
        self.tokenizer.save_pretrained(folder / "tokenizer")


@dataclass(frozen=True, kw_only=True)
class MeanHidden:
    """Mean of the last hidden state over a document's tokens, `window` tokens at a time."""

    tokenizer: Any
    model: Any
    model_folder: Path
    window: int
    batch_size: int = 16

    def transform(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        for block in blocks(texts, 256):
            pieces = []
            for row, ids_T in enumerate(_token_ids(self.tokenizer, block)):
                _check_vocabulary(ids_T, vocabulary)
                pieces += [(row, ids_T[start : start + self.window]) for start in range(0, len(ids_T), self.window)]
            pieces.sort(key=lambda piece: len(piece[1]))
            yield self._means(len(block), pieces)

    def _means(self, rows: int, pieces: list[tuple[int, np.ndarray]]) -> np.ndarray:
        import torch

        base = self.model.base_model
        device = next(base.parameters()).device
        sums_BH = torch.zeros(rows, self.model.config.hidden_size, dtype=torch.float64)
        counts_B = torch.zeros(rows, 1, dtype=torch.float64)
        for start in range(0, len(pieces), self.batch_size):
            batch = pieces[start : start + self.batch_size]
            longest = max(len(ids_T) for _, ids_T in batch)
            ids_NT = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask_NT = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, (_, ids_T) in enumerate(batch):
                ids_NT[row, : len(ids_T)] = torch.from_numpy(ids_T)
                mask_NT[row, : len(ids_T)] = 1
            with torch.inference_mode():
                hidden_NTH = base(
                    input_ids=ids_NT.to(device), attention_mask=mask_NT.to(device), use_cache=False
                ).last_hidden_state
            masked_NTH = hidden_NTH.double().cpu() * mask_NT[:, :, None]
            owner = torch.tensor([document for document, _ in batch])
            sums_BH.index_add_(0, owner, masked_NTH.sum(1))
            counts_B.index_add_(0, owner, mask_NT.sum(1, keepdim=True).double())
        return (sums_BH / counts_B.clamp(min=1)).float().numpy()

    def save(self, folder: Path) -> None:
        write_json(
            folder / "vectorizer.json",
            {"kind": "hidden", "model": str(Path(self.model_folder).resolve()), "window": self.window},
        )
        self.tokenizer.save_pretrained(folder / "tokenizer")


def _token_ids(tokenizer: Any, texts: list[str]) -> list[np.ndarray]:
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.asarray(ids, np.int64) for ids in encoded["input_ids"]]


def _check_vocabulary(ids_T: np.ndarray, vocabulary: int) -> None:
    if len(ids_T) and ids_T.max() >= vocabulary:
        raise ValueError(
            f"the tokenizer gave token {ids_T.max()} but the model has {vocabulary} embeddings: "
            "use the model's own tokenizer (corpus.tokenizer.kind=model)"
        )


def mean_embedding(model_folder: Path, tokenizer: Any) -> MeanEmbedding:
    """Open a checkpoint's token embeddings; no other tensor is read. Raises ValueError if they are not there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is wanted)
    for shard in sorted(Path(model_folder).glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            if name in file.keys():
                return MeanEmbedding(tokenizer=tokenizer, table_VH=file.get_tensor(name).float().numpy())
    raise ValueError(f"{model_folder}: no safetensors file holds {name}: the checkpoint is damaged")


def mean_hidden(model_folder: Path, tokenizer: Any, window: int) -> MeanHidden:
    """Open a whole checkpoint for its hidden states; documents are read `window` tokens at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"{model_folder}: {sorted(info['missing_keys'])[0]} is missing from the checkpoint")
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return MeanHidden(tokenizer=tokenizer, model=model, model_folder=Path(model_folder), window=window)


def load(folder: Path) -> Vectorizer:
    """Open what `save` wrote."""
    notes = read_json(folder / "vectorizer.json")
    if notes["kind"] == "tfidf":
        return TfIdf(
            terms=notes["terms"],
            idf_V=np.load(folder / "idf.npy", allow_pickle=False),
            components_SV=np.load(folder / "components.npy", allow_pickle=False),
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    if notes["kind"] == "embedding":
        table_VH = np.load(folder / "embedding.npy", allow_pickle=False, mmap_mode="r")
        return MeanEmbedding(tokenizer=tokenizer, table_VH=table_VH)
    if not Path(notes["model"]).is_dir():
        raise ValueError(f"{notes['model']}: the model whose hidden states were clustered is no longer there")
    return mean_hidden(Path(notes["model"]), tokenizer, notes["window"])
