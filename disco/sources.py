"""Sources of the experiment file to a stream of documents; nothing is ever held but one document or one block.

`check_sources` refuses what cannot work before anything is read whole; `documents` streams one source in an
order that depends on file names and contents alone.
"""

import codecs
import glob
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from disco.config import ConfigError, Corpus, Source

BLOCK = 1 << 20
ROW_KINDS = {"text": "text", "jsonl": "json", "parquet": "parquet", "csv": "csv"}  # ours: the builder in `datasets`
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")


def check_sources(corpus: Corpus) -> None:
    """Refuse sources that cannot be read, without reading them.

    First every glob and package of every source is resolved, then each file (or hub data set) is opened for its
    first row. Raises ConfigError: package not installed, no file matched, unreadable or empty files, not a file
    of the stated kind, column missing or not text, hub unreachable.
    """
    check_sources_of(corpus.sources)


def check_sources_of(sources: Iterable[Source]) -> None:
    sources = list(sources)
    files = {source.name: local_files(source) for source in sources}
    for source in sources:
        for path in files[source.name]:
            if not os.access(path, os.R_OK):
                raise ConfigError(f"source '{source.name}': {path} cannot be read: check its permissions")
        if files[source.name] and not any(path.stat().st_size for path in files[source.name]):
            raise ConfigError(
                f"source '{source.name}': all {len(files[source.name])} matched files are empty: "
                "remove the source or mend its globs"
            )
    for source in sources:
        if not source.files and not any([_first_row(source, path) for path in _parts(source)]):  # opens every one
            raise ConfigError(f"source '{source.name}' holds no rows: remove it")


def local_files(source: Source) -> list[Path]:
    """The files that a source's globs match, sorted by path; empty for a hub data set.

    Raises ConfigError for a package that is not installed, a missing root and a glob that matches nothing.
    """
    if source.hub:
        return []
    patterns = next(given for kind in ("files", *ROW_KINDS) if (given := getattr(source, kind)))
    found: set[str] = set()
    for pattern in patterns:
        matched = [
            path
            for root in _roots(source)
            for match in glob.glob(os.path.expanduser(pattern), root_dir=root, recursive=True)
            if not os.path.isdir(path := os.path.normpath(root / match))
        ]
        if not matched:
            where = " or ".join(str(root) for root in _roots(source))
            raise ConfigError(
                f"source '{source.name}': '{pattern}' matches no file under {where}: "
                "check the glob (** goes through folders) and root"
            )
        found.update(matched)
    broken = next((path for path in sorted(found) if not os.path.isfile(path)), None)
    if broken:
        raise ConfigError(f"source '{source.name}': {broken} is a broken link or no regular file: exclude it")
    return [Path(path) for path in sorted(found)]


def local_bytes(source: Source) -> int:
    """Bytes of text to expect from a source's files (compressed ones count as they lie); 0 for an uncapped hub."""
    size = sum(path.stat().st_size for path in local_files(source))
    if source.max_bytes is None:
        return size
    return source.max_bytes if source.hub else min(size, source.max_bytes)


def documents(source: Source) -> Iterator[tuple[int, str]]:
    """Stream a source's documents, cut into passages where `passage_chars` says so, each with its file's or row's
    number, which passages of one text share.

    `max_bytes`, `max_documents` and `min_chars` are applied by the caller, who knows which documents it keeps.
    Raises ConfigError naming file and byte of what is not UTF-8, file and row of what is not text.
    """
    texts = (read_text(path) for path in local_files(source)) if source.files else _rows(source)
    for number, blocks in enumerate(texts):
        if source.passage_chars:
            yield from ((number, passage) for passage in passages(blocks, source.passage_chars))
        else:
            yield number, "".join(blocks)


def passages(blocks: Iterable[str], size: int) -> Iterator[str]:
    """Cut a text, given in blocks of any length, into passages of more than size/2 and at most `size` characters.

    Each ends at the last paragraph end in its second half, else line end, sentence end, space, else at `size`;
    joined they give the text back. The last one may be shorter.
    """
    text = ""
    for block in blocks:
        text += block
        start = 0
        while len(text) - start > size:
            stop = _cut(text, start, size)
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text:
        yield text


def _cut(text: str, start: int, size: int) -> int:
    for ending in ("\n\n", "\n\r\n", "\n", ". ", " "):
        at = text.rfind(ending, start + size // 2, start + size)
        if at >= 0:
            return at + len(ending)
    return start + size


def read_text(path: Path) -> Iterator[str]:
    """Stream a UTF-8 file in blocks. Raises ConfigError naming the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                text = decoder.decode(block)
                yield text if consumed else text.removeprefix("\ufeff")
                consumed += len(block)
            block = b""
            decoder.decode(block, final=True)
    except UnicodeDecodeError as error:
        # error.object is what the decoder had kept of earlier blocks, then this block.
        offset = consumed - (len(error.object) - len(block)) + error.start
        raise ConfigError(
            f"{path}: not UTF-8 at byte {offset} (0x{error.object[error.start]:02x}): "
            "convert the file to UTF-8 or exclude it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): mend or exclude it") from None


def _roots(source: Source) -> list[Path]:
    """Folders that a source's relative globs start from."""
    if source.package is None:
        bases = [Path()]
    else:
        bases = _package_folders(source)
    roots = [base / Path(source.root).expanduser() for base in bases]
    if not any(root.is_dir() for root in roots):
        raise ConfigError(f"source '{source.name}': root {roots[0]} is no folder")
    return [root for root in roots if root.is_dir()]


def _package_folders(source: Source) -> list[Path]:
    try:
        spec = importlib.util.find_spec(source.package)  # does not import a top-level package
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"source '{source.name}': package '{source.package}' is not installed: install it or remove the source"
        )
    if spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    if not spec.has_location:
        raise ConfigError(f"source '{source.name}': package '{source.package}' is built in and has no files")
    return [Path(spec.origin).parent]


def _parts(source: Source) -> list[Path | None]:
    """What is opened one after the other: the files that hold anything, or the hub data set (None)."""
    return [None] if source.hub else [path for path in local_files(source) if path.stat().st_size]


def _open(source: Source, path: Path | None):
    """One file (or the hub data set) as a streaming `datasets.IterableDataset`."""
    import datasets  # half a second, which sources of plain files need not wait for

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each local file is reported to the hub, or times out
    if path is None:
        return datasets.load_dataset(source.hub, name=source.subset, split=source.split, streaming=True)
    kind = next(kind for kind in ROW_KINDS if getattr(source, kind))
    # An empty string in a CSV is text, and so is "NA"; a Parquet row group may be larger than memory.
    options = {"csv": {"keep_default_na": False}, "parquet": {"batch_size": 256}}.get(kind, {})
    return datasets.load_dataset(ROW_KINDS[kind], data_files=[str(path)], split="train", streaming=True, **options)


def _first_row(source: Source, path: Path | None) -> bool:
    """Whether there is a first row; refuses one without the column."""
    return next(_texts_of(source, path), None) is not None


def _rows(source: Source) -> Iterator[list[str]]:
    for path in _parts(source):
        for text in _texts_of(source, path):
            yield [text]


def _texts_of(source: Source, path: Path | None) -> Iterator[str]:
    """Texts of one file or hub data set, row by row; a null is an empty text."""
    place = f"source '{source.name}': {f'hub data set {source.hub!r}' if path is None else path}"
    column = "text" if source.text else source.column
    number = 0
    try:
        for row in _open(source, path):
            number += 1
            if column not in row:
                raise ConfigError(
                    f"{place}: row {number} has no column '{column}': set column to one of {', '.join(row)}"
                )
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise ConfigError(
                    f"{place}: column '{column}' holds {type(text).__name__} in row {number} ({text!r:.40}), "
                    "not text: choose another column"
                )
            yield text or ""
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        if path is not None and path.suffix not in COMPRESSED:
            for _ in read_text(path):  # names the byte
                pass
        raise ConfigError(f"{place}: not UTF-8 after row {number} ({error}): convert it to UTF-8") from None
    except Exception as error:  # `datasets` passes on whatever its reader, decompressor or network raises
        reason = " ".join(str(error).split())[:300]
        remedy = "check its name, subset, split and the network" if path is None else "mend or exclude the file"
        raise ConfigError(f"{place}: cannot be read after row {number} ({reason}): {remedy}") from None
