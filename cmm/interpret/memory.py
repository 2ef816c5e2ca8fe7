"""Buffers of the simulated machine, and views into them."""

from __future__ import annotations

import math

import numpy as np

from cmm.interpret import races

# How a buffer is laid out, not what it holds. Buffers here have the logical
# shape, so these views change nothing.
_LAYOUT_VIEWS = ("UnswizzleRef", "UntilingTransform", "ExpandLeadingBatchDimensionsTransform")


class Buffer:
    """An array in global or shared memory, or in a thread's registers.

    Args:
      name: how messages call it.
      space: "gmem", "smem" or "regs".
      device: the device that owns it.
      content: the array, of the logical shape.
      cta: the CTA that owns it, None for global memory.
      check_loads: see `races.History`.
    """

    def __init__(self, name, space, device, content, cta=None, check_loads=False):
        self.name = name
        self.space = space
        self.device = device
        self.cta = cta
        self.content = content
        self.history = races.History(name, proxies=space == "smem", check_loads=check_loads)
        # The same buffer on every device, by device id; global memory only.
        self.peers: list[Buffer] | None = None


class SemaphoreArray:
    """Semaphores of one allocation on one device."""

    def __init__(self, device, shape, semaphores):
        self.device = device
        self.shape = shape
        self.items = semaphores
        self.peers: list[SemaphoreArray] | None = None


class BarrierArray:
    """Barriers of one allocation in one CTA."""

    def __init__(self, shape, barriers):
        self.shape = shape
        self.items = barriers


def uninitialized(shape, dtype) -> np.ndarray:
    """What memory holds before anyone writes it: NaN, or the largest integer."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.full(shape, np.iinfo(dtype).max, dtype)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    return np.full(shape, np.nan).astype(dtype)


class View:
    """Part of a buffer, as an access names it.

    Attributes:
      buffer: the buffer, on the device that the access goes to.
      region: the part of the buffer, one (start, stop) pair per axis.
      shape: shape of the values that the access moves.
      num_bytes: their size.
    """

    def __init__(self, buffer: Buffer):
        self.buffer = buffer
        # Per axis of the buffer: a slice (start, size, stride) or an index.
        self._parts: list = [(0, n, 1) for n in buffer.content.shape]
        self._axes = list(range(buffer.content.ndim))  # Visible axes, in order.

    def index(self, indices) -> None:
        dropped = []
        for axis, i in zip(self._axes, indices, strict=True):
            start, _, stride = self._parts[axis]
            if hasattr(i, "size") and hasattr(i, "start"):
                self._parts[axis] = (start + int(i.start) * stride, int(i.size), stride * int(i.stride))
                continue
            if np.ndim(i):
                raise NotImplementedError("indexing a reference with an array")
            self._parts[axis] = start + int(i) * stride
            dropped.append(axis)
        self._axes = [a for a in self._axes if a not in dropped]

    def transpose(self, permutation) -> None:
        self._axes = [self._axes[int(p)] for p in permutation]

    @property
    def region(self) -> races.Region:
        return tuple(
            (p, p + 1) if isinstance(p, int) else (p[0], p[0] + max(0, (p[1] - 1) * p[2] + 1) if p[1] else p[0])
            for p in self._parts
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._parts[a][1] for a in self._axes)

    @property
    def in_bounds(self) -> bool:
        return all(0 <= s and e <= n for (s, e), n in zip(self.region, self.buffer.content.shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.buffer.content.dtype.itemsize

    def _slices(self):
        parts = (p if isinstance(p, int) else slice(max(p[0], 0), p[0] + p[1] * p[2], p[2]) for p in self._parts)
        return (*parts, ...)  # The dots make a view of a single element, too, which can be written to.

    def _array(self) -> np.ndarray:
        kept = sorted(self._axes)
        return self.buffer.content[self._slices()].transpose([kept.index(a) for a in self._axes])

    def read(self, pad: bool = False) -> np.ndarray:
        """The values, copied. `pad`: zeros outside the buffer, as TMA does.

        Raises:
          IndexError: part of the view lies outside and `pad` is false.
        """
        if self.in_bounds:
            return self._array().copy()
        self._refuse(not pad, "read")
        values = np.zeros(self.shape, self.buffer.content.dtype)
        inside = self._array()
        values[tuple(slice(n) for n in inside.shape)] = inside
        return values

    def write(self, values, clip: bool = False) -> None:
        """Stores values. `clip`: drops what lies outside, as TMA does.

        Raises:
          IndexError: part of the view lies outside and `clip` is false.
        """
        if not self.in_bounds:
            self._refuse(not clip, "write")
            values = values[tuple(slice(n) for n in self._array().shape)]
        self._array()[...] = values

    def _refuse(self, refuse: bool, what: str) -> None:
        if refuse or any(s < 0 for s, _ in self.region):
            raise IndexError(
                f"{what} of {self.buffer.name} {self.region} is out of bounds: the"
                f" buffer has shape {self.buffer.content.shape}"
            )


def view_of(buffer: Buffer, views, logical_device) -> View:
    """Applies the views of a reference, outermost first.

    Args:
      buffer: what the reference names.
      views: JAX's transforms, told apart by class name.
      logical_device: turns the device id of a peer view into a device number.
    """
    view = View(buffer)
    for transform in views:
        kind = type(transform).__name__
        if kind in _LAYOUT_VIEWS:
            continue
        elif kind == "NDIndexer":
            view.index(transform.indices)
        elif kind == "TransposeTransform":
            view.transpose(transform.permutation)
        elif kind == "PeerMemRef":
            if buffer.peers is None:
                raise ValueError(
                    f"remote_ref of {buffer.name}: only the kernel's inputs and"
                    " outputs in global memory exist on every device"
                )
            view.buffer = buffer.peers[logical_device(transform.device_id, transform.device_id_type)]
        else:
            raise NotImplementedError(f"a view of a reference by {kind} is not simulated")
    return view


def pick(array, views):
    """The one semaphore or barrier that an access to an array of them names.

    As on a GPU, an axis that is not indexed, or only sliced, means its start.
    """
    index = []
    for transform in views:
        if type(transform).__name__ == "PeerMemRef":
            raise NotImplementedError("a remote semaphore is named by device_id=, not by remote_ref")
        if type(transform).__name__ != "NDIndexer":
            raise NotImplementedError(f"a semaphore or barrier viewed by {type(transform).__name__}")
        for i in transform.indices:
            index.append(int(i.start) if hasattr(i, "size") and hasattr(i, "start") else int(i))
    if len(index) < len(array.shape):
        rest = array.shape[len(index) :]
        if any(n != 1 for n in rest):
            raise ValueError(f"index {tuple(index)} names more than one of the {array.shape} semaphores or barriers")
        index += [0] * len(rest)
    for i, n in zip(index, array.shape, strict=True):
        if not 0 <= i < n:
            raise IndexError(f"index {tuple(index)} of {array.shape} semaphores or barriers is out of bounds")
    return array.items[int(np.ravel_multi_index(index, array.shape)) if array.shape else 0]
