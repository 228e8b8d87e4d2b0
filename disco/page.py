"""A report as a list of blocks, written once and rendered as HTML and as Markdown. Everything is escaped."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is plain, lead (what to remember) or note (a caveat)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Tiles:
    """A few headline figures: (what, value, against what)."""

    tiles: Sequence[tuple[str, str, str]]


class Strong(str):
    """A table cell that stands out."""


@dataclass(frozen=True)
class Table:
    """The first column names the rows and is set left, the others right, but for those in `left`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Picture:
    """An image with its media type, a file name for the Markdown version, and what it shows."""

    name: str
    data: bytes
    caption: str
    media: str = "image/svg+xml"


@dataclass(frozen=True)
class Code:
    """Preformatted text, folded away under a title."""

    title: str
    text: str


Block = Heading | Text | Tiles | Table | Picture | Code

CSS = """
:root { --ink: #1c1e26; --soft: #5b5f6d; --line: #e3e4ea; --wash: #f6f7fa; --accent: #08519c; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .6rem; padding-top: 1.1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: break-word; }
p.lead { font-size: 1.08rem; }
p.note { font-size: .9rem; color: var(--soft); border-left: 3px solid #d9a441; padding-left: .75rem; }
.tiles { display: grid; gap: .75rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
.tile { background: var(--wash); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem; }
.tile .what { font-size: .82rem; color: var(--soft); }
.tile .value { font-size: 1.5rem; font-weight: 650; color: var(--accent); line-height: 1.25; }
.tile .against { font-size: .84rem; color: var(--soft); }
.scroll { overflow-x: auto; margin: .75rem 0; -webkit-overflow-scrolling: touch; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; min-width: 50%;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
th { font-weight: 600; color: var(--soft); border-bottom-width: 2px; vertical-align: bottom; white-space: normal; }
td:first-child, th:first-child, td.left, th.left { text-align: left; }
td.left { white-space: normal; min-width: 14rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; }
figure { margin: 1rem 0; }
figure img { display: block; width: 100%; min-width: 500px; max-width: 720px; height: auto; }
figcaption { font-size: .88rem; color: var(--soft); margin-top: .35rem; max-width: 46rem; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 8px; padding: .9rem; overflow-x: auto;
  font-size: .8rem; line-height: 1.45; }
@media (max-width: 600px) { main { padding: 1.25rem .9rem 3rem; } h1 { font-size: 1.5rem; }
  th, td { padding: .3rem .45rem; } .tile .value { font-size: 1.3rem; } }
@media print { .scroll { overflow: visible; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One self-contained page: no script, nothing fetched."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    escape = html.escape
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text, kind):
            return f'<p class="{kind}">{escape(text)}</p>'
        case Tiles(tiles):
            inner = "".join(
                f'<div class="tile"><div class="what">{escape(what)}</div>'
                f'<div class="value">{escape(value)}</div><div class="against">{escape(against)}</div></div>'
                for what, value, against in tiles
            )
            return f'<div class="tiles">{inner}</div>'
        case Table(columns, rows, left):
            sides = [' class="left"' if column in left else "" for column in columns]
            head = "".join(f"<th{side}>{escape(c)}</th>" for c, side in zip(columns, sides, strict=True))
            body = "".join(
                "<tr>" + "".join(_cell(c, side) for c, side in zip(row, sides, strict=True)) + "</tr>\n"
                for row in rows
            )
            return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
        case Picture(_, data, caption, media):
            source = f"data:{media};base64,{base64.b64encode(data).decode()}"
            return (
                f'<figure><div class="scroll"><img src="{source}" alt="{escape(caption)}"></div>'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        case Code(title, text):
            return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _cell(text: str, side: str) -> str:
    inner = html.escape(text)
    return f"<td{side}>{f'<strong>{inner}</strong>' if isinstance(text, Strong) else inner}</td>"


def to_markdown(blocks: Sequence[Block], pictures: str) -> str:
    """Markdown whose pictures lie in the folder `pictures` beside it."""
    return "\n\n".join(_markdown(block, pictures) for block in blocks) + "\n"


def _markdown(block: Block, pictures: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Text(text, kind):
            return {"lead": "**{}**", "note": "> {}"}.get(kind, "{}").format(_plain(text))
        case Tiles(tiles):
            return "\n".join(f"- {_plain(w)}: **{_plain(v)}** {_plain(a)}".rstrip() for w, v, a in tiles)
        case Table(columns, rows, left):
            bars = ["---" if n == 0 or c in left else "---:" for n, c in enumerate(columns)]
            lines = [columns, bars, *rows]
            return "\n".join(f"| {' | '.join(_marked(cell) for cell in line)} |" for line in lines)
        case Picture(name, _, caption, _):
            return f"![{_plain(caption)}]({pictures}/{name})\n\n*{_plain(caption)}*"
        case Code(title, text):
            fence = "`" * max(3, 1 + max(map(len, _runs(text, "`")), default=0))
            return f"{_plain(title)}:\n\n{fence}\n{text.rstrip()}\n{fence}"


def _marked(cell: str) -> str:
    return f"**{_plain(cell)}**" if isinstance(cell, Strong) and cell else _plain(cell)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    for character in "\\`*_[]|#":
        text = text.replace(character, f"\\{character}")
    return " ".join(html.escape(text, quote=False).split())


def _runs(text: str, character: str) -> list[str]:
    return "".join(c if c == character else " " for c in text).split()
