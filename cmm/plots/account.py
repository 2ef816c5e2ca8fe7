"""Where does the time of each method go? Stacked bars of an account, and term by term what ring kernels pay."""

from cmm.plots.palette import (
    ACCENT,
    CAPTION_SIZE,
    DEVICE_COLORS,
    INK,
    LABEL_SIZE,
    MUTED,
    NEUTRAL,
    RULE,
    SMALL_SIZE,
    WIDTH,
    styled,
    text_color,
    tint,
)
from cmm.plots.shapes import MARGIN, axes_at, block, hatched, heading, inches_from, page
from cmm.trace.account import GROUPS, INSIDE, TERMS, Account, MethodAccount

_LEFT, _RIGHT = MARGIN + 1.75, 1.85
_TERM_LEFT, _TERM_RIGHT = MARGIN + 3.3, 1.75
_ROW, _BAR, _AXIS, _KEY, _HEADER = 0.36, 0.24, 0.5, 0.58, 0.42
_KEY_LINE = 0.22
_TERM_ROW, _TERM_BAR = 0.23, 0.15
_COLORS = {
    "products": ACCENT,
    "communication": DEVICE_COLORS[1],
    "synchronization": DEVICE_COLORS[2],
    "pipeline": DEVICE_COLORS[3],
    "memory": DEVICE_COLORS[4],
    "gaps": DEVICE_COLORS[5],
    "not attributed": DEVICE_COLORS[6],
}
# Colours alone do not tell all of them apart in grey print.
_HATCHES = {
    "synchronization": "xxxx",
    "pipeline": "....",
    "memory": "||||",
    "gaps": "----",
    "not attributed": "\\\\\\\\",
}
_GEMM = tint(NEUTRAL, 0.45)
_SMALLEST_US = 0.05  # Kernels have many parts; smaller ones are not listed.


def account_data(account: Account) -> dict:
    """Returns what `draw_account` draws: for each method its bars from left to right, and its terms."""
    gemm_us = account.gemm_only_us.median
    methods = []
    for method in account.methods:
        by_group = dict.fromkeys(GROUPS, 0.0)
        for name, value in method.terms.items():
            by_group[TERMS[name][1]] += value.median
        by_group["unexplained"] = method.rest_us.median
        # What saves time shortens the bar of the product.
        saved_us = sum(value for value in by_group.values() if value < 0)
        bars, end_us = [{"name": "GEMM only", "start_us": 0.0, "end_us": gemm_us + saved_us}], gemm_us + saved_us
        for name, value in by_group.items():
            if value > 0:
                bars.append({"name": name, "start_us": end_us, "end_us": end_us + value})
                end_us += value
        rest = method.rest_us
        about = {"total_us": method.wall_us.median, "unexplained_us": rest.median}
        about |= {"unexplained_p10_us": rest.p10, "unexplained_p90_us": rest.p90}
        methods.append({"name": method.name, "title": method.title} | about | {"bars": bars})
    kernels = [_kernel_data(method) for method in account.methods if method.kernel]
    # Accounts that were measured before there was this term lack it.
    tells_recorded = any("recorder" in method.terms for method in account.methods)
    about = {"tells_recorded_from_usual": tells_recorded, "caption": account.caption()}
    return {"gemm_only_us": gemm_us, "methods": methods, "kernels": kernels} | about


def _kernel_data(method: MethodAccount) -> dict:
    rows = [
        {"name": name, "title": TERMS[name][0], "group": TERMS[name][1]} | _spread(method.terms[name])
        for name in INSIDE
        if max(abs(v) for v in (method.terms[name].p10, method.terms[name].p90)) >= _SMALLEST_US
    ]
    rows.append({"name": "rest", "title": "unexplained", "group": "unexplained"} | _spread(method.kernel.rest_us))
    difference = method.kernel.difference_us.median
    sums = method.sums(INSIDE)._asdict()
    return {"name": method.name, "title": method.title, "difference_us": difference, "rows": rows} | sums


def _spread(value) -> dict:
    return {"median_us": value.median, "p10_us": value.p10, "p90_us": value.p90}


@styled
def draw_account(account: Account):
    """Draws one bar for each method, and below each ring kernel's terms one by one.

    Args:
      account: see `cmm.trace.account`.

    Returns:
      A `matplotlib.figure.Figure`. Groups differ in colour, hatching and order; whiskers are 10th to 90th percentile
      over rounds.
    """
    data = account_data(account)
    bars_height = _ROW * len(data["methods"])
    heights = [_HEADER + _TERM_ROW * len(kernel["rows"]) for kernel in data["kernels"]]
    terms_height = sum(heights) + (_AXIS if heights else 0)
    fig, bottom = page(_KEY + bars_height + _AXIS + terms_height, _message(data), _caption(data))
    low = bottom + terms_height + _AXIS
    limit = 1.02 * max(bar["end_us"] for method in data["methods"] for bar in method["bars"])
    ax = axes_at(fig, _LEFT, low, WIDTH - _LEFT - _RIGHT, bars_height, xlim=(0, limit), ylim=(0, bars_height))
    _draw_bars(ax, data, bars_height)
    _draw_key(ax, bars_height, data)
    if heights:
        _draw_kernels(fig, data["kernels"], heights, bottom + _AXIS)
    return fig


def _draw_bars(ax, data, top):
    _dress(ax, "time per call in a program, by the host's clock, µs")
    for number, method in enumerate(data["methods"]):
        middle = top - (number + 0.5) * _ROW
        ax.text(
            MARGIN - _LEFT, middle, method["title"], size=SMALL_SIZE, va="center_baseline", transform=inches_from(ax)
        )
        for bar in method["bars"]:
            gid = f"account-{method['name']}-{bar['name'].replace(' ', '-')}"
            place = (bar["start_us"], middle - _BAR / 2, bar["end_us"] - bar["start_us"], _BAR)
            block(ax, *place, linewidth=0.6, gid=gid, **_look(bar["name"]))
        end = max(bar["end_us"] for bar in method["bars"])
        ax.text(end, middle, f"  {method['total_us']:.0f}", size=SMALL_SIZE, va="center_baseline")
        low, high = method["unexplained_p10_us"], method["unexplained_p90_us"]
        text = f"unexplained {method['unexplained_us']:+.1f}\n({low:+.1f} to {high:+.1f})"
        look = {"size": CAPTION_SIZE, "color": MUTED, "transform": inches_from(ax), "linespacing": 1.05}
        ax.text(WIDTH - _LEFT - _RIGHT + 0.6, middle, text, va="center", **look)
    look = {"color": INK, "linewidth": 1.3, "dashes": (4, 2.5), "zorder": 6, "clip_on": False}
    ax.plot([data["gemm_only_us"]] * 2, [0, top + 0.04], gid="gemm-only", **look)


def _draw_key(ax, top, data):
    """Writes which look means what, in two lines above the bars."""
    used = {bar["name"] for method in data["methods"] for bar in method["bars"]}
    used |= {row["group"] for kernel in data["kernels"] for row in kernel["rows"]}
    names = [name for name in ("GEMM only", *GROUPS, "unexplained") if name in used]
    place, in_a_line = {"transform": inches_from(ax)}, (len(names) + 1) // 2
    for number, name in enumerate(names):
        x = MARGIN - _LEFT + number % in_a_line * 1.6
        low = top + 0.16 + (number < in_a_line) * _KEY_LINE
        block(ax, x, low, 0.16, 0.12, linewidth=0.6, clip_on=False, **place, **_look(name))
        ax.text(x + 0.21, low + 0.06, name, size=CAPTION_SIZE, va="center_baseline", **place)


def _draw_kernels(fig, kernels, heights, low):
    """Draws the terms of each kernel, one row each, on one scale."""
    values = [row[key] for kernel in kernels for row in kernel["rows"] for key in ("p10_us", "median_us", "p90_us")]
    limits = 1.05 * min(0.0, *values), 1.05 * max(values)
    height = sum(heights)
    ax = axes_at(fig, _TERM_LEFT, low, WIDTH - _TERM_LEFT - _TERM_RIGHT, height, xlim=limits, ylim=(0, height))
    _dress(ax, "kernel time beyond GEMM only, µs")
    top = height
    for kernel, of_kernel in zip(kernels, heights):
        title = f"{kernel['title']}: kernel {kernel['difference_us']:+.1f} µs against GEMM only, term by term"
        heading(ax, MARGIN - _TERM_LEFT, top - 0.3, title, size=LABEL_SIZE, transform=inches_from(ax))
        ax.plot([0, 0], [top - of_kernel, top - _HEADER], color=INK, linewidth=1.0, zorder=5)
        for number, row in enumerate(kernel["rows"]):
            middle = top - _HEADER - (number + 0.5) * _TERM_ROW
            _draw_term(ax, kernel["name"], row, middle)
        top -= of_kernel


def _draw_term(ax, kernel, row, middle):
    names = {"transform": inches_from(ax), "va": "center_baseline", "size": CAPTION_SIZE}
    ax.text(MARGIN - _TERM_LEFT, middle, row["title"], **names)
    low, high = sorted((0.0, row["median_us"]))
    gid = f"term-{kernel}-{row['name']}"
    block(ax, low, middle - _TERM_BAR / 2, high - low, _TERM_BAR, linewidth=0.6, gid=gid, **_look(row["group"]))
    look = {"color": INK, "linewidth": 1.1, "marker": "|", "markersize": 5, "zorder": 7}
    ax.plot([row["p10_us"], row["p90_us"]], [middle, middle], **look)
    inches = WIDTH - _TERM_LEFT - _TERM_RIGHT + 0.12
    text = f"{row['median_us']:+.2f} ({row['p10_us']:+.2f} to {row['p90_us']:+.2f})"
    ax.text(inches, middle, text, **names | {"size": CAPTION_SIZE - 0.5, "color": MUTED})


def _look(name: str) -> dict:
    if name == "unexplained":
        return hatched(MUTED)
    look = {"facecolor": _GEMM if name == "GEMM only" else _COLORS[name]}
    if name in _HATCHES:
        look |= {"hatch": _HATCHES[name], "hatchcolor": text_color(look["facecolor"]), "hatch_linewidth": 0.7}
    return look


def _dress(ax, label):
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel(label)


def _message(data) -> str:
    """Returns the title: which of the methods comes closest to the product alone, and what it adds."""
    others = [method for method in data["methods"] if method["name"] != "gemm_only"]
    if not others:
        return "What the product alone takes"
    best = min(others, key=lambda method: method["total_us"])
    return f"{best['title']}: {best['total_us'] - data['gemm_only_us']:.0f} µs beyond the product alone (dashed)"


def _caption(data) -> str:
    recorder = ", and by how much usual calls are longer than recorded ones" * data["tells_recorded_from_usual"]
    lines = [
        "In a bar, groups stand in the order of the key, from left to right. Dashed: kernel time of GEMM only. Gaps: "
        "moments in which nothing runs. Not attributed: what is left of waits inside kernels without a known "
        f"cause{recorder}.",
        "What saves time, unexplained or not, shortens the bar of GEMM only. Totals are by another clock than kernel "
        "times, so that of GEMM only may be shorter than its kernel.",
        "Bars: medians over rounds; whiskers and brackets: 10th to 90th percentile.",
    ]
    if data["kernels"]:
        lines.append(
            "Terms of a kernel: parts of the chain of causes that decides when it ends, recorded from inside, less the "
            "same parts of a twin that sends nothing. Those within 0.05 µs of nothing are left out. Parts of a call "
            "add up to it whatever they are: a small rest says that recorded calls stand for usual ones."
        )
        for kernel in data["kernels"]:
            lines.append(
                f"{kernel['title']}: with a cause {kernel['attributed_us']:+.1f} µs, not attributed "
                f"{kernel['not_attributed_us']:+.1f} µs; absolute terms together {kernel['absolute_us']:.1f} µs."
            )
    return "\n".join([*lines, f"Measured: {data['caption']}."])
