"""Who holds what: how the three matrices of a collective matmul lie over the devices of a mesh axis."""

import dataclasses

from cmm.plots.palette import LABEL_SIZE, MUTED, SMALL_SIZE, device_color, styled, tint
from cmm.plots.shapes import MARGIN, block, hatched, heading, inch_axes, lhs_name, out_name, page, rhs_name

# Heights and widths of the three matrices, in inches. They are not equal, so that each edge has a recognizable length.
_M, _K, _N = 1.6, 1.4, 1.95
_GAP = 0.68
_COLUMN = 1.0
_LEFT = MARGIN + 0.35


@dataclasses.dataclass(frozen=True)
class _Place:
    """Lower left corner of a matrix, its width and its height, in inches."""

    x: float
    y: float
    width: float
    height: float


def layout_data(axis_size: int, device: int = 0) -> dict:
    """Returns what `draw_layout` draws: the owner of every block, and what `device` has and lacks.

    Args:
      axis_size: number of devices along the mesh axis, at least 1.
      device: the device whose work is shown in the lower half.

    Raises:
      ValueError: `axis_size` is below 1, or there is no such device.
    """
    if not 0 <= device < axis_size:
        raise ValueError(f"device must be between 0 and axis_size - 1 = {axis_size - 1}, got {device}.")
    owners = list(range(axis_size))
    return {
        "axis_size": axis_size,
        "lhs_rows_by_device": owners,
        "rhs_columns_by_device": owners,
        "out_columns_by_device": owners,
        "device": device,
        "holds_lhs": [device],
        "needs_lhs": owners,
        "lacks_lhs": [shard for shard in owners if shard != device],
        "source": "the definition: C = AllGather(A) @ B with A[M_X, K], B[K, N_X], C[M, N_X]",
    }


@styled
def draw_layout(axis_size: int = 4, device: int = 0):
    """Draws the layout of `A[M_X, K]`, `B[K, N_X]` and `C[M, N_X]`, and which blocks of A one device lacks.

    Args:
      axis_size: number of devices along the mesh axis.
      device: the device whose work is shown in the lower half.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ValueError: `axis_size` is below 1, or there is no such device.

    Source: notation as in "How to Scale Your Model" (Austin et al., 2025): a subscript names the mesh axis by which a
    dimension is split.
    """
    data = layout_data(axis_size, device)
    if data["lacks_lhs"]:
        title = f"A device holds 1 of {axis_size} row blocks of A, and needs them all"
    else:
        title = "One device holds everything that it needs"
    caption = (
        "A subscript X marks the dimension that is split over mesh axis X. "
        "Above, colour and number name the device that holds a block. "
        f"Below, a row block of {out_name(device)} takes the colour of the block of A that it is made from."
    )
    fig, bottom = page(5.3, title, caption)
    ax = inch_axes(fig)
    _draw_holdings(ax, data, bottom + 2.98)
    _draw_needs(ax, data, bottom + 0.18)
    return fig


def _draw_holdings(ax, data: dict, bottom: float):
    """Draws the three matrices, each block in the colour of the device that holds it."""
    heading(ax, MARGIN, bottom + _M + 0.5, "What each device holds")
    lhs, rhs, out = _places(bottom, (_K, _N, _N))
    _operators(ax, (lhs, rhs, out))
    _rows(ax, lhs, "holds-lhs", [(owner, lhs_name(owner), False) for owner in data["lhs_rows_by_device"]])
    _columns(ax, rhs, "holds-rhs", [(owner, rhs_name(owner)) for owner in data["rhs_columns_by_device"]])
    _columns(ax, out, "holds-out", [(owner, out_name(owner)) for owner in data["out_columns_by_device"]])
    names = ("$A[M_X, K]$", "$B[K, N_X]$", "$C[M, N_X]$")
    for place, name, split in zip((lhs, rhs, out), names, ("rows", "columns", "columns"), strict=True):
        _name(ax, place, name)
        _note(ax, place.x + place.width / 2, bottom - 0.12, f"{split} split over X", ha="center", va="top")


def _draw_needs(ax, data: dict, bottom: float):
    """Draws the product of one device: all rows of A times its own columns of B."""
    device = data["device"]
    heading(ax, MARGIN, bottom + _M + 0.5, f"What device {device} needs for its columns of C")
    lhs, rhs, out = _places(bottom, (_K, _COLUMN, _COLUMN))
    _operators(ax, (lhs, rhs, out))
    needs = data["needs_lhs"]
    _rows(ax, lhs, "needs-lhs", [(shard, lhs_name(shard), shard in data["lacks_lhs"]) for shard in needs])
    _columns(ax, rhs, "needs-rhs", [(device, rhs_name(device))])
    _rows(ax, out, "makes-out", [(shard, lhs_name(shard) + rhs_name(device), False) for shard in needs])
    for place, name in ((lhs, "A"), (rhs, f"B_{{{device}}}"), (out, f"C_{{{device}}}")):
        _name(ax, place, f"${name}$")
    _note(ax, out.x + out.width + 0.3, bottom + _M, _explanation(data), va="top", linespacing=1.5)


def _explanation(data: dict) -> str:
    device, lacks = data["device"], data["lacks_lhs"]
    if not lacks:
        return "Nothing has to travel."
    alone = len(lacks) == 1
    hatched_blocks = "1 block of A\non the other device" if alone else f"{len(lacks)} blocks of A\non other devices"
    they, them = ("It", "it") if alone else ("They", "them")
    return (
        f"Solid: on device {device}.\nHatched: {hatched_blocks}.\n"
        f"{they} must travel before\ndevice {device} can multiply\n{them} by {rhs_name(device)}."
    )


def _places(bottom: float, widths) -> list[_Place]:
    """Returns the places of `lhs @ rhs = out` in a row; their middles are level."""
    places, x = [], _LEFT
    for width, height in zip(widths, (_M, _K, _M), strict=True):
        places.append(_Place(x, bottom + (_M - height) / 2, width, height))
        x += width + _GAP
    return places


def _operators(ax, places):
    for place, sign in zip(places, ("@", "="), strict=False):
        middle = place.y + place.height / 2
        ax.text(place.x + place.width + _GAP / 2, middle, sign, size=16, ha="center", va="center_baseline")


def _rows(ax, place: _Place, gid: str, rows):
    """Cuts a matrix into row blocks, the first on top. Each row: owner, label, and whether it is missing."""
    height = place.height / len(rows)
    for index, (owner, label, missing) in enumerate(rows):
        color = device_color(owner)
        y = place.y + place.height - (index + 1) * height
        look = hatched(tint(color, 0.75), tint(color, 0.12)) if missing else {}
        block(ax, place.x, y, place.width, height, color, label, _label_size(height), gid=f"{gid}-{owner}", **look)


def _columns(ax, place: _Place, gid: str, columns):
    width = place.width / len(columns)
    for index, (owner, label) in enumerate(columns):
        x = place.x + index * width
        look = (device_color(owner), label, _label_size(width))
        block(ax, x, place.y, width, place.height, *look, gid=f"{gid}-{owner}")


def _label_size(room: float) -> float:
    """Returns a font size that fits into a block of `room` inches."""
    return LABEL_SIZE if room > 0.26 else SMALL_SIZE - 1


def _name(ax, place: _Place, text: str):
    ax.text(place.x + place.width / 2, place.y + place.height + 0.12, text, ha="center", va="baseline", size=LABEL_SIZE)


def _note(ax, x, y, text, **settings):
    ax.text(x, y, text, size=SMALL_SIZE, color=MUTED, **settings)
