"""Animated GIF files that are small, keep the colours of the palette, and do not change without reason."""

import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

_COLORS = 128


def write_gif(path, frames: Sequence[Image.Image], durations_ms: Sequence[int]) -> None:
    """Writes an animation that repeats for ever. Its frames share one palette of their most frequent colours.

    Args:
      path: file to write; its folder is made if needed.
      frames: pictures of equal size in RGB.
      durations_ms: how long each is shown.
    """
    packed = [np.asarray(frame).astype(np.uint32) @ np.array((1 << 16, 1 << 8, 1), np.uint32) for frame in frames]
    colors, counts = np.unique(np.stack(packed[:: max(1, len(packed) // 8)]), return_counts=True)
    palette = colors[np.argsort(-counts, kind="stable")[:_COLORS]]
    index_of = np.full(1 << 24, -1, np.int16)
    flat = []
    for picture in packed:
        new = np.unique(picture[index_of[picture] < 0])
        distances = np.abs(_channels(new)[:, None] - _channels(palette)[None]).sum(axis=-1)
        index_of[new] = distances.argmin(axis=1)
        flat.append(Image.fromarray(index_of[picture].astype(np.uint8)))
        flat[-1].putpalette(_channels(palette).astype(np.uint8).tobytes())
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    flat[0].save(path, save_all=True, append_images=flat[1:], duration=list(durations_ms), loop=0)


def _channels(packed) -> np.ndarray:
    """Returns packed colours as rows of red, green and blue."""
    return np.stack([packed >> shift & 255 for shift in (16, 8, 0)], axis=-1).astype(np.int32)
