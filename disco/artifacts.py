"""Stage folders: written as `<stage>.partial`, renamed when whole, each with a manifest of its inputs."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing's own suits pydantic only from Python 3.12 on

MANIFEST = "manifest.json"
MADE_FROM = "made_from"  # in a partial folder: the key of what it is being made from
REBUILD = "rebuild the stage with --force"
SCRATCH = "work"  # in a partial folder: what helps to make the stage and is no part of it
PACKAGES = ("torch", "transformers", "deepspeed", "scikit-learn", "datasets", "tokenizers", "numpy")


class ArtifactError(ValueError):
    """A stage folder that is missing, damaged or made from something else."""


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_hashes(paths: Iterable[Path], cache: Path) -> list[str]:
    """SHA-256 of each file, remembered in `cache` by path, size and time of change."""
    known = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = dict(json.loads(cache.read_text()))
    before, hashes = len(known), []
    for path in paths:
        info = path.stat()
        key = f"{path.absolute()}:{info.st_size}:{info.st_mtime_ns}"
        hashes.append(known.get(key) or known.setdefault(key, file_hash(path)))
    if len(known) > before:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, known)
    return hashes


def write_json(path: Path, value: Any) -> None:
    """Write through a temporary file, so that a reader never sees half."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=False, default=str)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: damaged ({error})") from None


def stage_key(inputs: Mapping[str, str], section: Any, seed: int) -> str:
    """What a stage is made from, in one string: content of its inputs, its configuration, the seed."""
    return fingerprint({"inputs": dict(inputs), "section": section, "seed": seed})


@contextlib.contextmanager
def stage_folder(
    folder: Path, *, stage: str, inputs: Mapping[str, str], section: Any, seed: int, keep_partial: bool = False
) -> Iterator[Path]:
    """Yield `<folder>.partial` to write into; seal it and rename it to `folder` when the block ends well.

    `inputs` maps names to fingerprints of what the stage reads, `section` is the JSON-able configuration that
    it depends on. With `keep_partial` an earlier partial folder made from the same inputs and section is
    continued (training checkpoints live in its SCRATCH); otherwise it starts empty.
    """
    partial = partial_of(folder)
    key = stage_key(inputs, section, seed)
    if partial.exists() and not (keep_partial and made_from(partial, key)):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    remake_from(partial, key)
    started = time.time()
    yield partial
    files = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(partial.rglob("*"))
        if path.is_file() and path.relative_to(partial).parts[0] not in (MANIFEST, MADE_FROM, SCRATCH)
    }
    manifest = {
        "stage": stage,
        "inputs": dict(inputs),
        "section": section,
        "seed": seed,
        "key": key,
        "fingerprint": fingerprint({name: entry["sha256"] for name, entry in files.items()}),
        "files": files,
        "packages": package_versions(),
        "finished_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": started,
        "finished": time.time(),
    }
    write_json(partial / MANIFEST, manifest)
    finish(folder, key)


def made_from(partial: Path, key: str) -> bool:
    """Whether an unfinished stage folder was begun from `key`."""
    note = partial / MADE_FROM
    return note.exists() and note.read_text().strip() == key


def remake_from(partial: Path, key: str) -> None:
    """Note that an unfinished stage folder is made from `key`."""
    note = partial / f"{MADE_FROM}.partial"
    note.write_text(key)
    os.replace(note, partial / MADE_FROM)


def finish(folder: Path, key: str) -> bool:
    """Rename a partial folder that is whole and made from `key`; False if there is none.

    A process that was killed after the manifest was written left such a folder.
    """
    partial = partial_of(folder)
    if not (partial / MANIFEST).exists() or manifest(partial)["key"] != key:
        return False
    shutil.rmtree(partial / SCRATCH, ignore_errors=True)
    (partial / MADE_FROM).unlink(missing_ok=True)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
    return True


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class Entry(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    stage: str
    inputs: dict[str, str]
    section: Any
    seed: int
    key: str
    fingerprint: str
    files: dict[str, Entry]
    packages: dict[str, str]
    finished_at: str
    started: float
    finished: float


def manifest(folder: Path) -> Manifest:
    """The manifest of a finished stage. Raises ArtifactError where it is missing or damaged."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such stage folder: run the stage first")
    try:
        return TypeAdapter(Manifest).validate_python(read_json(folder / MANIFEST))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ArtifactError(f"{folder / MANIFEST}: damaged at '{place}': {REBUILD}") from None
    except ArtifactError as error:
        raise ArtifactError(f"{error}: {REBUILD}") from None


def content(folder: Path) -> str:
    """Fingerprint of a finished stage's content."""
    return manifest(folder)["fingerprint"]


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Check every file of a finished stage against its manifest.

    Raises ArtifactError naming the file. Without `hashes` only presence and size are compared.
    """
    recorded = manifest(folder)
    listed = {name: entry["sha256"] for name, entry in recorded["files"].items()}
    remedy = f"rebuild it with --force {recorded['stage']}"
    if fingerprint(listed) != recorded["fingerprint"]:
        raise ArtifactError(f"{folder / MANIFEST}: edited since it was written: {remedy}")
    for name, entry in recorded["files"].items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{path}: missing from a finished stage: {remedy}")
        if path.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes, {entry['bytes']} expected: {remedy}")
        if hashes and file_hash(path) != entry["sha256"]:
            raise ArtifactError(f"{path}: content differs from its manifest: {remedy}")


@contextlib.contextmanager
def lock(folder: Path, *, shared: bool = False, name: str = ".lock") -> Iterator[None]:
    """Hold a run folder for this process; the kernel lets go when the process ends, however it ends.

    Processes that make one submodel each hold it `shared`, and each a lock of its own, `name`.
    """
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")
    except OSError as error:
        raise ArtifactError(f"run folder {folder}: {error.strerror}: set runs= to a folder you can write") from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            file.seek(0)
            holder = file.read().strip() or "unknown"
            place = path.parent if path.name == ".lock" else path.with_suffix("")
            raise ArtifactError(f"{place}: another disco process ({holder}) works here: wait for it") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def need_disk(folder: Path, needed: int, what: str) -> None:
    """Raise ArtifactError unless `needed` bytes are free where `folder` will be."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ArtifactError(
            f"{place}: {free / 1e9:.2f} GB free, {what} needs about {needed / 1e9:.2f} GB: "
            "free some space or set runs="
        )
