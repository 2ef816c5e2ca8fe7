"""Where things stand on a drawn ring: cards of devices, and the curved ways between them. Lengths are in inches."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices on an ellipse, clockwise by number. Travelling "down", to `d - 1`, is anticlockwise.

    Attributes:
      axis_size: number of devices.
      center: middle of the ellipse.
      reach: distance from the middle to the outermost middles of cards, sideways and upwards.
      card: width and height of the card of a device.
      both_ways: whether shards travel in both directions, so that each pair of neighbours needs two ways.
    """

    axis_size: int
    center: tuple[float, float]
    reach: tuple[float, float]
    card: tuple[float, float]
    both_ways: bool = False

    def position(self, device: int) -> np.ndarray:
        """Returns the middle of the card of `device`."""
        if self.axis_size == 1:
            return np.array(self.center)
        directions = [self._direction(other) for other in range(self.axis_size)]
        low, high = np.min(directions, axis=0), np.max(directions, axis=0)
        # Stretch the circle until its outermost devices are as far out as the ring may reach, on all sides.
        span = np.where(high - low > 1e-9, high - low, np.inf)
        return np.array(self.center) + np.array(self.reach) * (2 * directions[device] - low - high) / span

    def _direction(self, device: int) -> np.ndarray:
        # An even ring lies with two devices on top, an odd one with a single device. Two devices stand side by side.
        start = 90 + (180 / self.axis_size if self.axis_size % 2 == 0 else 0)
        angle = math.radians(start - 360 * device / self.axis_size)
        return np.array((math.cos(angle), math.sin(angle)))

    def way(self, source: int, target: int, direction: str, gap: float = 0.05) -> "Way":
        """Returns the way of a shard from one card to the next, from `gap` off the first to `gap` off the second."""
        start, end = self.position(source), self.position(target)
        along = end - start
        right_hand = np.array((along[1], -along[0]))
        # Anticlockwise, the right-hand side is outside. With traffic both ways everyone keeps right, so the two
        # ways of a pair of neighbours bend apart; otherwise the only way bends outwards.
        side = 1 if direction == "down" or self.both_ways else -1
        control = (start + end) / 2 + side * self._bend(np.linalg.norm(along), direction) * right_hand
        return Way(start, control, end).between_cards(self.card, gap)

    def _bend(self, length: float, direction: str) -> float:
        """Returns how far the control point of a way stands aside, as a share of the way's length."""
        if self.axis_size == 2:
            # Down and up lead to the same neighbour then: the second way makes a wider bow around the first.
            wider = 0.62 if self.both_ways and direction == "up" else 0
            return 2 * (0.45 * self.card[1] + wider) / length
        return 0.22 if self.both_ways else 0.12


@dataclasses.dataclass(frozen=True)
class Way:
    """A curve from `start` to `end` that is drawn towards `control`: a quadratic Bezier curve."""

    start: np.ndarray
    control: np.ndarray
    end: np.ndarray

    def point(self, share) -> np.ndarray:
        """Returns the point at `share` of the curve's parameter, 0 to 1, or one row for each of several shares."""
        share = np.asarray(share)[..., None]
        rest = 1 - share
        return rest * rest * self.start + 2 * rest * share * self.control + share * share * self.end

    def beside(self, box, gap: float = 0.09) -> np.ndarray:
        """Returns the middle of a box of the given width and height that stands outside the middle of the bow."""
        outwards = self.control - (self.start + self.end) / 2
        outwards = outwards / np.linalg.norm(outwards)
        return self.point(0.5) + (gap + np.abs(outwards) @ np.array(box) / 2) * outwards

    def between_cards(self, card, gap: float) -> "Way":
        """Returns the part of the curve that is at least `gap` away from the cards around its ends, or its middle."""
        half = np.array(card) / 2 + gap
        shares = np.linspace(0, 1, 401)
        points = self.point(shares)
        outside = [(np.abs(points - end) > half).any(axis=1) for end in (self.start, self.end)]
        clear = shares[np.logical_and(*outside)]
        return self._between(clear[0], clear[-1]) if len(clear) else self._between(0.5, 0.5)

    def _between(self, low: float, high: float) -> "Way":
        """Returns the part of the curve between two shares, itself such a curve (blossoming)."""
        mixed = (1 - low) * (1 - high) * self.start + (low + high - 2 * low * high) * self.control
        return Way(self.point(low), mixed + low * high * self.end, self.point(high))
