"""Writes the output of the analysis tools: figures, CSV files with their values, and an HTML page."""

import base64
import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DPI = 100  # figures are 12 inches wide, so images are 1200 pixels wide

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; border: 1px solid #ddd; }
h2 { margin-top: 2.5em; }
table { border-collapse: collapse; }
td, th { border: 1px solid #ccc; padding: .2em .7em; text-align: left; }
"""


class Report:
    """Writes ``NAME.png`` and ``NAME.csv`` for each figure, and ``report.html`` with all figures."""

    def __init__(self, folder: str | Path, title: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.title = title
        self._parts: list[str] = []
        self._left_out: list[tuple[str, str]] = []

    def facts(self, rows: dict[str, str]) -> None:
        cells = ''.join(f'<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in rows.items())
        self._parts.append(f'<table>{cells}</table>')

    def figure(
        self, name: str, title: str, reading: str, figure: Figure, header: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Adds a figure to the report. ``reading`` explains how to read the figure, and ``rows`` has its values."""
        image = io.BytesIO()
        figure.savefig(image, format='png', dpi=DPI)
        (self.folder / f'{name}.png').write_bytes(image.getvalue())
        write_csv(self.folder / f'{name}.csv', header, rows)
        data = base64.b64encode(image.getvalue()).decode()
        self._parts.append(
            f'<h2 id="{name}">{_text(title)}</h2><p>{_text(reading)}</p>'
            f'<img alt="{_text(title)}" src="data:image/png;base64,{data}">'
            f'<p>The values are in {name}.csv: {len(rows)} rows of {_text(", ".join(header))}.</p>'
        )

    def leave_out(self, title: str, why: str) -> None:
        self._left_out.append((title, why))

    def write(self) -> Path:
        missing = ''.join(f'<li>{_text(title)}: {_text(why)}</li>' for title, why in self._left_out)
        left_out = f'<h2 id="left-out">Left out</h2><ul>{missing}</ul>' if missing else ''
        path = self.folder / 'report.html'
        path.write_text(
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{_text(self.title)}</title>'
            f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'  # stops browsers from requesting an icon
            f'<body><h1>{_text(self.title)}</h1>{"".join(self._parts)}{left_out}</body></html>\n',
            encoding='utf-8',
        )
        return path


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([[f'{v:.6g}' if isinstance(v, float) else v for v in row] for row in rows])


def _text(text: str) -> str:
    return html.escape(text)
