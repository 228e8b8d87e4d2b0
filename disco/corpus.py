"""Sources to tokenised, split documents: `prepare` writes the corpus folder, `Corpus` reads it.

    corpus.json              sequence_length, packing, vocab_size, dtype, special ids, counts of each source
    tokenizer/               what AutoTokenizer.from_pretrained opens
    {train,validation}.parquet   a row a document: source, text, tokens, offset, sha256
    {train,validation}.tokens    flat little-endian token ids: [bos] + document + [eos], one after the other

`tokens` is the number of labels a document yields (its stored length - 1): every token after the first is
predicted exactly once. A document is a file, a line or row, or a passage of one where `passage_chars` cuts.
The corpus is never held in memory, only a 16-byte hash a document.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from disco.artifacts import ArtifactError, file_hash, fingerprint, need_disk, read_json, write_json
from disco.config import ConfigError, Experiment, Source
from disco.progress import tracked
from disco.sources import check_sources, documents, local_bytes, local_files
from disco.tokenizer import (
    check_tokenizer,
    encode,
    model_tokenizer,
    save_tokenizer,
    special_ids,
    train_bpe,
    vocabulary,
)

SPLITS = ("train", "validation")
ROWS_AT_ONCE = 1000  # documents a row group, and a call of the tokenizer
CHARS_AT_ONCE = 4_000_000
TOKENIZER_CHARS = 100_000_000  # of a longer corpus a sample is read: training takes about 1 s a million
SPOOL = pa.schema({"source": pa.int32(), "text": pa.large_string(), "sha256": pa.binary(32)})
STORED = pa.schema(
    {
        "source": pa.string(),
        "text": pa.large_string(),
        "tokens": pa.int64(),
        "offset": pa.int64(),
        "sha256": pa.string(),
    }
)


def prepare(
    config: Experiment,
    out: Path,
    *,
    model_folder: Path | None = None,
    progress: Callable[[str], None] = print,
) -> None:
    """Read every source, drop duplicates, hold out validation, train or copy the tokenizer, store the tokens.

    `out` is an existing empty folder; `model_folder` a local copy of `model.source`, whose tokenizer is used
    with `corpus.tokenizer.kind: model`. Held out are the round(validation * n) of a source's n documents (at
    least one, at most n - 1) whose hash keyed with `seed` is smallest, passages of one text together where that
    can be (`hold_out`): the choice depends on contents and seed alone, not on order or on other sources. The BPE
    is trained on the training split, of which every n-th document is read where it has more than TOKENIZER_CHARS
    characters.

    Raises ConfigError naming what cannot work, and where it came from.
    """
    sources = config.corpus.sources
    check_sources(config.corpus)
    check_tokenizer(config)
    # The text twice while the split is unknown, and its tokens.
    need_disk(out, 3 * sum(local_bytes(source) for source in sources), "the prepared corpus")
    tokenizer = None
    if config.corpus.tokenizer.kind == "model":
        tokenizer = save_tokenizer(model_tokenizer(config, model_folder), out / "tokenizer")

    spool = out / "documents.parquet"
    counts, held_out_D = _gather(config, spool, progress)
    if tokenizer is None:
        progress("training the tokenizer")
        step = -(-sum(count["characters"] for count in counts.values()) // TOKENIZER_CHARS)
        texts = _training_texts(spool, held_out_D, step)
        trained = train_bpe(texts, config.corpus.tokenizer.vocab_size)
        tokenizer = save_tokenizer(trained, out / "tokenizer")
    vocab_size = vocabulary(tokenizer)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    _tokenize(spool, out, tokenizer, held_out_D, np.dtype(dtype), counts, progress)
    spool.unlink()
    write_json(
        out / "corpus.json",
        {
            "sequence_length": config.corpus.sequence_length,
            "packing": config.corpus.packing,
            "vocab_size": vocab_size,
            "dtype": dtype,
            **special_ids(tokenizer),
            "tokenizer_sha256": fingerprint(
                {str(path.relative_to(out)): file_hash(path) for path in _files(out / "tokenizer")}
            ),
            "tokens_sha256": {name: file_hash(out / f"{name}.tokens") for name in SPLITS},
            "sources": counts,
        },
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def hold_out(key_D: np.ndarray, text_D: np.ndarray, share: float) -> tuple[np.ndarray, str]:
    """Choose the validation documents of one source with D >= 2 documents.

    key_D: uint64, a keyed hash of each document's content; text_D: the file or row it was cut from.
    Whole texts are held out in the order of their smallest key, skipping those that would go beyond 1.25 times the
    aim of round(share * D) documents, 1 to D - 1, until it is reached. Where that does not give half the aim (a
    source of few long texts), passages are held out by their own keys, and training may see their neighbours.
    Returns boolean [D], and "text" or "passage".
    """
    aim = min(max(1, round(share * len(key_D))), len(key_D) - 1)
    _, text_D, size_T = np.unique(text_D, return_inverse=True, return_counts=True)
    key_T = np.full(len(size_T), np.iinfo(np.uint64).max)
    np.minimum.at(key_T, text_D, key_D)
    held_T = np.zeros(len(size_T), dtype=bool)
    held = 0
    for text in np.argsort(key_T, kind="stable"):
        if held + size_T[text] <= 1.25 * aim and held < aim:
            held_T[text] = True
            held += size_T[text]
    if 2 * held >= aim:
        return held_T[text_D], "text"
    held_D = np.zeros(len(key_D), dtype=bool)
    held_D[np.argsort(key_D, kind="stable")[:aim]] = True
    return held_D, "passage"


def _gather(config: Experiment, spool: Path, progress: Callable[[str], None]) -> tuple[dict[str, dict], np.ndarray]:
    """Stream every source's kept documents into `spool`; counts by source, and which documents are held out."""
    seen: set[bytes] = set()
    counts, held_out = {}, []
    key = config.seed.to_bytes(8, "little")
    with _Writer(spool, SPOOL) as writer:
        for code, source in enumerate(config.corpus.sources):
            count = dict.fromkeys(("documents", "characters", "bytes", "duplicates", "too_short"), 0)
            count["files"] = len(local_files(source))
            counts[source.name] = count
            keys, texts = array("Q"), array("q")
            for number, text in tracked(documents(source), f"reading {source.name}", progress):
                if count["documents"] == source.max_documents:
                    break
                if len(text) < max(config.corpus.min_chars, 1):
                    count["too_short"] += 1
                    continue
                data = text.encode()
                digest = hashlib.sha256(data).digest()
                if digest[:16] in seen:
                    count["duplicates"] += 1
                    continue
                if source.max_bytes is not None and count["bytes"] + len(data) > source.max_bytes:
                    count["next"] = len(data)
                    break
                seen.add(digest[:16])
                count["documents"] += 1
                count["characters"] += len(text)
                count["bytes"] += len(data)
                texts.append(number)
                keys.append(int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=key).digest(), "little"))
                writer.add(len(text), source=code, text=text, sha256=digest)
            _check_count(source, count, config.corpus.min_chars)
            held_D, count["held_out_by"] = hold_out(
                np.frombuffer(keys, np.uint64), np.frombuffer(texts, np.int64), config.corpus.validation
            )
            held_out.append(held_D)
    return counts, np.concatenate(held_out)


def _check_count(source: Source, count: dict, min_chars: int) -> None:
    """Both splits need a document of every source."""
    following = count.pop("next", None)
    if count["documents"] >= 2:
        return
    dropped = f"{count['duplicates']} duplicates and {count['too_short']} shorter than {min_chars} characters"
    if following is not None:
        remedy = (
            f"the next document has {following} bytes and max_bytes is {source.max_bytes}: raise it or "
            "set passage_chars"
        )
    elif source.max_documents == 1:
        remedy = "max_documents is 1: raise it"
    elif count["duplicates"] and not count["documents"]:
        remedy = "its documents stand in this or an earlier source already: remove the source"
    else:
        remedy = "give it more text, set passage_chars, or lower corpus.min_chars"
    raise ConfigError(
        f"source '{source.name}' keeps {count['documents']} documents ({dropped} dropped) where training and "
        f"validation need one each: {remedy}"
    )


def _tokenize(
    spool: Path,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    held_out_D: np.ndarray,
    dtype: np.dtype,
    counts: dict[str, dict],
    progress: Callable[[str], None],
) -> None:
    """Write both splits' parquet and token files, and add their documents and tokens to `counts`."""
    ids = special_ids(tokenizer)
    names = list(counts)
    for count in counts.values():
        count["tokens"] = 0
        count.update({f"{name}_{what}": 0 for name in SPLITS for what in ("documents", "tokens")})
    offset = dict.fromkeys(SPLITS, 0)
    with (
        _Writer(out / "train.parquet", STORED) as train,
        _Writer(out / "validation.parquet", STORED) as validation,
        open(out / "train.tokens", "wb") as train_tokens,
        open(out / "validation.tokens", "wb") as validation_tokens,
    ):
        files = {"train": (train, train_tokens), "validation": (validation, validation_tokens)}
        batches = tracked(
            _batches(spool, SPOOL.names),
            "tokenising",
            progress,
            total=len(held_out_D),
            size=lambda numbered: len(numbered[1]["text"]),
        )
        for first, batch in batches:
            encoded = encode(tokenizer, batch["text"])
            for n, (code, text, digest) in enumerate(zip(*batch.values(), strict=True)):
                stored = np.array([ids["bos"], *encoded[n], ids["eos"]], dtype=dtype)
                split = SPLITS[int(held_out_D[first + n])]
                rows, flat = files[split]
                stored.tofile(flat)
                labels = len(stored) - 1
                rows.add(
                    len(text),
                    source=names[code],
                    text=text,
                    tokens=labels,
                    offset=offset[split],
                    sha256=digest.hex(),
                )
                offset[split] += len(stored)
                count = counts[names[code]]
                count["tokens"] += labels
                count[f"{split}_documents"] += 1
                count[f"{split}_tokens"] += labels


def _training_texts(spool: Path, held_out_D: np.ndarray, step: int) -> Iterator[str]:
    """Text of every `step`-th training document."""
    chosen_D = np.zeros(len(held_out_D), dtype=bool)
    chosen_D[np.flatnonzero(~held_out_D)[::step]] = True
    for first, batch in _batches(spool, ["text"]):
        yield from (text for document, text in enumerate(batch["text"], first) if chosen_D[document])


def _batches(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, list]]]:
    """Row groups of a parquet file as (first row, columns)."""
    first = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns)
            yield first, table.to_pydict()
            first += table.num_rows


class _Writer:
    """A parquet file, written in row groups of at most ROWS_AT_ONCE rows and about CHARS_AT_ONCE characters."""

    def __init__(self, path: Path, schema: pa.Schema):
        self.file = pq.ParquetWriter(path, schema, compression="zstd")
        self.schema = schema
        self.rows: list[dict] = []
        self.characters = 0

    def add(self, characters: int, **row) -> None:
        self.rows.append(row)
        self.characters += characters
        if len(self.rows) == ROWS_AT_ONCE or self.characters >= CHARS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        self.file.write_table(pa.Table.from_pylist(self.rows, schema=self.schema))
        self.rows, self.characters = [], 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_) -> None:
        if self.rows:
            self._flush()
        self.file.close()


class Split:
    """One split's documents: `len`, `source` int32 [D] into `sources`, `tokens` and `offset` int64 [D].

    `tokens` counts labels, `offset` is where a document starts in the token file, which `tokens_path`, `dtype`,
    `tokens_sha256` and `pad` describe.
    """

    def __init__(self, folder: Path, name: str, meta: dict):
        self.name = name
        self.path = folder / f"{name}.parquet"
        self.tokens_path = folder / f"{name}.tokens"
        self.tokens_sha256 = meta["tokens_sha256"][name]
        self.dtype = np.dtype(meta["dtype"])
        self.pad = meta["pad"]
        self.sources = list(meta["sources"])
        try:
            table = pq.read_table(self.path, columns=["source", "tokens", "offset"])
            size = self.tokens_path.stat().st_size
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"{folder}: damaged ({error}): run prepare again") from None
        codes = pc.index_in(table["source"], pa.array(self.sources))
        self.source = codes.to_numpy().astype(np.int32)
        self.tokens = table["tokens"].to_numpy()
        self.offset = table["offset"].to_numpy()
        expected = int((self.tokens + 1).sum()) * self.dtype.itemsize
        if size != expected:
            raise ArtifactError(
                f"{self.tokens_path}: {size} bytes, {expected} expected: it is damaged, run prepare again"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self, documents: np.ndarray | None = None) -> Iterator[str]:
        """Texts of the documents (all if None) in the order asked for, read a row group at a time.

        A sorted order reads each row group once.
        """
        wanted = np.arange(len(self)) if documents is None else np.asarray(documents)
        with pq.ParquetFile(self.path) as file:
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            end_G = np.cumsum(rows)
            loaded, texts = -1, []
            for document in wanted:
                group = int(np.searchsorted(end_G, document, side="right"))
                if group != loaded:
                    texts = file.read_row_group(group, columns=["text"])["text"]
                    loaded = group
                yield texts[int(document - (end_G[group] - rows[group]))].as_py()


class Corpus:
    """A prepared corpus: `Corpus.open(folder)`. `meta` is corpus.json."""

    def __init__(self, folder: Path, meta: dict):
        self.folder = folder
        self.meta = meta

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        folder = Path(folder)
        return cls(folder, read_json(folder / "corpus.json"))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")

    def split(self, name: str) -> Split:
        if name not in SPLITS:
            raise ValueError(f"split '{name}': there are {' and '.join(SPLITS)}")
        return Split(self.folder, name, self.meta)
