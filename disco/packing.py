"""Documents to rows of `sequence_length`: pieces, bin packing, batches.

Shapes: P pieces, R rows, B rows of a batch, L sequence_length, D documents.

A document of n labels is cut, counted from its own beginning, into pieces of at most L inputs; neighbouring pieces
share one token, so that every label is predicted exactly once. A piece goes whole into one row and its positions
start at 0: with `position_ids` and no attention mask the model attends within pieces only, so a document's
cross-entropy does not depend on what it is packed with.
"""

import os
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from disco.artifacts import ArtifactError, file_hash
from disco.corpus import Split

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Rows:
    """Index arrays of packed rows over a token file, which stays on disk.

    Row r holds the pieces pointer[r] : pointer[r + 1] one after the other; piece p reads length[p] inputs from
    token start[p] on and belongs to document[p].
    """

    tokens_path: Path
    tokens_sha256: str
    dtype: np.dtype
    sequence_length: int
    pad: int
    pointer: np.ndarray  # int64 [R + 1]
    start: np.ndarray  # int64 [P]
    length: np.ndarray  # int64 [P]
    document: np.ndarray  # int64 [P]

    def __len__(self) -> int:
        return len(self.pointer) - 1

    @cached_property
    def _tokens(self) -> np.ndarray:
        if not len(self.start):  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.tokens_path, dtype=self.dtype, mode="r")

    def labels(self) -> np.ndarray:
        """Valid labels of each row, int64 [R]."""
        ends = np.concatenate([[0], np.cumsum(self.length)])
        return np.diff(ends[self.pointer])

    @property
    def total_labels(self) -> int:
        return int(self.length.sum())

    @property
    def padding(self) -> float:
        """Share of the positions that hold no token."""
        return 1 - self.total_labels / (len(self) * self.sequence_length) if len(self) else 0.0

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """int64 [B, L]: input_ids, position_ids, labels.

        Labels are aligned (labels[b, t] is predicted at t; -100 = none). The padding tail is a piece of its own.
        """
        row_P, column_P, piece_P, length_P = self._layout(rows)
        shape = (len(rows), self.sequence_length)
        inputs = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        used_B = np.bincount(row_P, weights=length_P, minlength=len(rows)).astype(np.int64)
        positions = np.arange(self.sequence_length) - used_B[:, None]  # of the tail; pieces overwrite the rest
        within = _ranges(length_P)
        into = (np.repeat(row_P, length_P), np.repeat(column_P, length_P) + within)
        source = np.repeat(self.start[piece_P], length_P) + within
        inputs[into] = self._tokens[source]
        labels[into] = self._tokens[source + 1]
        positions[into] = within
        return {
            "input_ids": torch.from_numpy(inputs),
            "position_ids": torch.from_numpy(positions),
            "labels": torch.from_numpy(labels),
        }

    def documents(self, rows: np.ndarray) -> np.ndarray:
        """Document of each label of the rows, int64 [B, L]; -1 where there is none."""
        row_P, column_P, piece_P, length_P = self._layout(rows)
        documents = np.full((len(rows), self.sequence_length), -1, dtype=np.int64)
        into = (np.repeat(row_P, length_P), np.repeat(column_P, length_P) + _ranges(length_P))
        documents[into] = np.repeat(self.document[piece_P], length_P)
        return documents

    def _layout(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each piece of the rows: its row in the batch, first column, index and length."""
        rows = self._checked(rows)
        count_B = self.pointer[rows + 1] - self.pointer[rows]
        piece_P = np.repeat(self.pointer[rows], count_B) + _ranges(count_B)
        length_P = self.length[piece_P]
        before_P = np.cumsum(length_P) - length_P
        first_B = np.cumsum(count_B) - count_B
        column_P = before_P - np.repeat(before_P[first_B], count_B)  # no row is empty
        return np.repeat(np.arange(len(rows)), count_B), column_P, piece_P, length_P

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"row {rows.max() if rows.min() >= 0 else rows.min()} of {len(self)} rows")
        return rows

    def take(self, rows: np.ndarray) -> "Rows":
        """The given rows, in the given order; a row may be given more than once."""
        rows = self._checked(rows)
        count_R = self.pointer[rows + 1] - self.pointer[rows]
        pieces = np.repeat(self.pointer[rows], count_R) + _ranges(count_R)
        return replace(
            self,
            pointer=np.concatenate([[0], np.cumsum(count_R)]).astype(np.int64),
            start=self.start[pieces],
            length=self.length[pieces],
            document=self.document[pieces],
        )

    @staticmethod
    def concat(parts: "list[Rows]") -> "Rows":
        """Rows over the same token file and sequence_length, one after the other."""
        first = parts[0]
        for part in parts[1:]:
            for what in ("sequence_length", "tokens_sha256"):
                if getattr(part, what) != getattr(first, what):
                    raise ValueError(
                        f"rows with {what} {getattr(first, what)} and {getattr(part, what)} cannot be joined: "
                        "pack both from one corpus"
                    )
        shift = np.cumsum([0, *(len(part.start) for part in parts[:-1])])
        return replace(
            first,
            pointer=np.concatenate([[0], *(part.pointer[1:] + by for part, by in zip(parts, shift, strict=True))]),
            start=np.concatenate([part.start for part in parts]),
            length=np.concatenate([part.length for part in parts]),
            document=np.concatenate([part.document for part in parts]),
        )

    def save(self, path: str | Path) -> None:
        """Write the index arrays as npz, with the token file's path from there, size and SHA-256."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            np.savez(
                file,
                tokens_path=os.path.relpath(self.tokens_path, path.parent),
                tokens_sha256=self.tokens_sha256,
                tokens_bytes=self.tokens_path.stat().st_size,
                dtype=self.dtype.str,
                sequence_length=self.sequence_length,
                pad=self.pad,
                pointer=self.pointer,
                start=self.start,
                length=self.length,
                document=self.document,
            )
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = True) -> "Rows":
        """Open what `save` or `export` wrote. `verify` hashes the token file; its size is compared always.

        Raises ArtifactError naming the file that is missing, damaged or another one.
        """
        path = Path(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
            tokens_path = Path(os.path.normpath(path.parent / str(stored["tokens_path"])))
            size, sha256 = int(stored["tokens_bytes"]), str(stored["tokens_sha256"])
            rows = cls(
                tokens_path=tokens_path,
                tokens_sha256=sha256,
                dtype=np.dtype(str(stored["dtype"])),
                sequence_length=int(stored["sequence_length"]),
                pad=int(stored["pad"]),
                **{name: stored[name] for name in ("pointer", "start", "length", "document")},
            )
        except FileNotFoundError:
            raise ArtifactError(f"{path}: no such file") from None
        except Exception as error:  # zipfile, zlib and numpy each have their own
            raise ArtifactError(f"{path}: damaged ({error}): pack again") from None
        if not tokens_path.is_file():
            raise ArtifactError(f"{path}: its token file {tokens_path} is missing: carry it along")
        if tokens_path.stat().st_size != size or (verify and file_hash(tokens_path) != sha256):
            raise ArtifactError(f"{tokens_path}: not the token file that {path} was packed from: pack again")
        return rows

    def export(self, folder: str | Path) -> "Rows":
        """Write `rows.npz` and `rows.tokens` into `folder`, to be carried off: only the tokens needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        start, first, piece = np.unique(self.start, return_index=True, return_inverse=True)
        length = self.length[first]
        new_start = np.concatenate([[0], np.cumsum(length + 1)])
        path = folder / "rows.tokens"
        with open(path, "wb") as file:
            for begin, count in zip(start, length, strict=True):
                self._tokens[begin : begin + count + 1].tofile(file)
        rows = replace(self, tokens_path=path, tokens_sha256=file_hash(path), start=new_start[piece])
        rows.save(folder / "rows.npz")
        return rows


def pack(split: Split, documents: np.ndarray, sequence_length: int, packing: str, seed: int) -> Rows:
    """Cut documents into pieces and lay them in rows, which are shuffled by `seed`.

    packing: "pack" fits pieces into rows by best-fit decreasing; "document" gives each piece its own row.
    """
    documents = np.asarray(documents, dtype=np.int64)
    if documents.size and not (0 <= documents.min() and documents.max() < len(split)):
        raise ValueError(
            f"document {documents.max() if documents.min() >= 0 else documents.min()}: the {split.name} split "
            f"has documents 0 to {len(split) - 1}"
        )
    if sequence_length < 1:
        raise ValueError(f"sequence_length is {sequence_length}: a row needs at least one position")
    start_P, length_P, document_P = pieces(split, documents, sequence_length)
    generator = np.random.default_rng(seed)
    if packing == "pack":
        # Pieces of one length are interchangeable: which of them share a row is left to the seed.
        mixed_P = generator.permutation(len(length_P))
        row_P = np.empty(len(length_P), dtype=np.int64)
        row_P[mixed_P] = best_fit_decreasing(length_P[mixed_P], sequence_length)
    elif packing == "document":
        row_P = np.arange(len(length_P))
    else:
        raise ValueError(f"packing '{packing}': there are pack and document")
    count_R = np.bincount(row_P)
    order_P = np.argsort(row_P, kind="stable")
    rows = Rows(
        tokens_path=split.tokens_path,
        tokens_sha256=split.tokens_sha256,
        dtype=split.dtype,
        sequence_length=sequence_length,
        pad=split.pad,
        pointer=np.concatenate([[0], np.cumsum(count_R)]).astype(np.int64),
        start=start_P[order_P],
        length=length_P[order_P],
        document=document_P[order_P],
    )
    return rows.take(generator.permutation(len(rows)))


def pieces(split: Split, documents: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token, inputs and document, int64 [P] each, of the pieces of the documents."""
    tokens_D = split.tokens[documents]
    count_D = -(-tokens_D // sequence_length)
    skipped_P = _ranges(count_D) * sequence_length
    start_P = np.repeat(split.offset[documents], count_D) + skipped_P
    length_P = np.minimum(np.repeat(tokens_D, count_D) - skipped_P, sequence_length)
    return start_P, length_P, np.repeat(documents, count_D)


def best_fit_decreasing(length_P: np.ndarray, capacity: int) -> np.ndarray:
    """Row of each piece, int64 [P]: longest first, each into the fullest row with room for it.

    At most 11/9 of the optimal number of rows, and 6/9 (Johnson 1973). O(P log capacity): rows are kept by the room
    left in them, which takes no more than `capacity` values.
    """
    row_P = np.empty(len(length_P), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by room left
    rooms: list[int] = []  # sorted: where with_room is not empty
    rows = 0
    order = np.argsort(-length_P, kind="stable")
    for piece, length in zip(order.tolist(), length_P[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, rows
            rows += 1
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        left = room - length
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
        row_P[piece] = row
    return row_P


def _ranges(count_N: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after the other."""
    ends_N = np.cumsum(count_N)
    return np.arange(ends_N[-1] if len(ends_N) else 0) - np.repeat(ends_N - count_N, count_N)
