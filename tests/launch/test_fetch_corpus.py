import fcntl
import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import unicodedata
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import corpus_text
from launch import fetch_corpus as fc

PROSE = "The whale swam on under the evening sky while the crew looked over the rail. " * 4


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


# --- extractors


def test_html_keeps_the_readable_text_only():
    page = """<html><head><title>T</title><style>p {x: y}</style></head><body>
    <div class="navheader"><div>Prev</div> Next</div>
    <h2>SELECT</h2><p>Reads
    rows &amp; columns<a class="copiable-anchor" href="#x">&para;</a>, a <code>query</code>.</p>
    <ul class="toc"><li>Contents <ul><li>1</li></ul></li></ul>
    <table><tr><td>int</td><td>4 bytes</td></tr><tr><td>text</td><td>any</td></tr></table>
    <pre>SELECT  1
  FROM t;</pre><br><img class="toc" src="x.png">After.
    <script>if (a < b) { x() }</script><div class="navfooter">Up</div></body></html>"""
    assert corpus_text.normalise(corpus_text.strip_markup(page)) == (
        "SELECT\n\nReads rows & columns , a query.\n\nint\t4 bytes\n\ntext\tany\n\nSELECT  1\n  FROM t;\n\nAfter."
    )


def test_markup_left_open_is_read_to_the_end():
    assert (
        corpus_text.normalise(corpus_text.strip_markup("</p></div><p>one<p>two <b>three &lt; four"))
        == "one\n\ntwo three < four"
    )
    assert corpus_text.strip_markup("") == ""


def sword_module(folder: Path, blocks: list[str]) -> None:
    """A zText module by the format's description: zlib blocks, and records of offset, packed size, size."""
    folder.mkdir(parents=True)
    packed = [zlib.compress(block.encode()) for block in blocks]
    records, offset = b"", 0
    for block, data in zip(blocks, packed, strict=True):
        records += struct.pack("<III", offset, len(data), len(block.encode()))
        offset += len(data)
    (folder / "ot.bzs").write_bytes(records)
    (folder / "ot.bzz").write_bytes(b"".join(packed))


def test_sword_module_gives_chapters_without_tags(tmp_path):
    book = (
        '<div sID="gen1" type="book"/><title level="1">Genesis</title><chapter n="1" osisID="Gen.1" sID="Gen.1"/>'
        '<div sID="gen2" type="x-p"/><w lemma="strong:H1">In</w> <w lemma="strong:H2">the beginning</w>,'
        '<note placement="foot"><reference>1:1 </reference>A footnote.</note><w lemma="x">God</w> made “light”.'
        '<chapter eID="Gen.1"/><chapter n="2" osisID="Gen.2" sID="Gen.2"/><lg><l level="1">first line</l>'
        '<l sID="a"/>second line<l eID="a"/></lg><chapter eID="Gen.2"/>'
    )
    sword_module(tmp_path / "modules/web", [book, "<w>Without</w> chapters"])
    texts = {path: corpus_text.normalise(text) for path, text in corpus_text.sword_chapters(tmp_path)}
    assert texts == {
        "modules/web/ot.bzz#Gen.1": "Genesis\n\nIn the beginning, God made “light”.",
        "modules/web/ot.bzz#Gen.2": "first line\n\nsecond line",
        "modules/web/ot.bzz#1": "Without chapters",
    }


def test_markdown_loses_links_and_navigation(tmp_path):
    text = '# Title\n\n##\n\nSee [the next\nsection](b.md "B") and **this** [1].\n\n'
    footer = '[‹ A.0](a.md "Go to previous page")\n[up](u.md "Go to parent page")\n'
    write(tmp_path, "doc/markdown/secA1.md.gz", text + footer)
    write(tmp_path, "doc/markdown/links.md", "links")
    extract = corpus_text.files(r"/markdown/\w+\.md(\.gz)?", corpus_text.strip_markdown, without=r"/links\.md")
    (document,) = extract(tmp_path)
    assert document[0] == "doc/markdown/secA1.md.gz"
    assert corpus_text.normalise(document[1]) == "# Title\n\nSee the next\nsection and **this** [1]."


def test_rst_loses_comments_targets_and_contents():
    text = """.. SPDX-License-Identifier: GPL-2.0

.. _label: https://example.org
.. _other:

=====
Title
=====

.. toctree::
   :maxdepth: 1

   first
   second

Text.
  .. index:: single: word
     pair: a; b
  After the index.

..

   A quotation, not a comment.

.. This is a comment
   on two lines

      and a third.
.. note:: A note
   with a body.
.. |copy| replace:: c
.. [1] a footnote
"""
    kept = corpus_text.normalise(corpus_text.strip_rst(text))
    assert kept == (
        "=====\nTitle\n=====\n\nText.\n\n  After the index.\n\n   A quotation, not a comment.\n\n"
        ".. note:: A note\n   with a body.\n.. |copy| replace:: c\n.. [1] a footnote"
    )


def test_files_reads_latin1_and_follows_no_links(tmp_path):
    write(tmp_path, "a/x.txt", "plain")
    (tmp_path / "a/y.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a/z.txt").symlink_to(tmp_path / "a/x.txt")
    assert list(corpus_text.files(r".*\.txt", str)(tmp_path)) == [("a/x.txt", "plain"), ("a/y.txt", "café")]


KEPT_AND_NOT = {
    "political_speech": (["package/data/1790_a.txt"], ["package/data/1790_a.json", "package/README.md"]),
    "fiction": (["package/data/chapter_1.txt", "package/data/epilogue.txt"], ["package/data/data.txt"]),
    "political_theory": (["doc/markdown/secA1.md.gz"], ["doc/markdown/secAcon.md", "doc/html/secA1.html"]),
    "kernel": (
        ["usr/Documentation/mm/slub.rst.gz", "usr/Documentation/x.txt"],
        [
            "usr/Documentation/translations/it/a.rst.gz",
            "usr/Documentation/a.yaml.gz",
            "usr/html/_sources/a.rst.txt",
        ],
    ),
    "programming": (["usr/html/_sources/library/os.rst.txt"], ["usr/html/_sources/contents.rst.txt"]),
    "sql": (["usr/html/sql-select.html"], ["usr/html/bookindex.html", "usr/html/index.html"]),
    "mathematics": (["usr/html/maxima_12.html"], ["usr/html/maxima_singlepage.html", "usr/html/maxima_toc.html"]),
}


@pytest.mark.parametrize("domain", [d for d in fc.DOMAINS if d.name != "religion"], ids=lambda d: d.name)
def test_each_domain_takes_the_right_files(domain, tmp_path):
    kept, others = KEPT_AND_NOT[domain.name]
    for name in kept + others:
        write(tmp_path, name, PROSE)
    assert [name for name, _ in domain.extract(tmp_path)] == sorted(kept)


def test_table_is_sound():
    names = [domain.name for domain in fc.DOMAINS]
    assert len(set(names)) == 8
    assert all(domain.packages and domain.licence for domain in fc.DOMAINS)
    # about 73 million characters when the table was made
    assert sum(d.characters[0] for d in fc.DOMAINS) < 73e6 < sum(d.characters[1] for d in fc.DOMAINS)


# --- text to JSONL


def test_normalise():
    normalise = corpus_text.normalise
    assert normalise("\ufeffe\u0301\x0c\x00 a\xa0b \t\r\nc\r\r\n\n\n\n d\u2028e\xad\n") == "é a b\nc\n\n d\ne"
    assert normalise("\n\n    indented\n") == "    indented"


@settings(deadline=None)
@given(st.text())
def test_normalise_is_stable_and_clean(text):
    once = corpus_text.normalise(text)
    assert corpus_text.normalise(once) == once
    assert "\n\n\n" not in once and unicodedata.is_normalized("NFC", once)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in once)


def test_write_documents_counts_and_hashes(tmp_path):
    documents = [("a", PROSE), ("b", "short"), ("c", PROSE + "\r\n\n"), ("d", PROSE + "end “é”\u2028x")]
    path = tmp_path / "x.jsonl"
    counts = fc.write_documents(iter(documents), "fiction", path)
    lines = path.read_text().split("\n")
    assert lines.pop() == ""
    rows = [json.loads(line) for line in lines]
    assert rows[0] == {"text": PROSE.strip(), "source": "fiction", "path": "a"}
    assert [row["path"] for row in rows] == ["a", "d"]
    assert counts == {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "documents": 2,
        "characters": sum(len(row["text"]) for row in rows),
        "bytes": path.stat().st_size,
        "duplicates_dropped": 1,
        "short_dropped": 1,
    }


# --- packages and the whole, with stand-ins for the package clients


class Clients:
    """Stands in for apt-get, apt-cache, dpkg-deb, npm and tar: `offered` holds package -> version."""

    def __init__(self) -> None:
        self.offered = {"alpha-doc-7": "7.2-1", "@x/beta@1.0": "1.0"}
        self.after_update: dict[str, str] = {}
        self.downloads: list[str] = []
        self.updates = 0
        self.text = PROSE

    def run_tool(self, *command: str, cwd: Path | None = None) -> str:
        match command:
            case ("apt-cache", "pkgnames", prefix):
                return "\n".join(name for name in self.offered if name.startswith(prefix))
            case ("apt-cache", "policy", name):
                return f"{name}:\n  Installed: (none)\n  Candidate: {self.offered.get(name, '(none)')}\n"
            case ("apt-get", "-q", "update"):
                self.updates += 1
                self.offered |= self.after_update
                return ""
            case ("apt-get", *_, "download", name) | ("npm", *_, name):
                self.downloads.append(name)
                if name not in self.offered:
                    raise fc.DownloadError(f"{name}: connection refused")
                suffix = "deb" if command[0] == "apt-get" else "tgz"
                (cwd / f"package.{suffix}").write_text(f"{name} {self.offered[name]}")
                return ""
            case ("dpkg-deb", "-x", archive, root):
                name, version = Path(archive).read_text().split()
                write(Path(root), "usr/share/page.txt", f"{name} {version} {self.text}")
                return ""
            case ("dpkg-deb", "-f", archive, "Version"):
                return Path(archive).read_text().split()[1] + "\n"
            case ("tar", "-xzf", archive, "-C", root):
                name, version = Path(archive).read_text().split()
                about = {"name": name.rsplit("@", 1)[0] if name[1:].count("@") else name, "version": version}
                write(Path(root), "package/package.json", json.dumps(about))
                write(Path(root), "package/page.txt", f"{name} {self.text}")
                return ""
        raise AssertionError(command)


ALPHA = fc.Domain(
    name="alpha",
    ecosystem="deb",
    packages=("alpha-doc-7", "alpha-doc-[0-9]*", "alpha-doc"),
    licence="MIT",
    extract=corpus_text.files(r"page\.txt", str),
    characters=(200, 10_000),
)
BETA = replace(ALPHA, name="beta", ecosystem="npm", packages=("@x/beta@1.0", "@x/beta"))


@pytest.fixture
def clients(monkeypatch):
    clients = Clients()
    monkeypatch.setattr(fc, "run_tool", clients.run_tool)
    monkeypatch.setattr(fc, "DOMAINS", (ALPHA, BETA))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return clients


def fetch(directory, domains=None):
    return fc.fetch_corpus(directory, domains, progress=lambda line: None)


def test_manifest_says_what_came_from_where(clients, tmp_path):
    lines = []
    manifest = fc.fetch_corpus(tmp_path / "new/corpus", progress=lines.append)
    folder = tmp_path / "new/corpus"
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert list(manifest["domains"]) == ["alpha", "beta"]
    alpha = manifest["domains"]["alpha"]
    data = (folder / "alpha.jsonl").read_bytes()
    assert (alpha["package"], alpha["version"], alpha["licence"]) == ("alpha-doc-7", "7.2-1", "MIT")
    assert alpha["sha256"] == hashlib.sha256(data).hexdigest() and alpha["bytes"] == len(data)
    assert alpha["archive_sha256"] == hashlib.sha256(b"alpha-doc-7 7.2-1").hexdigest()
    assert alpha["characters"] == len(json.loads(data)["text"])
    assert (manifest["domains"]["beta"]["package"], manifest["domains"]["beta"]["version"]) == ("@x/beta", "1.0")
    assert manifest["characters"] == sum(e["characters"] for e in manifest["domains"].values())
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "alpha.jsonl", "beta.jsonl", "manifest.json"]
    assert any(line.startswith("alpha: 1 documents") for line in lines)


def test_what_is_whole_is_not_fetched_again(clients, tmp_path):
    first = fetch(tmp_path, "alpha")
    assert list(first["domains"]) == ["alpha"]
    both = fetch(tmp_path)
    assert clients.downloads == ["alpha-doc-7", "@x/beta@1.0"]
    assert fetch(tmp_path, ["beta"]) == both
    assert len(clients.downloads) == 2


@pytest.mark.parametrize("damage", ["edit", "truncate", "delete", "manifest", "entry", "older extraction"])
def test_what_is_damaged_is_made_again(clients, tmp_path, damage, monkeypatch):
    before = fetch(tmp_path)
    path, manifest = tmp_path / "alpha.jsonl", tmp_path / "manifest.json"
    if damage == "edit":
        path.write_text(path.read_text().replace("whale", "shark"))
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "delete":
        path.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "entry":
        content = json.loads(manifest.read_text())
        del content["domains"]["alpha"]["sha256"]
        manifest.write_text(json.dumps(content))
    else:
        monkeypatch.setattr(fc, "EXTRACTION", fc.EXTRACTION + 1)
    clients.downloads.clear()
    after = fetch(tmp_path, "alpha")
    assert clients.downloads == ["alpha-doc-7"]
    assert after["domains"]["alpha"]["sha256"] == before["domains"]["alpha"]["sha256"]
    fetch(tmp_path)
    assert ("@x/beta@1.0" in clients.downloads) == (damage in ("manifest", "older extraction"))


def test_leftovers_of_a_killed_run_are_cleared(clients, tmp_path):
    write(tmp_path, ".fetch-abc/root/big.txt", "x")
    (tmp_path / "alpha.jsonl.partial").write_text("half a li")
    (tmp_path / "alpha.jsonl").write_text("whole, but the manifest was not written yet\n")
    manifest = fetch(tmp_path, "alpha")
    assert fc.is_whole(manifest["domains"]["alpha"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "alpha.jsonl", "manifest.json"]


def test_one_failure_does_not_lose_the_others(clients, tmp_path):
    clients.offered.pop("alpha-doc-7")
    with pytest.raises(
        fc.FetchError, match=r"1 of 2 domains .* alpha \(apt knows no package alpha-doc-7 or"
    ) as error:
        fetch(tmp_path)
    assert "run the same again" in str(error.value) and "\n" not in str(error.value)
    assert clients.updates == 1
    assert list(json.loads((tmp_path / "manifest.json").read_text())["domains"]) == ["beta"]
    clients.offered["alpha-doc-7"] = "7.3"
    assert list(fetch(tmp_path)["domains"]) == ["alpha", "beta"]
    assert clients.downloads == ["@x/beta@1.0", "alpha-doc-7"]


def test_old_package_lists_are_renewed_once(clients, tmp_path):
    clients.offered, clients.after_update = {"@x/beta@1.0": "1.0"}, {"alpha-doc-9": "9.0"}
    assert fetch(tmp_path)["domains"]["alpha"]["version"] == "9.0"
    assert clients.updates == 1


def test_without_root_the_error_says_what_to_run(clients, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    clients.offered.pop("alpha-doc-7")
    with pytest.raises(fc.FetchError, match="sudo apt-get update"):
        fetch(tmp_path)
    assert clients.updates == 0


def test_an_update_that_fails_is_reported(clients, tmp_path, monkeypatch):
    def no_update(*command, cwd=None):
        if command == ("apt-get", "-q", "update"):
            raise fc.DownloadError("no network")
        return clients.run_tool(*command, cwd=cwd)

    monkeypatch.setattr(fc, "run_tool", no_update)
    clients.offered.pop("alpha-doc-7")
    lines = []
    with pytest.raises(fc.FetchError, match="check the network and run the same again"):
        fc.fetch_corpus(tmp_path, "alpha", lines.append)
    assert "no network" in lines


def test_debian_names_fall_back_to_the_newest_version(clients):
    assert fc.debian_package(ALPHA.packages) == "alpha-doc-7"
    clients.offered = {"alpha-doc-9": "1", "alpha-doc-10": "1", "alpha-doc-de": "1", "alpha-doc": "1"}
    assert fc.debian_package(ALPHA.packages) == "alpha-doc-10"
    clients.offered = {"alpha-doc": "1"}
    assert fc.debian_package(ALPHA.packages) == "alpha-doc"


def test_npm_names_fall_back(clients, tmp_path):
    clients.offered = {"@x/beta": "2.0"}
    assert fetch(tmp_path, "beta")["domains"]["beta"]["version"] == "2.0"
    clients.offered = {}
    with pytest.raises(fc.FetchError, match="connection refused"):
        fetch(tmp_path / "other", "beta")


def test_a_changed_layout_is_refused_and_the_old_file_kept(clients, tmp_path):
    fetch(tmp_path, "alpha")
    whole = (tmp_path / "alpha.jsonl").read_bytes()
    clients.text = PROSE * 100
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        fc.FetchError, match=r"alpha-doc-7 7.2-1 gave 3.,\d+ characters in 1 documents where 200 to"
    ):
        fetch(tmp_path, "alpha")
    assert (tmp_path / "alpha.jsonl").read_bytes() == whole
    assert clients.updates == 0


def test_a_damaged_package_does_not_stop_the_others(clients, tmp_path, monkeypatch):
    broken = replace(ALPHA, extract=lambda root: iter([("x", zlib.decompress(b"no zlib").decode())]))
    monkeypatch.setattr(fc, "DOMAINS", (broken, BETA))
    with pytest.raises(fc.FetchError, match=r"alpha \(Error -3"):
        fetch(tmp_path)
    assert (tmp_path / "beta.jsonl").exists() and not (tmp_path / "alpha.jsonl").exists()


@pytest.mark.parametrize(
    ("domains", "message"),
    [("alpha,betta", "'betta', which is no domain: did you mean beta"), (["zzz"], "choose from alpha, beta")],
)
def test_unknown_domain(clients, tmp_path, domains, message):
    with pytest.raises(ValueError, match=message):
        fetch(tmp_path / "x", domains)
    assert not (tmp_path / "x").exists()


def test_no_domain_at_all(clients, tmp_path):
    with pytest.raises(ValueError, match="domains is empty"):
        fetch(tmp_path, [])


def test_a_folder_in_use_is_refused(clients, tmp_path):
    with open(tmp_path / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(fc.FetchError, match="in use by another fetch"):
            fetch(tmp_path)
    fetch(tmp_path)


def test_a_file_for_a_folder_and_a_full_disk_are_refused(clients, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(fc.FetchError, match="file cannot be made .*: give another folder"):
        fetch(tmp_path / "file")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(fc.FetchError, match="1,000 bytes free, 600,000,000 are needed"):
        fetch(tmp_path)
    assert clients.downloads == []


def test_run_tool_reports_missing_failing_and_hanging_commands(tmp_path, monkeypatch):
    assert fc.run_tool("sh", "-c", "pwd", cwd=tmp_path).strip() == str(tmp_path.resolve())
    with pytest.raises(fc.FetchError, match="no-such-client is not on PATH: install it"):
        fc.run_tool("no-such-client", "download")
    with pytest.raises(fc.DownloadError, match="failed: E: Could not resolve$"):
        fc.run_tool("sh", "-c", "echo 'W: x' >&2; echo 'E: Could not resolve' >&2; echo done >&2; exit 100")
    npm = "npm ERR! code ECONNREFUSED\nnpm ERR! A complete log of this run can be found in: x"
    with pytest.raises(fc.DownloadError, match="failed: npm ERR! code ECONNREFUSED$"):
        fc.run_tool("sh", "-c", f"echo '{npm}' >&2; exit 1")
    with pytest.raises(fc.DownloadError, match="failed: last word$"):
        fc.run_tool("sh", "-c", "echo last word >&2; exit 1")
    with pytest.raises(fc.DownloadError, match="exit status 3"):
        fc.run_tool("sh", "-c", "exit 3")
    monkeypatch.setattr(fc, "TIMEOUT_SECONDS", 0.05)
    with pytest.raises(fc.DownloadError, match="gave no answer in 0.05 s"):
        fc.run_tool("sleep", "5")


def test_command_line_prints_one_line_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "launch.fetch_corpus", str(tmp_path), "--domains", "kernal"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(fc.__file__).parents[1])
    assert result.returncode == 2
    assert result.stderr.strip() == "domains holds 'kernal', which is no domain: did you mean kernel?"


@pytest.mark.slow
def test_real_download(tmp_path):
    for client in ("apt-get", "apt-cache", "dpkg-deb", "npm"):
        if shutil.which(client) is None:
            pytest.skip(f"{client} is not on PATH: the real download needs Debian's and npm's package clients")
    manifest = fc.fetch_corpus(tmp_path)  # refuses a domain outside its range
    assert list(manifest["domains"]) == [domain.name for domain in fc.DOMAINS]
    assert 60e6 < manifest["characters"] < 100e6
    for name, entry in manifest["domains"].items():
        rows = [json.loads(line) for line in open(tmp_path / entry["file"], encoding="utf-8")]
        assert len(rows) == entry["documents"] >= 100
        assert {row["source"] for row in rows} == {name}
        assert min(len(row["text"]) for row in rows) >= fc.MINIMUM_CHARACTERS
        assert len({row["text"] for row in rows}) == len(rows)
