"""The plot of a benchmark as SVG: measured and predicted time of a step for each strategy."""

from __future__ import annotations

from html import escape
from typing import Final

from flk.bench.result import BenchResult

_WIDTH: Final = 640
_LEFT: Final = 160  # of the bars
_ROW: Final = 44
_MEASURED, _PREDICTED = "#06c", "#bbb"


def plot(result: BenchResult) -> str:
    """Return an SVG document."""
    predicted = result.data.get("predicted") or {}
    rows = [
        (name, each["seconds"], predicted.get(name, {}).get("step_seconds"))
        for name, each in result.data["strategies"].items()
        if "seconds" in each
    ]
    longest = max((max(seconds, expected or 0.0) for _, seconds, expected in rows), default=1.0)
    height = 40 + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" fill="{_MEASURED}">measured ms for a step</text>',
        f'<text x="{_LEFT + 180}" y="18" fill="#777">predicted</text>',
    ]
    for number, (name, seconds, expected) in enumerate(rows):
        top = 30 + _ROW * number
        lines.append(f'<text x="8" y="{top + 14}">{escape(name)}</text>')
        lines += _bar(top, seconds, longest, _MEASURED)
        if expected is not None:
            lines += _bar(top + 18, expected, longest, _PREDICTED)
    return "\n".join([*lines, "</svg>", ""])


def _bar(top: int, seconds: float, longest: float, colour: str) -> list[str]:
    width = (_WIDTH - _LEFT - 80) * seconds / longest
    return [
        f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="16" fill="{colour}"/>',
        f'<text x="{_LEFT + width + 6:.1f}" y="{top + 13}">{seconds * 1e3:.3g}</text>',
    ]
