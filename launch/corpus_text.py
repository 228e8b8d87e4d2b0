"""Packages to documents: readable text out of reStructuredText, Markdown, HTML and SWORD modules."""

from __future__ import annotations

import gzip
import os
import re
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

Documents = Iterator[tuple[str, str]]  # path inside the package, raw text


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it ends in .gz; Latin-1 where it is not UTF-8."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def files(keep: str, clean: Callable[[str], str], without: str = r"(?!)") -> Callable[[Path], Documents]:
    """An extractor: the files whose path inside the package ends in the pattern `keep` and holds no `without`."""

    def extract(root: Path) -> Documents:
        for path in sorted(tree_files(root)):
            name = path.relative_to(root).as_posix()
            if re.search(rf"{keep}$", name) and not re.search(without, name):
                yield name, clean(read_text(path))

    return extract


def tree_files(root: Path) -> Iterator[Path]:
    """The regular files under `root`; links are not followed, since packages link one folder under two names."""
    for folder, _, names in os.walk(root):
        yield from (path for name in names if not (path := Path(folder, name)).is_symlink())


def strip_markdown(text: str) -> str:
    """Links become their text; paragraphs that lead to the previous, next or parent page go."""
    paragraphs = re.split(r"\n\s*\n", text)
    text = "\n\n".join(p for p in paragraphs if not re.search(r'"Go to (previous|next|parent) page"', p))
    text = re.sub(r"(?m)^#+\s*$", "", text)
    return re.sub(r"!?\[([^\][]*)\]\([^()\s]+(?:\s+\"[^\"]*\")?\)", r"\1", text)


_RST_HIDDEN = re.compile(
    r"\s*\.\.(\s+((toctree|index|moduleauthor|sectionauthor|currentmodule|include|highlight|kernel-doc|only|raw|"
    r"tabularcolumns|cssclass|c:namespace)::.*|(?!\S+.*::|_|\[|\|).*))?$",
    re.IGNORECASE,
)
_RST_TARGET = re.compile(r"\s*\.\.\s+_.+:")


def strip_rst(text: str) -> str:
    """reStructuredText less what a reader of the page never sees: comments (where licences stand), targets,
    tables of contents, index entries. Other directives, with their bodies, and inline marks stay."""
    kept: list[str] = []
    hidden_above: int | None = None  # indentation of the hidden block we are in
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        expanded = line.expandtabs()
        indent = len(expanded) - len(expanded.lstrip())
        if hidden_above is not None and (not line.strip() or indent > hidden_above):
            continue
        if hidden_above is not None and not _RST_HIDDEN.match(line):
            kept.append("")  # the hidden block was a paragraph break
        hidden_above = None
        if _RST_HIDDEN.match(line):
            # a bare ".." before a blank line hides nothing but itself
            hidden_above = indent if line.strip() != ".." or following.strip() else None
        elif not _RST_TARGET.match(line):
            kept.append(line)
    return "\n".join(kept)


_SKIPPED_TAGS = {"head", "script", "style", "note"}  # note: an OSIS footnote in the middle of a verse
_SKIPPED_CLASSES = {
    *("navheader", "navfooter", "toc", "header", "nav-panel", "section-toc", "mini-toc", "categorybox"),
    *("copiable-anchor", "copiable-link", "summary-letter", "contents", "legalnotice"),
}
_VOID_TAGS = {"br", "hr", "img", "meta", "link", "col", "input", "wbr", "lb", "milestone"}
_PARAGRAPH_TAGS = {
    *("p", "div", "pre", "table", "ul", "ol", "dl", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("title", "lg", "list"),
}
_LINE_TAGS = {"br", "hr", "tr", "li", "dt", "dd", "l", "lb", "item", "speaker"}


class _TextOfMarkup(HTMLParser):
    """The readable text of HTML or OSIS XML: tags out, paragraphs apart, <pre> kept as it stands."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.skipped_tag, self.skip_depth, self.pre_depth = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip_depth:
            self.skip_depth += tag == self.skipped_tag
        elif tag not in _VOID_TAGS and (
            tag in _SKIPPED_TAGS or not _SKIPPED_CLASSES.isdisjoint((dict(attrs).get("class") or "").split())
        ):
            self.handle_data(" ")
            self.skipped_tag, self.skip_depth = tag, 1
        else:
            self.pre_depth += tag == "pre"
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skip_depth:
            self.skip_depth -= tag == self.skipped_tag
        else:
            self._break(tag)
            self.pre_depth = max(0, self.pre_depth - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self.skip_depth:
            if not self.pre_depth:
                data = re.sub(r"\s+", " ", data)
                data = data.lstrip() if self.pieces and self.pieces[-1][-1].isspace() else data
            if data:
                self.pieces.append(data)

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPH_TAGS:
            self.pieces.append("\n\n")
        elif tag in _LINE_TAGS:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append("\t")


def strip_markup(text: str) -> str:
    """The readable text of an HTML page or a piece of OSIS XML, without navigation and footnotes."""
    parser = _TextOfMarkup()
    parser.feed(text)
    parser.close()
    lines = "".join(parser.pieces).split("\n")
    return "\n".join(re.sub(r"[ \t]*\t[ \t]*", "\t", line.rstrip()).lstrip("\t") for line in lines)


def sword_chapters(root: Path) -> Documents:
    """The chapters of a compressed SWORD text module (driver zText, OSIS markup).

    `<testament>.bzz` holds zlib blocks one after the other; `<testament>.bzs` says where, in records of three
    little-endian 32-bit numbers: offset, compressed size, size. A block holds a book or a part of one, and
    `<chapter sID="Gen.1"/>` opens each chapter; what stands before the first (title, preface) goes with it.
    """
    for index in sorted(path for path in tree_files(root) if path.suffix == ".bzs"):
        name = index.with_suffix(".bzz").relative_to(root).as_posix()
        compressed = index.with_suffix(".bzz").read_bytes()
        for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", index.read_bytes())):
            osis = zlib.decompress(compressed[offset : offset + size]).decode("utf-8")
            opening, *rest = re.split(r'(<chapter\b[^>]*\bsID="[^"]*"[^>]*>)', osis)
            chapters = [mark + body for mark, body in zip(rest[::2], rest[1::2], strict=True)]
            if not chapters:
                yield f"{name}#{number}", strip_markup(opening)
            for position, chapter in enumerate(chapters):
                label = re.search(r'\bsID="([^"]*)"', chapter)[1]
                yield f"{name}#{label}", strip_markup(chapter if position else opening + chapter)


def normalise(text: str) -> str:
    """NFC, plain line ends and spaces, no control or invisible characters, at most one empty line in a row."""
    text = unicodedata.normalize("NFC", re.sub("\r\n?|[\x85\u2028\u2029]", "\n", text))
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\ufeff]", "", text).replace("\xa0", " ")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n").rstrip()
