"""Charts as inline SVG: sharp at any size, coloured by the page's style sheet, so dark and light come by themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dropmax.lab.figures.confusion_graph import Link, around_a_circle
from dropmax.lab.report.html import cut, escape
from dropmax.metrics import ReliabilityBins

__all__ = ["Series", "graph", "line_chart", "nice_ticks", "profile", "reliability"]

#: How many series have a look of their own in the style sheet (.s0, .s1, ...).
LOOKS = 8


@dataclass(frozen=True)
class Series:
    """A line of a chart: its points, and its place among the methods, which decides its look.

    >>> Series("softmax", [(0.0, 1.0)], look=0).pale
    False
    """

    label: str
    points: Sequence[tuple[float, float]]
    look: int
    pale: bool = False


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most`` round numbers within [low, high], evenly spaced.

    >>> nice_ticks(0, 1.05)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 2.5, 5, 10, 20, 25, 50):
        step = factor * power
        first = math.ceil(low / step - 1e-9)
        count = math.floor(high / step + 1e-9) - first + 1
        if count <= most:
            return [round(k * step, 12) for k in range(first, first + count)]
    return [low]


def line_chart(
    series: Sequence[Series], *, title: str, x: str, y: str, log: bool = False, width: int = 420, height: int = 250
) -> str:
    """Return a chart of lines with axes, grid and a legend of the labels."""
    series = [s for s in series if s.points]
    values = [p[1] for s in series for p in s.points if math.isfinite(p[1]) and (p[1] > 0 or not log)]
    if not values:
        return ""
    legend = list(dict.fromkeys((s.look % LOOKS, s.label) for s in series if not s.pale))
    left, right, top, bottom = 52, 12, 26 + 16 * len(legend), 40
    height += 16 * len(legend)
    xs = [p[0] for s in series for p in s.points]
    low_x, high_x = min(xs), max(xs)
    if high_x == low_x:
        high_x = low_x + 1
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
        ticks = [float(k) for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
        names = [f"{10**tick:g}" for tick in ticks]
        if len(ticks) < 2:
            ticks = nice_ticks(low, high, 4)
            names = [f"{10**tick:.2g}" for tick in ticks]
    else:
        low = min(low, 0.0) if low < 0.35 * high else low
        ticks = nice_ticks(low, high)
        names = [f"{tick:g}" for tick in ticks]
    span = (high - low) or 1.0
    low, high = low - 0.03 * span, high + 0.05 * span

    def place(px: float, py: float) -> tuple[float, float]:
        value = math.log10(py) if log else py
        return (
            left + (px - low_x) / (high_x - low_x) * (width - left - right),
            height - bottom - (value - low) / (high - low) * (height - top - bottom),
        )

    parts = [_text(left, 14, title, "title", "start")]
    for k, (look, label) in enumerate(legend):
        parts.append(f'<line class="line s{look}" x1="{left}" x2="{left + 26}" y1="{26 + 16 * k}" y2="{26 + 16 * k}"/>')
        parts.append(_text(left + 32, 30 + 16 * k, cut(label, 55), "", "start"))
    for tick, shown in zip(ticks, names, strict=True):
        _, py = place(low_x, 10**tick if log else tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(_text(left - 6, py + 4, shown, "", "end"))
    for tick in nice_ticks(low_x, high_x):
        px = left + (tick - low_x) / (high_x - low_x) * (width - left - right)
        parts.append(_text(px, height - bottom + 16, f"{tick:g}", "", "middle"))
    parts.append(f'<path class="axis" d="M{left} {top}V{height - bottom}H{width - right}"/>')
    parts.append(_text((left + width - right) / 2, height - 6, x, "", "middle"))
    parts.append(_text(13, (top + height - bottom) / 2, y, "", "middle", turned=True))
    for s in series:
        path = [place(*p) for p in s.points if math.isfinite(p[1]) and (p[1] > 0 or not log)]
        if len(path) == 1:
            parts.append(f'<circle class="mark s{s.look % LOOKS}" cx="{path[0][0]:.1f}" cy="{path[0][1]:.1f}" r="3"/>')
        elif path:
            corners = " ".join(f"{px:.1f},{py:.1f}" for px, py in path)
            pale = " pale" if s.pale else ""
            parts.append(f'<polyline class="line s{s.look % LOOKS}{pale}" points="{corners}"/>')
    return _svg(width, height, parts, title)


def reliability(bins: ReliabilityBins, *, title: str, note: str, size: int = 210) -> str:
    """Return a reliability diagram: accuracy against confidence, over the share of examples in each bin."""
    left, top, gap, strip = 44, 36, 12, 40
    inner = size - left - 8
    bottom = top + inner
    total = int(bins.count.sum())
    count = len(bins.count)
    parts = [_text(left, 13, cut(title, 30), "title", "start"), _text(left, 28, note, "", "start")]
    for tick in (0.0, 0.5, 1.0):
        y = bottom - tick * inner
        parts.append(f'<line class="grid" x1="{left}" x2="{left + inner}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 5, y + 4, f"{tick:g}", "", "end"))
        parts.append(_text(left + tick * inner, bottom + gap + strip + 14, f"{tick:g}", "", "middle"))
    wide = inner / count
    for b in range(count):
        n = int(bins.count[b])
        if not n:
            continue
        accuracy, confidence = float(bins.accuracy[b]), float(bins.confidence[b])
        x = left + b * wide + 0.5
        parts.append(_bar("bar", x, bottom - accuracy * inner, wide - 1, accuracy * inner))
        low, high = sorted((accuracy, confidence))
        parts.append(_bar("gap", x, bottom - high * inner, wide - 1, (high - low) * inner))
        share = n / total * strip
        parts.append(_bar("count", x, bottom + gap + strip - share, wide - 1, share))
    parts.append(f'<line class="diagonal" x1="{left}" y1="{bottom}" x2="{left + inner}" y2="{top}"/>')
    parts.append(f'<path class="axis" d="M{left} {top}V{bottom}H{left + inner}"/>')
    parts.append(f'<path class="axis" d="M{left} {bottom + gap + strip}H{left + inner}"/>')
    parts.append(_text(left + inner / 2, bottom + gap + strip + 29, "confidence", "", "middle"))
    parts.append(_text(10, top + inner / 2, "accuracy", "", "middle", turned=True))
    return _svg(size, bottom + gap + strip + 34, parts, f"Reliability diagram of {title}")


def graph(links: Sequence[Link], classes: Sequence[str], *, every: int, by_mistakes: bool, size: int = 560) -> str:
    """Return the confusion graph, classes around a circle, links bent towards its middle."""
    order = around_a_circle(list(links), every)
    if len(order) < 3 or not links:
        return ""
    long = max(len(classes[k]) for k in order) > 3
    radius = size / 2 - (130 if long else 40)
    centre = size / 2
    angles = {k: 2 * math.pi * i / len(order) for i, k in enumerate(order)}

    def place(angle: float, r: float) -> tuple[float, float]:
        return centre + r * math.cos(angle), centre + r * math.sin(angle)

    weights = [link.mistakes if by_mistakes else link.flagged for link in links]
    most = max(weights) or 1.0
    parts = []
    for link, weight in reversed(list(zip(links, weights, strict=True))):
        (x1, y1), (x2, y2) = (place(angles[k], radius) for k in (link.first, link.second))
        mx, my = centre + 0.35 * (x1 + x2 - 2 * centre), centre + 0.35 * (y1 + y2 - 2 * centre)
        share = weight / most
        parts.append(
            f'<path class="link" d="M{x1:.1f} {y1:.1f}Q{mx:.1f} {my:.1f} {x2:.1f} {y2:.1f}" '
            f'stroke-width="{1 + 7 * share:.1f}" opacity="{0.25 + 0.65 * share:.2f}"/>'
        )
    for k, angle in angles.items():
        x, y = place(angle, radius)
        parts.append(f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        tx, ty = place(angle, radius + (9 if long else 16))
        degrees = math.degrees(angle)
        flip = 90 < degrees < 270
        turn = f' transform="rotate({degrees + 180 if flip else degrees:.1f} {tx:.1f} {ty:.1f})"' if long else ""
        anchor = ("end" if flip else "start") if long else "middle"
        label = escape(cut(classes[k].replace("_", " "), 18))
        parts.append(f'<text x="{tx:.1f}" y="{ty:.1f}" dy="0.35em" text-anchor="{anchor}"{turn}>{label}</text>')
    return _svg(size, size, parts, "Confusion graph", kind="graph")


def profile(
    classes: Sequence[tuple[str, float, float]], truth: int, answer: int, *, bars: bool, width: int = 250
) -> str:
    """Return the retain profile of an example: for each (name, rho, probability) a bar for rho and a dot for p.

    ``truth`` and ``answer`` are places in the list. Without ``bars``, of a head without masks, only dots.
    """
    longest = max((len(cut(label, 15)) for label, _, _ in classes), default=1)
    left, step = 30 + 5.2 * longest, 15
    inner = width - left - 8
    parts = []
    for row, (label, rho, p) in enumerate(classes):
        y = 4 + row * step
        kind = "truth" if row == truth else "answer" if row == answer else "rival"
        mark = "○ " if row == truth else "× " if row == answer else ""
        parts.append(_text(left - 6, y + 10, mark + cut(label.replace("_", " "), 15), kind, "end"))
        if bars:
            parts.append(_bar(f"rho {kind}", left, y + 1, rho * inner, step - 3))
        parts.append(f'<circle class="dot" cx="{left + p * inner:.1f}" cy="{y + step / 2:.1f}" r="2.6"/>')
    bottom = 4 + len(classes) * step
    parts.append(f'<path class="axis" d="M{left:.1f} 2V{bottom}H{left + inner:.1f}"/>')
    for tick, shown in ((0.0, "0"), (0.5, "½"), (1.0, "1")):
        parts.append(_text(left + tick * inner, bottom + 12, shown, "", "middle"))
    return _svg(width, bottom + 16, parts, "Retain probabilities (bars) and prediction (dots)", kind="profile")


def _text(x: float, y: float, text: str, kind: str, anchor: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}{turn}>{escape(text)}</text>'


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"/>'
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str, kind: str = "chart") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
