"""Draw what towers exchange in a step."""

import dataclasses
import math
from collections.abc import Sequence
from html import escape

# The kinds of exchanges with colours of their own. All other kinds have the colour of a sum.
_COLOURS = {"sum": "#2b6cb0", "gather": "#c05621", "cut": "#2f855a"}
_GREY, _TEXT = "#cbd5e0", "#2d3748"
_ROW, _COLUMN, _LEFT, _RIGHT, _TOP = 22, 84, 20, 640, 84
_LABEL = 64  # the most characters of a label


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the picture: one meeting, or several successive ones of the same kind.

    Attributes:
        kind: "sum" or another reduction, "gather" or "cut".
        label: the name of the tensor, or of the scope of several tensors.
        tensors: the number of tensors.
        bytes: the bytes of all tensors; None if not all sizes are known.
    """

    kind: str
    label: str
    tensors: int
    bytes: int | None


def draw(title: str, devices: Sequence[str], home: str, lines: Sequence[Line]) -> str:
    """Draws the meetings, from the first to the last, and returns an SVG picture.

    Args:
        title: the title above the picture.
        devices: the devices of the N towers.
        home: the device of the operations that are computed once.
        lines: the meetings.
    """
    columns = [_LEFT + _COLUMN // 2 + i * _COLUMN for i in range(len(devices) + 1)]
    right = columns[-1] + _COLUMN // 2
    bottom = _TOP + _ROW * (len(lines) + 1)
    parts = [_text(_LEFT, 22, title, "bold"), _legend(right)]
    for x, (name, device) in zip(columns, [("home", home), *((f"tower {i}", d) for i, d in enumerate(devices))], strict=True):
        parts += [_text(x, _TOP - 28, name, "bold", "middle"), _text(x, _TOP - 14, device, anchor="middle")]
        parts.append(f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="{_GREY}"/>')
    for i, line in enumerate(lines):
        parts += _meeting(line, columns, right, _TOP + _ROW * i + _ROW // 2)
    size = f'width="{right + _RIGHT}" height="{bottom + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(
        [*parts, "</svg>\n"]
    )


def _meeting(line: Line, columns: Sequence[int], right: int, y: int) -> list[str]:
    colour = _COLOURS.get(line.kind, _COLOURS["sum"])
    home, *towers = columns
    dashes = ' stroke-dasharray="4 3"' if line.bytes is None else ""
    ends = f'x1="{home}" y1="{y}" x2="{towers[-1]}" y2="{y}"'
    drawn = [f'<line {ends} stroke="{colour}" stroke-width="{_width(line.bytes):.1f}"{dashes}/>']
    # Sums and gathered rows arrive at home; slices arrive at the towers.
    arrivals = towers if line.kind == "cut" else [home]
    for x in columns:
        fill = colour if x in arrivals else "white"
        drawn.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2"/>')
    size = "? bytes" if line.bytes is None else bytes_in_words(line.bytes)
    several = f"{line.tensors} tensors, " if line.tensors > 1 else ""
    label = line.label if len(line.label) <= _LABEL else f"…{line.label[1 - _LABEL :]}"
    return [*drawn, _text(right, y + 4, f"{line.kind}  {label}  ({several}{size})", fill=colour)]


def _legend(right: int) -> str:
    kinds = [f'<tspan fill="{colour}">■ {kind}</tspan>' for kind, colour in _COLOURS.items()]
    return (
        f'<text x="{right}" y="{_TOP - 28}" font-family="sans-serif" font-size="12" fill="{_TEXT}">{" ".join(kinds)} '
        "  a filled dot receives; wider lines: more bytes</text>"
    )


def _width(number: int | None) -> float:
    """Returns a width in pixels: 1 up to 100 bytes, and 1.5 more for each power of ten."""
    return 1 + 1.5 * max(0.0, math.log10((number or 1) / 100))


def _text(x: int, y: int, text: str, weight: str = "normal", anchor: str = "start", fill: str = _TEXT) -> str:
    style = f'font-family="sans-serif" font-size="12" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def bytes_in_words(number: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
