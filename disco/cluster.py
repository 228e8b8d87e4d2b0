"""The cluster stage: documents to `k` clusters, one for each submodel.

Features (`features.py`) are clustered by k-means; with `balance: tokens` the training documents are then
assigned so that every cluster holds the same number of tokens (`balance.py`), and centroids and assignment are
refined in turn (balanced k-means). Validation documents and `assign`ed ones go to their nearest centroid.

BLAS and OpenMP run on one thread here: their reductions depend on the number of threads, so the clusters would
too.

Shape suffixes: D documents, S feature dimensions, K clusters, G sources.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import normalized_mutual_info_score, silhouette_score
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits

from disco import features
from disco.artifacts import ArtifactError, file_hash, read_json, write_json
from disco.balance import even_cut
from disco.cluster_map import draw_map
from disco.config import ConfigError, Experiment
from disco.kmeans import balanced_kmeans, kmeans, squared_distances
from disco.progress import tracked
from disco.shards import joined

FIT_DOCUMENTS = 50_000  # documents that vocabulary, idf and SVD (and the first centroids of a stream) see
SILHOUETTE_DOCUMENTS = 4_000


def cluster(
    config: Experiment,
    corpus: Any,
    out: Path,
    *,
    k: int,
    model_folder: Path | None,
    method: str | None = None,
    minimum_tokens: int = 0,
    parts: tuple[Path, str] | None = None,
    progress: Callable[[str], None] = print,
) -> None:
    """Cluster a prepared corpus into the existing folder `out`.

    k:              clusters.
    model_folder:   the trained model for features `embedding` and `hidden`; else unused.
    method:         overrides `cluster.method`.
    minimum_tokens: labels that every cluster must hold, one batch say.
    parts:          folder of features made in parts (`shards.py`), and the key that they have to have.

    Writes {train,validation}.parquet (document int64, cluster int32, nearest int32, distance float32: to its own
    cluster's centroid), centroids.npy, the vectorizer's files, clusters.json, map.png and map.npz. The method
    `random` has no features: it writes the parquet files and clusters.json alone.

    Texts are read twice: a sample of FIT_DOCUMENTS to fit, then all of them to transform. Raises ConfigError where
    the corpus cannot be cut so.
    """
    method = method or config.cluster.method
    train, validation = corpus.split("train"), corpus.split("validation")
    if k < 1:
        raise ConfigError(f"cluster.k is {k}: it must be 1 or more")
    if len(train) < k:
        raise ConfigError(
            f"the corpus has {len(train)} training documents, fewer than cluster.k={k}: add documents, cut them "
            "smaller (corpus.sources[].passage_chars), or use fewer experts"
        )
    notes: dict[str, Any] = {"method": method, "k": k, "seed": config.seed}
    if method == "random":
        rng = np.random.default_rng([config.seed, 1])
        nearest_D = label_D = even_cut(rng.permutation(len(train)), train.tokens, k)
        held_out_D = _hashed(validation.texts(), k, config.seed)
        _refuse_small(label_D, train.tokens, k, minimum_tokens, config.cluster.balance)
        _write(out / "train.parquet", label_D, nearest_D, np.full(len(train), np.nan))
        _write(out / "validation.parquet", held_out_D, held_out_D, np.full(len(validation), np.nan))
        notes |= {"silhouette": None, "terms": []}
    else:
        notes |= {"features": config.cluster.features, "balance": config.cluster.balance}
        with threadpool_limits(1):
            label_D, held_out_D, found = _by_features(
                config, corpus, train, validation, out, k, model_folder, minimum_tokens, parts, progress
            )
        notes |= found
    notes |= _against_sources(label_D, train, k)
    notes["validation"] = {
        "documents": np.bincount(held_out_D, minlength=k).tolist(),
        "tokens": np.bincount(held_out_D, validation.tokens, k).astype(int).tolist(),
    }
    notes["files"] = {
        str(path.relative_to(out)): file_hash(path) for path in sorted(out.rglob("*")) if _persisted(path)
    }
    write_json(out / "clusters.json", notes)
    progress(
        f"{k} clusters of {len(train):,} documents by {method}: largest {notes['largest']:.3f} x the mean, "
        f"purity {notes['purity']:.3f}, NMI {notes['nmi']:.3f}"
    )


def _by_features(
    config: Experiment,
    corpus: Any,
    train: Any,
    validation: Any,
    out: Path,
    k: int,
    model_folder: Path | None,
    minimum_tokens: int,
    parts: tuple[Path, str] | None,
    progress: Callable[[str], None],
) -> tuple[np.ndarray, np.ndarray, dict]:
    section, seed = config.cluster, config.seed
    vectorizer, rng, sample, sample_tfidf = make_vectorizer(config, corpus, k, model_folder, progress)
    sample_terms = None if sample_tfidf is None else vectorizer.terms
    vectorizer.save(out)
    scratch = out / "features.tmp"
    try:
        made = None if parts is None else joined(parts[0], vectorizer, train, parts[1])
        made = vectorizer.transform(train.texts()) if made is None else made
        blocks = tracked(made, f"{section.features} features", progress, total=len(train), size=len)
        x_DS = _features(blocks, len(train), scratch)
        _refuse_few_distinct(x_DS, k)
        progress("k-means")
        centroids_KS = kmeans(x_DS, k, n_init=section.n_init, minibatch_above=section.minibatch_above, seed=seed)
        if section.balance == "tokens":
            label_D, centroids_KS = balanced_kmeans(x_DS, centroids_KS, train.tokens, progress=progress)
        squared_DK = squared_distances(x_DS, centroids_KS)
        nearest_D = squared_DK.argmin(1)
        if section.balance == "none":
            label_D = nearest_D
        _refuse_small(label_D, train.tokens, k, minimum_tokens, section.balance)
        np.save(out / "centroids.npy", centroids_KS)
        _write(out / "train.parquet", label_D, nearest_D, np.sqrt(squared_DK[np.arange(len(train)), label_D]))
        held_out_D, away_D = _nearest(vectorizer, validation.texts(), centroids_KS)
        _write(out / "validation.parquet", held_out_D, held_out_D, away_D)

        progress("description and map")
        if sample_tfidf is None:
            fitted, sample_tfidf = features.fit_tfidf(
                train.texts(sample), dimensions=1, max_terms=section.max_terms, seed=seed
            )
            sample_terms = fitted.terms
        some = np.sort(rng.choice(len(train), min(SILHOUETTE_DOCUMENTS, len(train)), replace=False))
        draw_map(np.asarray(x_DS[some]), label_D[some], train.source[some], train.sources, some, out, seed)
        found = {
            "dimensions": x_DS.shape[1],
            "inertia": float(squared_DK[np.arange(len(train)), label_D].sum(dtype=np.float64)),
            "moved": float(np.mean(label_D != nearest_D)),
            "silhouette": _silhouette(np.asarray(x_DS[some]), label_D[some]),
            "terms": top_terms(sample_tfidf, sample_terms, label_D[sample], k),
        }
    finally:
        scratch.unlink(missing_ok=True)
    return label_D, held_out_D, found


def make_vectorizer(
    config: Experiment, corpus: Any, k: int, model_folder: Path | None, progress: Callable[[str], None]
) -> tuple[features.Vectorizer, np.random.Generator, np.ndarray, Any]:
    """What makes features of documents, fitted on a seeded sample of them: the vectorizer, the generator behind the
    sample, the sample, and its tf-idf rows where there are any."""
    section, train = config.cluster, corpus.split("train")
    rng = np.random.default_rng([config.seed, 2])
    sample = np.sort(rng.choice(len(train), min(FIT_DOCUMENTS, len(train)), replace=False))
    if section.features != "tfidf":
        return _model_vectorizer(config, corpus, model_folder), rng, sample, None
    vectorizer, tfidf = features.fit_tfidf(
        tracked(train.texts(sample), "tf-idf of a sample", progress, total=len(sample)),
        dimensions=section.dimensions or max(32, 2 * k),
        max_terms=section.max_terms,
        seed=config.seed,
    )
    return vectorizer, rng, sample, tfidf


def _model_vectorizer(config: Experiment, corpus: Any, model_folder: Path | None) -> features.Vectorizer:
    kind = config.cluster.features
    if model_folder is None or not (config.model.source or config.seed_phase.tokens):
        raise ConfigError(
            f"cluster.features is '{kind}' but the model is untrained (model.config from scratch, no seed phase): "
            "use cluster.features=tfidf, set seed_phase.tokens, or give a trained model.source"
        )
    if kind == "embedding":
        return features.mean_embedding(model_folder, corpus.tokenizer())
    return features.mean_hidden(model_folder, corpus.tokenizer(), config.corpus.sequence_length)


def _features(blocks: Iterable[np.ndarray], documents: int, scratch: Path) -> np.ndarray:
    """All features [D, S] float32, in a file that the kernel may page out. Raises ConfigError if not finite."""
    x_DS, done = None, 0
    for block_BS in blocks:
        if not np.isfinite(block_BS).all():
            row = done + int(np.flatnonzero(~np.isfinite(block_BS).all(1))[0])
            raise ConfigError(
                f"the features of training document {row} are not finite: the model that makes them holds NaN or "
                "overflows: check model.source, or use cluster.features=tfidf"
            )
        if x_DS is None:
            x_DS = np.memmap(scratch, np.float32, "w+", shape=(documents, block_BS.shape[1]))
        x_DS[done : done + len(block_BS)] = block_BS
        done += len(block_BS)
    return x_DS


def _refuse_few_distinct(x_DS: np.ndarray, k: int) -> None:
    distinct = set()
    for row_S in x_DS:
        distinct.add(row_S.tobytes())
        if len(distinct) == k:
            return
    what = "identical" if len(distinct) == 1 else f"only {len(distinct)} different ones"
    raise ConfigError(
        f"the feature vectors of all {len(x_DS)} training documents are {what}, cluster.k is {k}: "
        "add other documents, use another cluster.features, or set cluster.method=random"
    )


def _refuse_small(label_D: np.ndarray, tokens_D: np.ndarray, k: int, minimum: int, balance: str) -> None:
    documents_K, tokens_K = np.bincount(label_D, minlength=k), np.bincount(label_D, tokens_D, k)
    smallest = int(tokens_K.argmin())
    if tokens_K[smallest] >= max(minimum, 1):
        return
    remedy = "" if balance == "tokens" else "set cluster.balance=tokens, "
    holds = f"cluster {smallest} holds {documents_K[smallest]} documents of {int(tokens_K[smallest])} tokens"
    raise ConfigError(
        f"{holds}, less than one batch of {minimum} (train.batch_size x corpus.sequence_length): {remedy}"
        "lower train.batch_size, use fewer experts, or add documents"
        if minimum
        else f"{holds}: {remedy}use fewer experts, or cut documents smaller (corpus.sources[].passage_chars)"
    )


def _nearest(
    vectorizer: features.Vectorizer, texts: Iterable[str], centroids_KS: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centroid [D] and the distance to it [D]."""
    labels, distances = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for block_BS in vectorizer.transform(texts):
        squared_BK = squared_distances(block_BS, centroids_KS)
        labels.append(squared_BK.argmin(1))
        distances.append(np.sqrt(squared_BK.min(1)))
    return np.concatenate(labels), np.concatenate(distances)


def top_terms(tfidf_DV: Any, terms: list[str], label_D: np.ndarray, k: int, count: int = 10) -> list[list[str]]:
    """For each cluster the terms whose mean tf-idf exceeds the mean over all documents the most."""
    overall_V = np.asarray(tfidf_DV.mean(0)).ravel()
    best = []
    for cluster_ in range(k):
        inside = np.flatnonzero(label_D == cluster_)
        excess_V = np.asarray(tfidf_DV[inside].mean(0)).ravel() - overall_V if len(inside) else -overall_V
        order = [index for index in np.argsort(-excess_V, kind="stable") if terms[index] != features.NUMBER]
        best.append([terms[index] for index in order[:count] if excess_V[index] > 0])
    return best


def _silhouette(x_DS: np.ndarray, label_D: np.ndarray) -> float | None:
    """Mean cosine silhouette, or None where it is not defined (one cluster, or every document its own)."""
    if not 2 <= len(np.unique(label_D)) < len(label_D):
        return None
    return float(silhouette_score(normalize(x_DS), label_D, metric="cosine"))


def _against_sources(label_D: np.ndarray, split: Any, k: int) -> dict:
    """Sizes, and agreement with the sources: contingency table [G][K], purity, NMI."""
    tokens_K = np.bincount(label_D, split.tokens, k)
    table_GK = np.zeros((len(split.sources), k), np.int64)
    np.add.at(table_GK, (split.source, label_D), 1)
    return {
        "documents": np.bincount(label_D, minlength=k).tolist(),
        "tokens": tokens_K.astype(int).tolist(),
        "share": (tokens_K / max(tokens_K.sum(), 1)).round(6).tolist(),
        "largest": float(tokens_K.max() / max(tokens_K.mean(), 1e-9)),
        "sources": list(split.sources),
        "contingency": table_GK.tolist(),
        "purity": float(table_GK.max(0).sum() / len(label_D)),
        "nmi": float(normalized_mutual_info_score(split.source, label_D)),
    }


def _hashed(texts: Iterable[str], k: int, seed: int) -> np.ndarray:
    """A random cluster for each text [D], by its content."""
    digests = (hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).digest() for text in texts)
    return np.fromiter((int.from_bytes(digest[:8], "little") % k for digest in digests), np.int64)


def _write(path: Path, label_D: np.ndarray, nearest_D: np.ndarray, distance_D: np.ndarray) -> None:
    table = {
        "document": np.arange(len(label_D), dtype=np.int64),
        "cluster": label_D.astype(np.int32),
        "nearest": nearest_D.astype(np.int32),
        "distance": distance_D.astype(np.float32),
    }
    pq.write_table(pa.table(table), path)


def _persisted(path: Path) -> bool:
    """What `assignments` and `assign` read."""
    return path.suffix in (".npy", ".parquet") or path.name == "vectorizer.json" or path.parent.name == "tokenizer"


def assignments(folder: Path, split: str) -> np.ndarray:
    """Cluster [D] int64 of each document of `split` (train or validation), from a finished stage folder."""
    path = Path(folder) / f"{split}.parquet"
    try:
        return pq.read_table(path, columns=["cluster"])["cluster"].to_numpy().astype(np.int64)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file: run the cluster stage first") from None
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged ({error}): run the cluster stage again") from None


def assign(folder: Path, texts: Iterable[str]) -> np.ndarray:
    """Cluster [D] int64 of new documents: the nearest centroid, from the stage's files alone.

    Features `hidden` need the model folder that they were made with to be where it was. The method `random`
    hashes the text. Raises ArtifactError where a file is missing or differs from its recorded hash.
    """
    folder = Path(folder)
    notes = read_json(folder / "clusters.json")
    for name, digest in notes["files"].items():
        path = folder / name
        if not path.is_file() or file_hash(path) != digest:
            state = "differs from its recorded hash" if path.is_file() else "missing"
            raise ArtifactError(f"{path}: {state}: run the cluster stage again")
    if notes["method"] == "random":
        return _hashed(texts, notes["k"], notes["seed"])
    with threadpool_limits(1):
        return _nearest(features.load(folder), texts, np.load(folder / "centroids.npy", allow_pickle=False))[0]
