"""Document features computed in parts, on several machines that share or copy the run folder, and joined.

Part i of n (from 1) holds an n-th of the training documents, in order. Every machine fits the same vectorizer: what
that sees depends on the seed alone. What a part was made from, and the vectorizer's features of the first
documents, stand in its file and are compared when parts are joined. A file is Parquet: document int64, features
list<float32>.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

from disco.artifacts import ArtifactError
from disco.config import ConfigError, Experiment
from disco.features import Vectorizer
from disco.progress import tracked

FOLDER = "features"
KEY, FIRST = b"disco.key", b"disco.first"
SAMPLE, CLOSE = 8, 1e-3  # documents, and by how much their features may differ between machines


def parse_part(text: str) -> tuple[int, int]:
    """ "2/8" to (2, 8). Raises ConfigError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard is '{text}': give the part and how many there are, 1/4 to 4/4")
    return int(found[1]), int(found[2])


def write_part(
    config: Experiment,
    corpus,
    folder: Path,
    part: tuple[int, int],
    *,
    k: int,
    model_folder: Path | None,
    key: str,
    progress: Callable[[str], None] = print,
) -> Path:
    """Write the features of one part of the training documents into `folder`. Returns the file."""
    from disco.cluster import make_vectorizer

    index, of = part
    train = corpus.split("train")
    with threadpool_limits(1):
        vectorizer, *_ = make_vectorizer(config, corpus, k, model_folder, progress)
        documents = _documents(len(train), index, of)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _name(index, of)
        partial = path.with_name(path.name + ".partial")
        done, writer = 0, None
        try:
            made = vectorizer.transform(train.texts(documents))
            for block_BS in tracked(made, f"features, part {index}/{of}", progress, total=len(documents), size=len):
                if writer is None:
                    kind = pa.list_(pa.float32(), block_BS.shape[1])
                    marks = {KEY: key.encode(), FIRST: _sample(vectorizer, train).tobytes()}
                    schema = pa.schema({"document": pa.int64(), "features": kind}, metadata=marks)
                    writer = pq.ParquetWriter(partial, schema)
                rows = pa.FixedSizeListArray.from_arrays(pa.array(block_BS.ravel()), block_BS.shape[1])
                numbers = pa.array(documents[done : done + len(block_BS)])
                writer.write_table(pa.Table.from_arrays([numbers, rows], schema=writer.schema))
                done += len(block_BS)
        finally:
            if writer is not None:
                writer.close()
    if writer is None:
        raise ConfigError(f"--shard is {index}/{of} but there are {len(train)} training documents: use fewer parts")
    os.replace(partial, path)
    return path


def joined(folder: Path, vectorizer: Vectorizer, train, key: str) -> Iterator[np.ndarray] | None:
    """Blocks [B, S] of all documents' features from the parts in `folder`; None where there are none of this `key`.

    Raises ArtifactError where parts are missing, damaged, or made with another vectorizer.
    """
    found: dict[int, dict[int, Path]] = {}
    mine = _sample(vectorizer, train).ravel()
    for path in sorted(folder.glob("part-*-of-*.parquet")):
        index, of = map(int, re.findall(r"\d+", path.name)[:2])
        marks = _schema(path).metadata or {}
        if marks.get(KEY) != key.encode():
            continue
        theirs = np.frombuffer(marks.get(FIRST, b""), np.float32)
        if theirs.shape != mine.shape or np.abs(theirs - mine).max(initial=0) > CLOSE:
            raise ArtifactError(
                f"{path}: was made with another vectorizer than this machine's: use the same versions of the "
                "packages everywhere, or remove it"
            )
        found.setdefault(of, {})[index] = path
    if not found:
        return None
    whole = [of for of, parts in found.items() if len(parts) == of]
    if not whole:
        of = max(found, key=lambda of: len(found[of]) / of)
        missing = next(index for index in range(1, of + 1) if index not in found[of])
        raise ArtifactError(
            f"{folder}: {len(found[of])} of {of} parts are there, {_name(missing, of)} is missing: "
            f"run disco cluster --shard {missing}/{of}, or remove the folder"
        )
    return _blocks(found[whole[0]], whole[0], len(train))


def _blocks(parts: dict[int, Path], of: int, documents: int) -> Iterator[np.ndarray]:
    for index in range(1, of + 1):
        expected, done = _documents(documents, index, of), 0
        try:
            with pq.ParquetFile(parts[index]) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    numbers = table["document"].to_numpy()
                    if not np.array_equal(numbers, expected[done : done + len(numbers)]):
                        raise ArtifactError(f"{parts[index]}: holds other documents than part {index} of {of}")
                    done += len(numbers)
                    yield table["features"].combine_chunks().flatten().to_numpy().reshape(len(numbers), -1)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"{parts[index]}: damaged ({error}): make it again") from None
        if done != len(expected):
            raise ArtifactError(f"{parts[index]}: {done} documents, {len(expected)} expected: make it again")


def _sample(vectorizer: Vectorizer, train) -> np.ndarray:
    """Features of the first documents: what tells two vectorizers apart, whatever their kind."""
    return np.concatenate(list(vectorizer.transform(train.texts(np.arange(min(SAMPLE, len(train)))))))


def _documents(count: int, index: int, of: int) -> np.ndarray:
    return np.arange(count * (index - 1) // of, count * index // of)


def _name(index: int, of: int) -> str:
    return f"part-{index:05d}-of-{of:05d}.parquet"


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged ({error}): make it again") from None
