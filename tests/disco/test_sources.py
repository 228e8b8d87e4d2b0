"""Sources: what is read, in which order, and what is refused before anything is read."""

import gzip
import json
import os
import socket

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco import sources
from disco.config import ConfigError, Corpus, Source
from disco.sources import check_sources, documents, local_bytes, local_files, passages, read_text


def source(name="s", **keys) -> Source:
    return Source(name=name, **keys)


def corpus(*given: Source) -> Corpus:
    return Corpus(sources=list(given))


def texts(given: Source) -> list[str]:
    return [text for _, text in documents(given)]


# passages


@settings(deadline=None)
@given(st.text(alphabet="ab .\n\r", max_size=200), st.integers(1, 40), st.lists(st.integers(1, 30), max_size=20))
def test_passages_join_to_the_text_and_ignore_how_it_was_read(text, size, blocks):
    cut = list(passages([text], size))
    assert "".join(cut) == text
    assert all(0 < len(passage) <= size for passage in cut)
    assert all(2 * len(passage) > size or passage is cut[-1] for passage in cut)
    parts, start = [], 0
    for length in blocks:
        parts.append(text[start : start + length])
        start += length
    assert list(passages([*parts, text[start:]], size)) == cut


@pytest.mark.parametrize(
    "text, first",
    [
        ("one two three\n\n four. five six", "one two three\n\n"),
        ("one two three. four\nfive six", "one two three. four\n"),
        ("one two three. four five six", "one two three. "),
        ("one two three four five six", "one two three four "),
        ("onetwothreefourfivesix", "onetwothreefourfives"),
        ("one two\r\n\r\nthree four\nfive six", "one two\r\n\r\n"),
    ],
)
def test_passages_end_at_the_best_place(text, first):
    assert next(passages([text], 20 if "\r" not in text else 18)) == first


# reading


@settings(deadline=None, max_examples=200)
@given(
    data=st.lists(
        st.sampled_from([b"a", b"\n", "é".encode(), "語".encode(), b"\xf0\x9f\x98\x80", b"\xff", b"\xe8"])
    )
)
def test_bytes_that_are_not_utf8_are_named_as_python_names_them(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "x"
    data = b"".join(data)
    path.write_bytes(data)
    block, sources.BLOCK = sources.BLOCK, 3
    try:
        expected = data.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(ConfigError) as raised:
            list(read_text(path))
        assert f"{path}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x})" in str(raised.value)
    else:
        assert "".join(read_text(path)) == expected
    finally:
        sources.BLOCK = block


def test_text_is_kept_as_it_is_but_for_a_byte_order_mark(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\x00two\r\nthree \xef\xbb\xbf")
    assert "".join(read_text(path)) == "one\x00two\r\nthree \ufeff"


def test_a_file_that_goes_away_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone.txt: cannot be read .*No such file"):
        list(read_text(tmp_path / "gone.txt"))


# files


@pytest.fixture
def tree(tmp_path):
    for name in ("b.md", "a.md", "sub/c.md", "sub/deep/d.md", "sub/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    return tmp_path


def test_globs_are_sorted_and_overlap_once(tree):
    given = source(files=["sub/**/*.md", "**/*.md", "*.md", "sub/*"], root=str(tree))
    names = [str(path.relative_to(tree)) for path in local_files(given)]
    assert names == ["a.md", "b.md", "sub/c.md", "sub/deep/d.md", "sub/x.txt"]
    assert texts(given) == [f"text of {name}" for name in names]
    assert local_bytes(given) == sum(len(text) for text in texts(given))
    assert local_bytes(source(files=["*.md"], root=str(tree), max_bytes=7)) == 7


def test_relative_absolute_and_home_globs(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert len(local_files(source(files=["*.md"]))) == 2
    assert len(local_files(source(files=[f"{tree}/sub/*.md"]))) == 1
    monkeypatch.setenv("HOME", str(tree))
    assert len(local_files(source(files=["~/sub/*.md"]))) == 1
    assert len(local_files(source(files=["*.md"], root="~/sub"))) == 1


def test_package_files_are_found_without_importing_it(monkeypatch):
    topics = source(files=["topics.py"], package="pydoc_data", passage_chars=1500)
    assert [path.name for path in local_files(topics)] == ["topics.py"]
    assert len(texts(topics)) > 200
    (single,) = local_files(source(files=["this.py"], package="this"))  # a module that is a file
    assert single.name == "this.py"
    assert local_files(source(files=["*.py"], package="xml", root="dom"))[0].parent.name == "dom"


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"files": ["*.rst"]}, r"'\*\.rst' matches no file under .*check the glob"),
        ({"files": ["*.md", "*.rst"]}, r"'\*\.rst' matches no file"),
        ({"jsonl": ["*.jsonl"]}, r"'\*\.jsonl' matches no file"),
        ({"files": ["sub"]}, "'sub' matches no file"),  # a folder
        ({"files": ["*.py"], "package": "no_such_package"}, "package 'no_such_package' is not installed"),
        ({"files": ["*.py"], "package": "no_such.package"}, "package 'no_such.package' is not installed"),
        ({"files": ["*.py"], "package": ""}, "package '' is not installed"),
        ({"files": ["*.py"], "package": "."}, "package '.' is not installed"),
        ({"files": ["*.py"], "package": "sys"}, "built in"),
        ({"files": ["*.md"], "root": "nowhere"}, "root nowhere is no folder"),
    ],
)
def test_what_matches_nothing_is_refused(tree, monkeypatch, keys, message):
    monkeypatch.chdir(tree)
    with pytest.raises(ConfigError, match=f"source 's': .*{message}"):
        check_sources(corpus(source(**keys)))


def test_all_globs_are_checked_before_any_file_is_read(tree, monkeypatch):
    (tree / "bad.jsonl").write_text("no json")
    monkeypatch.chdir(tree)
    with pytest.raises(ConfigError, match="source 'second': '.*rst' matches no file"):
        check_sources(corpus(source("first", jsonl=["bad.jsonl"]), source("second", files=["*.rst"])))


def test_broken_links_unreadable_and_empty_files_are_refused(tree, monkeypatch):
    (tree / "link.md").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link.md is a broken link"):
        check_sources(corpus(source(files=["*.md"], root=str(tree))))
    (tree / "link.md").unlink()
    for name in ("a.md", "b.md"):
        (tree / name).write_text("")
    with pytest.raises(ConfigError, match="all 2 matched files are empty"):
        check_sources(corpus(source(files=["*.md"], root=str(tree))))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("x.txt"))
    with pytest.raises(ConfigError, match="x.txt cannot be read: check its permissions"):
        check_sources(corpus(source(files=["sub/x.txt"], root=str(tree))))


# rows

DOCUMENTS = ["one", 'two\nlines, a "quote"', "é 語 😀", "NA", "5", "", "<|endoftext|>"]


def write_rows(folder, texts=DOCUMENTS, column="text"):
    lines = [json.dumps({"n": n, column: text}, ensure_ascii=False) for n, text in enumerate(texts)]
    (folder / "x.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(folder / "x.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    (folder / "x.csv").write_text(f"n,{column}\n" + "".join(f"{n},{text}\n" for n, text in enumerate(quoted)))
    pq.write_table(pa.table({"n": range(len(texts)), column: texts}), folder / "x.parquet")


@pytest.mark.parametrize(
    "kind, name", [("jsonl", "x.jsonl"), ("jsonl", "x.jsonl.gz"), ("csv", "x.csv"), ("parquet", "x.parquet")]
)
def test_rows_of_every_kind(tmp_path, kind, name):
    write_rows(tmp_path, column="body")
    (tmp_path / ("y" + name[1:])).write_bytes(b"")  # an empty file beside others is passed over
    given = source(**{kind: ["?" + name[1:]]}, root=str(tmp_path), column="body")
    check_sources(corpus(given))
    assert texts(given) == DOCUMENTS
    assert [number for number, _ in documents(given)] == list(range(len(DOCUMENTS)))


def test_every_file_is_opened_before_work_starts(tmp_path):
    write_rows(tmp_path)
    (tmp_path / "y.jsonl").write_text('{"n": 1, "body": "a"}\n')
    with pytest.raises(ConfigError, match="y.jsonl: row 1 has no column 'text'"):
        check_sources(corpus(source(jsonl=["*.jsonl"], root=str(tmp_path))))


def test_local_files_need_no_network(tmp_path, monkeypatch):
    import datasets

    tried = []

    def connect(*address):
        tried.append(address)
        raise OSError("no network")

    write_rows(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    given = source(jsonl=["x.jsonl"], root=str(tmp_path))
    check_sources(corpus(given))
    assert texts(given) == DOCUMENTS
    assert not tried


def test_text_is_a_document_a_line(tmp_path):
    (tmp_path / "x.txt").write_text("one\ntwo\n\nfour")
    assert texts(source(text=["x.txt"], root=str(tmp_path), column="ignored")) == ["one", "two", "", "four"]


def test_rows_are_cut_into_passages_that_share_a_number(tmp_path):
    write_rows(tmp_path, ["a " * 30, "b " * 10])
    given = source(jsonl=["x.jsonl"], root=str(tmp_path), passage_chars=20)
    assert [number for number, _ in documents(given)] == [0, 0, 0, 1]


def test_a_hub_data_set_by_name(tmp_path):
    write_rows(tmp_path)
    for name in ("x.jsonl.gz", "x.csv", "x.parquet"):
        (tmp_path / name).unlink()
    given = source(hub=str(tmp_path))  # a folder is opened as a data set of that name is
    check_sources(corpus(given))
    assert texts(given) == DOCUMENTS
    assert (local_files(given), local_bytes(given)) == ([], 0)
    with pytest.raises(ConfigError, match="hub data set .* cannot be read .*check its name, subset, split"):
        check_sources(corpus(source(hub=str(tmp_path), split="nonsense")))


def test_a_hub_that_cannot_be_reached_is_refused(monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="hub data set 'someone/something'.*and the network"):
        check_sources(corpus(source(hub="someone/something")))


def test_bad_rows_are_refused_with_their_place(tmp_path):
    def refused(match, data, kind="jsonl", **keys):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(ConfigError, match=match) as raised:
            check_sources(corpus(source(**{kind: ["bad"]}, root=str(tmp_path), **keys)))
        assert "source 's'" in str(raised.value) or "UTF-8" in str(raised.value)
        assert "\n" not in str(raised.value)

    refused("no column 'body': set column to one of n, text", b'{"n": 1, "text": "a"}\n', column="body")
    refused("no column 'text': set column to one of n, body", b"n,body\n1,a\n", kind="csv")
    refused("'text' holds int in row 1 \\(5\\), not text", b'{"text": 5}\n')
    refused("'text' holds list", b'{"text": ["a"]}\n')
    refused("bad: cannot be read after row 0", b'{"text": "a"}\n{"text": \n')
    refused("bad: cannot be read after row 0 .*surrogate", b'{"text": "a\\ud800b"}\n')
    refused("bad: cannot be read after row 0", b"PAR1 but no parquet PAR1", kind="parquet")
    refused("bad: not UTF-8 at byte 11 \\(0xff\\)", b'{"text": "a\xff"}\n')
    refused("bad: not UTF-8 at byte 5 \\(0xfe\\)", b"good\n\xfe\n", kind="text")
    refused("bad: not UTF-8 at byte 6 \\(0xe9\\)", b"text\na\xe9\n", kind="csv")
    refused("holds no rows", b"n,text\n", kind="csv")


def test_a_compressed_file_that_is_not_utf8_is_named(tmp_path):
    with gzip.open(tmp_path / "x.txt.gz", "wb") as file:
        file.write(b"good\n\xff\n")
    with pytest.raises(ConfigError, match="x.txt.gz: not UTF-8 after row 0"):
        check_sources(corpus(source(text=["x.txt.gz"], root=str(tmp_path))))


def test_a_null_is_an_empty_text_and_a_late_change_of_type_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": 5}\n')
    read = []
    with pytest.raises(ConfigError, match="x.jsonl: column 'text' holds int in row 3"):
        for _, text in documents(source(jsonl=["x.jsonl"], root=str(tmp_path))):
            read.append(text)
    assert read == ["a", ""]
