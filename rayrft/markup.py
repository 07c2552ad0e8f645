"""HTML for notebooks: texts are escaped, nothing is loaded from elsewhere, and colours fit light and dark themes."""

from __future__ import annotations

import base64
import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TypeVar

DATA_URL = re.compile(r"data:(image/(?:png|jpeg|webp|gif));base64,")
"""How an image begins that is not in a file."""
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}

Row = TypeVar("Row")

_FAINT = "rgba(128,128,128,.35)"
_WRAP = "white-space:pre-wrap;overflow-wrap:anywhere"
_LONGEST = 20_000
"""Characters of a text that are shown."""


class Markup(str):
    """A text that is HTML. Any other text is escaped where it becomes part of one."""


def element(tag: str, *contents: object, **attributes: object) -> Markup:
    """Return an HTML element with escaped attributes, and with escaped contents unless they are `Markup`."""
    inner = "".join(each if isinstance(each, Markup) else escape(cell_text(each)) for each in contents)
    written = "".join(f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())
    return Markup(f"<{tag}{written}>{inner}</{tag}>")


def table(rows: Sequence[Sequence[object]]) -> Markup:
    """Return a table of rows of cells, the first of which are its head."""
    style = f"text-align:left;vertical-align:top;padding:2px 12px 2px 0;border-bottom:1px solid {_FAINT};"
    name, value = style + "white-space:nowrap", style + f"min-width:4em;{_WRAP}"
    lines = [element("tr", *(element("th", each, style=name) for each in rows[0]))]
    for first, *rest in rows[1:]:
        cells = [element("td", first, style=name), *(element("td", each, style=value) for each in rest)]
        lines.append(element("tr", *cells, style="background:none"))
    return element("table", *lines, style="border-collapse:collapse;color:inherit;margin:4px 0")


def facts(values: Mapping[str, object]) -> Markup:
    """Return a table of names and values; the first is its head; a value that is empty or None is left out."""
    return table([[name.replace("_", " "), value] for name, value in values.items() if value or value == 0])


def line_chart(values: Sequence[float]) -> Markup:
    """Return a small curve of the finite values."""
    values = [each for each in values if math.isfinite(each)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    across, height = max(len(values) - 1, 1), (high - low) or 1.0
    points = " ".join(f"{2 + 156 * x / across:.1f},{30 - 26 * (y - low) / height:.1f}" for x, y in enumerate(values))
    curve = element("polyline", points=points, fill="none", stroke="currentColor", stroke_width=1.5)
    return element("svg", curve, width=160, height=34, role="img")


def block(title: str, *contents: object) -> Markup:
    """Return contents under a small title, with a line at their left; line breaks are kept."""
    style = f"border-left:3px solid {_FAINT};padding-left:8px;margin:4px 0;{_WRAP}"
    return element("div", element("div", title, style="font-size:85%;opacity:.75"), *contents, style=style)


def cell_text(value: object) -> str:
    """Return a value as a short text: entries of a dictionary and of a list one after another."""
    if isinstance(value, dict):
        value = ", ".join(f"{name} {cell_text(each)}" for name, each in value.items())
    elif isinstance(value, list):
        value = ", ".join(map(cell_text, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… {len(text) - _LONGEST:,} more characters"


def picture(path: str) -> Markup:
    """Return a row's image as a part of the page, or its path if it cannot be read."""
    if (found := image_content(path)) is None:
        return element("div", f"no image at {path}")
    url = f"data:{found[1]};base64,{base64.b64encode(found[0]).decode()}"
    return element("img", src=url, alt=Path(path).name[:80], style="max-height:160px;max-width:100%")


def image_content(path: str) -> tuple[bytes, str] | None:
    """Return the bytes and the media type of a row's image, to be shown; None if there is no such image, or the file
    does not have an image's suffix."""
    if url := DATA_URL.match(path):
        return base64.b64decode(path[url.end() :]), url[1]
    kind = _TYPES.get(Path(path).suffix.lower())
    if kind is not None:
        with contextlib.suppress(OSError):
            return Path(path).read_bytes(), kind
    return None


class ReportTable(list[Row]):
    """A list that a notebook shows as a table of its entries' fields (or ``cells``), and a terminal as lines."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        rows = [getattr(each, "cells", vars(each)) for each in self]
        kinds = [(names, list(of_kind)) for names, of_kind in groupby(rows, key=lambda row: [*row])]
        tables = (table([names, *([*row.values()] for row in of_kind)]) for names, of_kind in kinds)
        return "".join(tables) or "an empty report"
