"""How close to the peak does each method come? Bars of measured and published rates, with what is possible dashed."""

from collections.abc import Sequence

from matplotlib.patheffects import withStroke

from cmm import roofline
from cmm.plots.palette import (
    ACCENT,
    BACKGROUND,
    CAPTION_SIZE,
    DEVICE_COLORS,
    INK,
    LABEL_SIZE,
    MUTED,
    NEUTRAL,
    SMALL_SIZE,
    WIDTH,
    styled,
    text_color,
    tint,
)
from cmm.plots.rates import utilization_data
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, heading, inches_from, page
from cmm.results import Run

_LEFT = MARGIN + 2.1
_RIGHT = 1.15
_PANEL_HEADER, _GROUP_HEADER, _ROW, _PANEL_END = 0.55, 0.34, 0.3, 0.2
_AXIS = 0.62
_BAR = 0.23
_NAME_CHARACTERS = 26
# Bars shorter than this, in % of the peak, have their numbers beside them.
_SHORT = 28

# They transfer nothing: they are the roof over the methods, not some of them.
_ROOFS = ("gemm_only", "gemm_only_torch")
_KERNELS = ("pallas", "pallas_fast")
# The roof is light grey, the baseline and the kernels of others are grey, the plain JAX rings sky blue, and kernels of
# this project blue.
_COLORS = dict.fromkeys(_ROOFS, tint(NEUTRAL, 0.55))
_COLORS |= dict.fromkeys(("naive", "published_reference", "jax_example", "published_kernel"), NEUTRAL)
_COLORS |= dict.fromkeys(("ring", "ring_bidirectional", "ring_copy_engines"), DEVICE_COLORS[4])

_NOTES = {"measured": "measured", "published": "published, H100, not measured here"}


@styled
def draw_utilization(runs: Sequence[Run] = (), published=roofline.PUBLISHED_ROWS):
    """Draws the share of the peak that each method reaches, one panel for each machine and problem.

    Args:
      runs: recorded runs (see `cmm.results.load_all`). Simulated runs, skipped methods and machines without a known
        peak are left out; `cmm.plots.utilization_data` says which and why.
      published: rows of the published table, or none. Their bars are hatched and their panel says what they are.

    Returns:
      A `matplotlib.figure.Figure`. Bars are medians, whiskers 10th to 90th percentile, dashed lines bounds.
    """
    data = utilization_data(runs, published)
    panels = _panels(data)
    height = sum(map(_panel_height, panels)) + _AXIS if panels else 0.7
    fig, bottom = page(height, _message(data), _caption(data))
    # More than 100 % is a sign of a wrong measurement or a wrong peak. It must be seen, not cut off.
    widest = max([100, *(105 * bar["utilization"] for bar in data["bars"])])
    if not panels:
        fig.text(MARGIN / WIDTH, 0.5, "No run on a machine with a known peak is recorded here.", size=LABEL_SIZE)
        return fig
    top = height - _AXIS
    ax = axes_at(fig, _LEFT, bottom + _AXIS, WIDTH - _LEFT - _RIGHT, top, xlim=(0, widest), ylim=(0, top))
    _dress(ax)
    for index, panel in enumerate(panels):
        _draw_panel(ax, panel, index, top)
        top -= _panel_height(panel)
    return fig


def _panels(data: dict) -> list[dict]:
    """Returns the panels from top to bottom, each with its groups of bars and limits by number of devices."""
    panels = []
    for key in dict.fromkeys((bar["provenance"], bar["panel"]) for bar in data["bars"]):
        bars = [bar for bar in data["bars"] if (bar["provenance"], bar["panel"]) == key]
        names = {"T_lower", "T_upper"} if key[0] == "measured" else {"published bound"}
        limits = [limit for limit in data["limits"] if limit["panel"] == key[1] and limit["name"] in names]
        groups = [
            (size, [b for b in bars if b["axis_size"] == size], [m for m in limits if m["axis_size"] == size])
            for size in sorted({bar["axis_size"] for bar in bars})
        ]
        panels.append({"provenance": key[0], "title": key[1], "peak_tflops": bars[0]["peak_tflops"], "groups": groups})
    return panels


def _panel_height(panel: dict) -> float:
    return _PANEL_HEADER + sum(_GROUP_HEADER + _ROW * len(bars) for _, bars, _ in panel["groups"]) + _PANEL_END


def _draw_panel(ax, panel: dict, index: int, top: float):
    """Draws one panel from `top` down: its title, and for each number of devices the limits and the bars."""
    at_margin = {"transform": inches_from(ax), "va": "baseline"}
    heading(ax, MARGIN - _LEFT, top - 0.17, panel["title"], size=LABEL_SIZE, **at_margin)
    note = f"{_NOTES[panel['provenance']]}; 100 % is {panel['peak_tflops']:g} TFLOP/s per device"
    ax.text(MARGIN - _LEFT, top - 0.4, note, size=SMALL_SIZE, color=MUTED, **at_margin)
    low = top - _PANEL_HEADER
    for axis_size, bars, limits in panel["groups"]:
        low -= _GROUP_HEADER
        heading(ax, MARGIN - _LEFT, low + 0.09, _devices([axis_size]), size=SMALL_SIZE, **at_margin)
        height = _ROW * len(bars)
        for limit in limits:
            _draw_limit(ax, limit, index, low - height, low + 0.03)
        for number, bar in enumerate(bars):
            _draw_bar(ax, bar, f"bar-{index}-{axis_size}-{bar['method']}", low - (number + 0.5) * _ROW)
        low -= height


def _draw_bar(ax, bar: dict, gid: str, middle: float):
    """Draws one bar with its name on the left, its numbers at its end, and its spread."""
    percent = 100 * bar["utilization"]
    color = _COLORS.get(bar["method"], ACCENT)
    look = hatched(tint(color, 0.45)) if bar["provenance"] == "published" else {}
    block(ax, 0, middle - _BAR / 2, percent, _BAR, color, **({"linewidth": 0.8, "gid": gid} | look))
    # A long name gets smaller letters, so that it ends before its bar begins.
    size = SMALL_SIZE * min(1, _NAME_CHARACTERS / len(bar["title"]))
    name = {"transform": inches_from(ax), "size": size, "va": "center_baseline", "gid": f"name-{gid}"}
    ax.text(MARGIN - _LEFT, middle, bar["title"], **name)
    # The slowest calls make the lowest rates: the 90th percentile of the time is the left end of the whisker.
    ends = [percent * bar["time_us"] / time for time in (bar["p90_us"], bar["p10_us"]) if time is not None]
    if ends:
        look_of_spread = {"color": INK, "linewidth": 1.2, "marker": "|", "markersize": 6, "zorder": 6}
        ax.plot(ends, [middle, middle], gid=f"{gid}-spread", **look_of_spread)
    if bar["wall_utilization"]:
        diamond = {"marker": "D", "markersize": 5.5, "color": INK, "markerfacecolor": BACKGROUND, "zorder": 8}
        ax.plot([100 * bar["wall_utilization"]], [middle], linestyle="none", gid=f"{gid}-wall", **diamond)
    kernel = 100 * (bar["kernel_utilization"] or 0)
    if kernel:
        triangle = {"marker": "^", "markersize": 5.5, "color": INK, "markerfacecolor": BACKGROUND, "zorder": 8}
        ax.plot([kernel], [middle], linestyle="none", gid=f"{gid}-kernel", **triangle)
    fill = look.get("facecolor", color)
    # Numbers stand at the foot of a bar, where no dashed line crosses them, unless the bar is too short for them or
    # the diamond lies there.
    inside = min(percent, 100 * (bar["wall_utilization"] or 1)) > _SHORT
    x, ink = (1.2, text_color(fill)) if inside else (max([percent, *ends]) + 1.2, INK)
    if not inside and x < kernel < x + _SHORT:
        x = kernel + 2
    halo = [withStroke(linewidth=3, foreground=fill)] if inside and look else []
    numbers = f"{percent:.0f} %   {bar['time_us']:.0f} µs"
    ax.text(x, middle, numbers, size=SMALL_SIZE, color=ink, va="center_baseline", zorder=7, path_effects=halo)


def _draw_limit(ax, limit: dict, index: int, low: float, high: float):
    """Draws one dashed line over the bars of a group, with its name and time at its upper end."""
    percent = 100 * limit["utilization"]
    gid = f"limit-{index}-{limit['axis_size']}-{limit['name']}".replace(" ", "-")
    look = {"color": INK, "linewidth": 1.3, "dashes": (4, 2.5), "zorder": 5, "clip_on": False}
    ax.plot([percent, percent], [low, high], gid=gid, **look)
    # T_upper is never to the right of T_lower, so labels on opposite sides cannot meet.
    side = {"ha": "left"} if limit["name"] == "T_lower" else {"ha": "right"}
    name = {"T_lower": "$T_{lower}$", "T_upper": "$T_{upper}$"}.get(limit["name"], limit["name"])
    ax.text(percent, high + 0.06, f"{name} {limit['time_us']:.0f} µs", size=CAPTION_SIZE, va="baseline", **side)


def _dress(ax):
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("share of the dense peak, from the time of all kernels and copies of one call")


def _message(data: dict) -> str:
    """Returns the title: the fastest method of the first measured panel beside the baseline, or what was published.

    It is about the most devices on which a kernel of this project was measured, or about the most of all. The fastest
    is who is so by the host's clock where that is known, since a user waits for gaps as well; numbers are the bars'.
    """
    measured = [bar for bar in data["bars"] if bar["provenance"] == "measured"]
    if measured:
        panel = [bar for bar in measured if bar["panel"] == measured[0]["panel"]]
        most = max(bar["axis_size"] for bar in [bar for bar in panel if bar["method"] in _KERNELS] or panel)
        group = [bar for bar in panel if bar["axis_size"] == most]
        best = max(group, key=lambda bar: (bar["method"] not in _ROOFS, _felt(bar)))
        # What it stands beside: gathering first, or the roof if it is that itself.
        beside = [bar for bar in group if bar["method"] == "naive" and best["method"] != "naive"]
        beside = beside or [bar for bar in group if bar["method"] in _ROOFS]
        device = best["panel"].partition(",")[0].removeprefix("NVIDIA ")
        message = f"{best['title']}: {100 * best['utilization']:.0f} % of peak on {most} x {device}"
        if beside and best["method"] not in _ROOFS:
            other = max(beside, key=lambda bar: bar["utilization"])
            title = "GEMM only" if other["method"] in _ROOFS else other["title"]
            message += f", {title} {100 * other['utilization']:.0f} %"
        return message[0].upper() + message[1:]
    kernels = [100 * bar["utilization"] for bar in data["bars"] if bar["method"] == "published_kernel"]
    if kernels:
        return f"Published: {min(kernels):.0f} to {max(kernels):.0f} % of peak on H100; nothing measured here yet"
    return "Nothing measured here yet"


def _felt(bar: dict) -> float:
    return bar["wall_utilization"] or bar["utilization"]


def _walls(bars) -> str:
    """Says which time by the host's clock diamonds show, by number of devices where that differs; "" without diamonds.

    Methods on one number of devices may differ in it, too: their records hold what could be measured of each.
    """
    kinds: dict[int, set[str]] = {}
    for bar in bars:
        if bar["wall_utilization"]:
            kinds.setdefault(bar["axis_size"], set()).add(bar["wall_of"])
    sizes: dict[str, list[int]] = {}
    for axis_size, found in kinds.items():
        words = min(found) if len(found) == 1 else "calls in a program (alone where that is not recorded)"
        sizes.setdefault(words, []).append(axis_size)
    if len(sizes) < 2:
        return "".join(sizes)
    return ", ".join(f"{words} on {_devices(sorted(of_words))}" for words, of_words in sizes.items())


def _devices(axis_sizes: Sequence[int]) -> str:
    return f"{' and '.join(map(str, axis_sizes))} {'device' if max(axis_sizes) == 1 else 'devices'}"


def _caption(data: dict) -> str:
    """Names the sources of all bars, and says what the lines mean."""
    lines = []
    if any(bar["provenance"] == "measured" for bar in data["bars"]):
        lines.append("T_lower: the longer of products at peak rate and transfers at link rate. T_upper: their sum.")
        lines.append("Bars: median time in which a GPU works on the call; whiskers: 10th to 90th percentile.")
    if walls := _walls(data["bars"]):
        lines.append(f"Diamonds: by the host's clock, in which gaps between kernels count too: {walls}.")
    if any(bar["kernel_utilization"] for bar in data["bars"]):
        lines.append("Triangles: by the time of the matmul kernels alone.")
    if any(bar["provenance"] == "published" for bar in data["bars"]):
        p = roofline
        lines.append(
            f"Published bound: D local products of {p.PUBLISHED_T_LOCAL_US:.0f} µs and {p.PUBLISHED_T_ROUND_US:.0f} µs "
            "for each change of step."
        )
    measured_and_published = dict.fromkeys(f"{b['provenance'].capitalize()}: {b['source']}." for b in data["bars"])
    return "\n".join([*lines, *measured_and_published])
