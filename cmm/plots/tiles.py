"""Which CTA computes which tile of a matmul, and what happens in each stage of its pipeline?

The order of tiles is computed from the kernel's own plan, the stages from the events that `cmm.interpret` records.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from matplotlib.patches import FancyArrowPatch

from cmm.hopper.plan import Plan
from cmm.interpret import Event
from cmm.plots.palette import ACCENT, CAPTION_SIZE, INK, MUTED, SMALL_SIZE, TRACK, WIDTH, device_color, styled, tint
from cmm.plots.shapes import MARGIN, axes_at, block, heading, inch_axes, page

# In inches.
_CELL_WIDTH, _CELL_HEIGHT = 0.42, 0.25
_ABOVE, _BETWEEN, _ROW_NAMES = 0.5, 0.15, 0.3
_LANE, _LANE_NAMES, _PANEL_NAME = 0.28, 0.75, 0.38

ORDER_KEY = (
    "One box is one tile of the result: rows m run down, columns n to the right. Number: the CTA that computes it. "
    "Colour: the first, second, ... tile of that CTA. Thick border: column 0."
)
STAGES_KEY = (
    "One lane is one stage in shared memory; numbers count uses. Light: TMA loads the tiles of A and B. Dark: they are "
    "multiplied. Grey: the stage waits. Simulated: the order holds, lengths say nothing about GPUs."
)
SENDS_KEY = (
    "Arrow: from the stage at its foot the tile of A goes to the neighbour, not to the lane above. "
    "Colour: the step of the ring."
)


def tile_order(plan: Plan) -> list[tuple[int, int]]:
    """Returns row and column of every tile in the order of `plan`: CTA `c` has numbers `c`, `c + num_ctas`, ...."""
    shape = (plan.m_tiles, plan.n_tiles)
    place = lambda index: plgpu.planar_snake(index, shape, plan.config.grid_minor_dim, plan.config.grid_tile_width)
    rows, columns = jax.vmap(place)(jnp.arange(plan.tiles))
    return list(zip(np.asarray(rows).tolist(), np.asarray(columns).tolist(), strict=True))


@styled
def draw_tile_order(plans: Mapping[str, Plan], title: str, caption: str = ""):
    """Draws the tiles of the result, one panel per plan, each tile with the CTA that computes it.

    Args:
      plans: heading of the panel -> plan; at most 17 columns of tiles.
      title: the message of the figure.
      caption: what else a reader must know; the key to the signs is added.

    Returns:
      A `matplotlib.figure.Figure`.
    """
    height = sum(_ABOVE + plan.m_tiles * _CELL_HEIGHT for plan in plans.values()) + _BETWEEN * (len(plans) - 1)
    fig, bottom = page(height, title, "\n".join(filter(None, (caption, ORDER_KEY))))
    ax, top = inch_axes(fig), bottom + height
    for name, plan in plans.items():
        heading(ax, MARGIN, top - 0.15, name, size=SMALL_SIZE)
        _draw_tiles(ax, plan, top - _ABOVE)
        top -= _ABOVE + plan.m_tiles * _CELL_HEIGHT + _BETWEEN
    return fig


def _draw_tiles(ax, plan: Plan, top: float) -> None:
    left = MARGIN + _ROW_NAMES
    look = {"size": CAPTION_SIZE, "color": MUTED, "va": "center_baseline", "ha": "center"}
    for m in range(plan.m_tiles):
        ax.text(left - 0.13, top - (m + 0.5) * _CELL_HEIGHT, str(m), **look)
    for n in range(plan.n_tiles):
        ax.text(left + (n + 0.5) * _CELL_WIDTH, top + 0.1, str(n), **look)
    for number, (m, n) in enumerate(tile_order(plan)):
        rank, cta = divmod(number, plan.num_ctas)
        border = {"linewidth": 2, "zorder": 4} if n == 0 else {"linewidth": 0.5, "edgecolor": MUTED}
        # Column 0 stands a little inside of its place, so that thick borders of neighbours do not hide each other.
        inset = 0.015 if n == 0 else 0.0
        x, y = left + n * _CELL_WIDTH + inset, top - (m + 1) * _CELL_HEIGHT + inset
        size = (_CELL_WIDTH - 2 * inset, _CELL_HEIGHT - 2 * inset)
        block(ax, x, y, *size, tint(device_color(rank), 0.4), str(cta), CAPTION_SIZE, gid=f"tile-{m}-{n}", **border)


@dataclasses.dataclass(frozen=True)
class StageSpan:
    """What happens in one stage for some time.

    Attributes:
      stage: which one.
      use: number of the use of a stage, counted over all stages: use `u` takes place in stage `u % stages`.
      kind: "load" (both tiles), "multiply" (all multipliers), or "send", which has no end.
      begin_s, end_s: simulated times.
      step: step of the ring that the tile of A belongs to; 0 for a kernel without a ring.
    """

    stage: int
    use: int
    kind: str
    begin_s: float
    end_s: float
    step: int = 0


def stage_spans(events: Sequence[Event], stages: int, device: int = 0, cta: int = 0) -> list[StageSpan]:
    """Returns what happened in the stages of one CTA, from the events of one kernel call.

    It holds for kernels whose loader fills one stage after the other with two tiles, one of A and one of B, and whose
    multipliers take the stages in the same order.
    """
    mine = [e for e in events if (e.device, e.cta) == (device, cta)]
    by_start = lambda kind, thread=None: sorted(
        (e for e in mine if e.kind == kind and thread in (None, e.thread)), key=lambda e: (e.start_s, e.index)
    )
    loads = by_start("load")
    multipliers = sorted({e.thread for e in mine if e.kind == "tile_product"})
    products = list(zip(*(by_start("tile_product", thread) for thread in multipliers), strict=True))
    tiles = list(zip(loads[::2], loads[1::2], strict=True))
    # A shard that came over the ring lies in slot `step - 1`: the first axis of its region (`cmm.hopper.slots`).
    steps = [max(e.region[0][0] + 1 if len(e.region) > 2 else 0 for e in pair) for pair in tiles]
    spans = []
    for kind, groups in (("load", tiles), ("multiply", products)):
        for use, group in enumerate(groups):
            times = min(e.start_s for e in group), max(e.end_s for e in group)
            spans.append(StageSpan(use % stages, use, kind, *times, steps[use]))
    for e in by_start("send"):
        # The thread that sends has just started the product of the same use.
        use = sum(o.start_s <= e.start_s for o in by_start("tile_product", e.thread)) - 1
        spans.append(StageSpan(use % stages, use, "send", e.start_s, e.start_s, steps[use]))
    return spans


@styled
def draw_stages(recordings: Mapping[str, tuple[Sequence[Event], int]], title: str, caption: str = ""):
    """Draws what happened in the stages of CTA 0 of device 0, one panel per recording, all on one scale of time.

    Args:
      recordings: heading of the panel -> events of one kernel call, and its number of stages.
      title: the message of the figure.
      caption: what else a reader must know; the key to the signs is added.

    Returns:
      A `matplotlib.figure.Figure`.
    """
    panels = {name: (stage_spans(events, stages), stages) for name, (events, stages) in recordings.items()}
    spans = [span for found, _ in panels.values() for span in found]
    keys = [caption, STAGES_KEY] + [SENDS_KEY] * any(span.kind == "send" for span in spans)
    heights = [stages * _LANE for _, stages in panels.values()]
    height = sum(heights) + len(panels) * _PANEL_NAME
    fig, bottom = page(height, title, "\n".join(filter(None, keys)))
    left, top = MARGIN + _LANE_NAMES, bottom + height
    first, last = min(s.begin_s for s in spans), max(s.end_s for s in spans)
    limits = (first - 0.002 * (last - first), last + 0.002 * (last - first))
    for (name, (found, stages)), panel_height in zip(panels.items(), heights, strict=True):
        top -= panel_height + _PANEL_NAME
        place = (left, top + 0.1, WIDTH - left - MARGIN, panel_height)
        ax = axes_at(fig, *place, xlim=limits, ylim=(0, stages), frame_on=False, xticks=[], yticks=[])
        for text, x, y, style in [
            (name, MARGIN, panel_height + 0.12, {"weight": "bold"}),
            *((f"stage {i}", MARGIN, (stages - i - 0.5) * _LANE, {"va": "center_baseline"}) for i in range(stages)),
        ]:
            fig.text(x / WIDTH, (top + 0.1 + y) / fig.get_figheight(), text, size=SMALL_SIZE, **style)
        for stage in range(stages):
            block(ax, limits[0], stage + 0.05, limits[1] - limits[0], 0.9, TRACK, linewidth=0, zorder=1)
        for span in found:
            _draw_span(ax, span, stages - 1 - span.stage)
    return fig


def _draw_span(ax, span: StageSpan, low: float) -> None:
    color = device_color(span.step) if span.step else ACCENT
    if span.kind == "send":
        stop = (span.begin_s + 0.25 * _LANE / _inches_per_second(ax), low + 1.25)
        look = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.4, "color": INK, "shrinkA": 0, "shrinkB": 0}
        ax.add_artist(FancyArrowPatch((span.begin_s, low + 0.6), stop, zorder=6, clip_on=False, **look))
        return
    fill = tint(color, 0.3) if span.kind == "load" else color
    place = (span.begin_s, low + 0.05, span.end_s - span.begin_s, 0.9)
    block(ax, *place, fill, label=str(span.use), size=CAPTION_SIZE, linewidth=0.5, gid=f"{span.kind}-{span.use}")


def _inches_per_second(ax) -> float:
    left, right = ax.get_xlim()
    return ax.get_position().width * WIDTH / (right - left)
