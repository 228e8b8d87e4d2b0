"""One model folder by itself: cross-entropy of text that it has not seen, and lm_eval tasks."""

import glob
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from disco.artifacts import ArtifactError, file_hash
from disco.checkpoint import load_config, tokenizer_identity
from disco.config import ConfigError, Source, Task
from disco.engine import load_model
from disco.evaluate import by_group, find_tasks, loss_of, losses, run_tasks
from disco.packing import Rows, pack
from disco.sources import check_sources_of, documents
from disco.tokenizer import encode, special_ids

KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv"}  # any other file is a document
LENGTH = 1024


def evaluate_model(
    folder: Path,
    *,
    data: Sequence[str] = (),
    tasks: Sequence[Task] = (),
    column: str = "text",
    sequence_length: int | None = None,
    max_rows: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> dict:
    """Measure the model in `folder`: {"data": {cross_entropy, perplexity, tokens, by_file}, "tasks": {task:
    {metric: value}}}, with the keys that were asked for.

    data: files or globs; a row of .jsonl, .parquet and .csv (its `column`) is a document, and so is any other
        file. Documents are cut and packed as in a run's evaluation, into rows of `sequence_length` (at most 1024,
        and the model's positions, if absent), of which `max_rows` count.

    Raises, before the model is loaded, ConfigError for files and tasks that are not there, a missing lm_eval and a
    length that does not fit, ArtifactError where the folder is no model with a tokenizer.
    """
    if not data and not tasks:
        raise ConfigError(f"{folder}: nothing to evaluate: name held-out text (--data) or lm_eval tasks (--tasks)")
    config = load_config(folder)
    if tokenizer_identity(folder) is None:
        raise ArtifactError(f"{folder}: has no tokenizer")
    room = getattr(config, "max_position_embeddings", None) or LENGTH
    length = sequence_length or min(LENGTH, room)
    if not 1 <= length <= room:
        raise ConfigError(f"--sequence-length is {length} but the model has {room} positions: set it to 1..{room}")
    sources = _sources(data, column)
    check_sources_of(sources)
    managers = find_tasks(tasks) if tasks else {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as scratch:
        text = _tokenize(sources, tokenizer, Path(scratch) / "data.tokens") if sources else None
        dtype = str(config.dtype or torch.float32).removeprefix("torch.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(folder, dtype, "grouped_mm").to(device)
        found: dict = {}
        if text is not None:
            rows = pack(text, np.arange(len(text)), length, "pack", seed)
            rows = rows.take(np.arange(min(len(rows), max_rows or len(rows))))
            found["data"] = _losses(model, rows, text, batch_size)
    if tasks:
        found["tasks"] = run_tasks(model, tokenizer, tasks, managers, batch_size, seed)
    return found


def _sources(data: Sequence[str], column: str) -> list[Source]:
    """A source for each file."""
    paths: list[str] = []
    for pattern in data:
        matched = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not matched:
            raise ConfigError(f"--data: '{pattern}' matches no file")
        paths += [path for path in matched if path not in paths]
    return [
        Source(name=f"data.{n}", column=column, **{KINDS.get(Path(path).suffix, "files"): [glob.escape(path)]})
        for n, path in enumerate(paths)
    ]


@dataclass(frozen=True)
class _Text:
    """Tokenised documents, as `pack` reads them."""

    tokens_path: Path
    tokens_sha256: str
    dtype: np.dtype
    pad: int
    tokens: np.ndarray  # labels of each document, int64 [D]
    offset: np.ndarray  # its first token
    source: np.ndarray  # number of its file
    files: list[str]
    name: str = "given"

    def __len__(self) -> int:
        return len(self.tokens)


def _tokenize(sources: list[Source], tokenizer, path: Path) -> _Text:
    ids, labels, code = special_ids(tokenizer), [], []
    files = [next(iter(source.files or source.jsonl or source.parquet or source.csv)) for source in sources]
    with open(path, "wb") as file:
        for number, source in enumerate(sources):
            for _, text in documents(source):
                if text.strip():
                    stored = np.array([ids["bos"], *encode(tokenizer, [text])[0], ids["eos"]], dtype="<u4")
                    stored.tofile(file)
                    labels.append(len(stored) - 1)
                    code.append(number)
    if not labels:
        raise ConfigError(f"--data: {', '.join(files)}: there is no text in them")
    count_D = np.array(labels, dtype=np.int64)
    offset_D = np.concatenate([[0], np.cumsum(count_D + 1)[:-1]])
    return _Text(path, file_hash(path), np.dtype("<u4"), ids["pad"], count_D, offset_D, np.array(code), files)


def _losses(model, rows: Rows, text: _Text, batch_size: int) -> dict:
    sums_D, labels_D = losses(model, rows, batch_size, len(text))
    return loss_of(sums_D, labels_D) | {"by_file": by_group(sums_D, labels_D, text.source, text.files)}
