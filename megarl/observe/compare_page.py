"""Draws a comparison of two computations: a page that loads nothing and runs no script, and its picture."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.observe.page import STYLE
from megarl.observe.report import ACCURACY_COLOR, FAINT, INK, TREND_COLOR

Series = Sequence[tuple[float, float, float]]  # place, typical value, largest value
FLOOR = 1e-9  # drawn in place of smaller values, on axes of powers of ten
OWN_STYLE = """
.panels { display: flex; flex-wrap: wrap; gap: 12px 24px }
.panels img { flex: 1 1 340px; max-width: 680px; min-width: 0; width: 100%; background: #ffffff; border-radius: 6px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
body > p { white-space: pre-wrap; margin: 4px 0 }
th, td { text-align: right; padding: 3px 10px; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
"""


def panel(title: str, place: str, value: str, series: Series, color: str) -> bytes:
    """A PNG of two lines on a logarithmic axis: typical values, and the largest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), title, place, value, series, color)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Any, title: str, place: str, value: str, series: Series, color: str) -> None:
    places = [row[0] for row in series]
    for column, label, style in ((1, "typical", "-"), (2, "largest", ":")):
        values = [max(row[column], FLOOR) for row in series]
        axes.plot(places, values, style, color=color, marker="o", markersize=4, label=label)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(place, color=INK)
    axes.set_ylabel(value, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.legend(frameon=False, labelcolor=INK)


def draw_panels(panels: Sequence[tuple[str, str, str, Series]], path: Path) -> list[bytes]:
    """Draws all panels beside each other into the PNG `path`. Returns a PNG of each alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    colors = (ACCURACY_COLOR, TREND_COLOR)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    alone = []
    for number, (axes, (title, place, value, series)) in enumerate(zip(all_axes, panels, strict=True)):
        _draw(axes, title, place, value, series, colors[number % 2])
        alone.append(panel(title, place, value, series, colors[number % 2]))
    figure.savefig(path)
    return alone


def write_compare_page(
    path: Path,
    title: str,
    lines: Sequence[str],
    pictures: Sequence[bytes],
    tables: Sequence[tuple[str, list[list[str]]]],
) -> None:
    """Writes the page. `tables` are a heading and rows, the first one of column names."""
    images = "".join(
        f"<img alt='' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>" for picture in pictures
    )
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in lines)]
    body.append(f"<div class='panels'>{images}</div>")
    for heading, (names, *rows) in tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        body.append(
            f"<h2>{html.escape(heading)}</h2><div class='wide'><table><tr>{head}</tr>"
            + "".join(f"<tr>{row}</tr>" for row in cells)
            + "</table></div>"
        )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    path.write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>{''.join(body)}</body></html>",
        "utf-8",
    )
