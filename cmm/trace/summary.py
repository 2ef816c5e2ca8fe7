"""What does a recorded call of a ring kernel say in numbers?"""

import numpy as np

from cmm.hopper.marks import LOADER, MULTIPLIERS, SENDER
from cmm.trace.call import Trace


def summarize(trace: Trace) -> dict:
    """Returns the numbers of one call as plain data; all times in µs, shares from 0 to 1.

    Keys:
      call_us: for each device, from the begin of its first CTA to the end of its last.
      device_start_us, device_end_us: when that is, from the begin of the first device; off by `device_bound_us`.
      cta_start_spread_us, cta_end_spread_us: for each device, from the first CTA to the last.
      epilogue_us: rounding and storing one tile, or half of one.
      step_change_us: from the last product of a step to when the first of the next can start, for each multiplier.
      hidden_send_share: share of the time in which a CTA has stores to the neighbour under way that lies under its
        products. Waits for a full stage count as no product, as far as they were noted.
      waits: for each role and reason how often and how long; see `waits`.
      clock: how good the times are.
      causality: waits for signals that were checked, and by how much one ended before its signals at most.
    """
    times = trace.times
    begin, end = times.begin.min(axis=2), times.end.max(axis=2)
    checked, worst_ns = trace.causality()
    offsets = trace.offsets
    return {
        "simulated": trace.simulated,
        "call_us": _us(end.max(axis=1) - begin.min(axis=1)),
        "device_start_us": _us(begin.min(axis=1)),
        "device_end_us": _us(end.max(axis=1)),
        "device_bound_us": _us(trace.bounds_ns),
        "cta_start_spread_us": _us(np.ptp(begin, axis=1)),
        "cta_end_spread_us": _us(np.ptp(end, axis=1)),
        "epilogue_us": _spread(np.concatenate([_lengths(trace, "store", role) for role in (0, 1)])),
        "step_change_us": _spread(step_changes_ns(trace)),
        "hidden_send_share": round(float(hidden_send_share(trace)), 4),
        "every": trace.layout.every,
        "waits": waits(trace),
        "clock": {
            "source": [clock.source for clock in trace.clocks],
            "error_ns": [round(clock.error_ns, 1) for clock in trace.clocks],
            "cycles_per_ns": [round(clock.cycles_per_ns, 5) for clock in trace.clocks],
            "tick_ns": [clock.tick_ns for clock in trace.clocks],
            "tick_error_ns": [round(clock.tick_error_ns, 1) for clock in trace.clocks],
            "disagreement_ns": [round(clock.disagreement_ns, 1) for clock in trace.clocks],
            "pair_offset_ns": [round(value, 1) for value in offsets.pair_ns],
            "pair_bound_ns": [round(value, 1) for value in offsets.bound_ns],
            "closure_ns": round(offsets.closure_ns, 1),
            "closure_bound_ns": round(offsets.closure_bound_ns, 1),
        },
        "causality": {"checked": checked, "worst_ns": round(worst_ns, 1) if checked else None},
    }


def waits(trace: Trace) -> list[dict]:
    """Returns for each role and reason how often it was noted that it waits, and for how long.

    Each entry has `role`, `reason`, `count`, and unless that is 0 `mean_us`, `max_us`, and `per_cta_us`: the sum, for
    the mean of the CTAs that wait so. `sampled` says that only one of `trace.layout.every` waits was noted, so that the
    sum is a part of the whole; record with `every=1` for all of it.
    """
    sampled = trace.layout.every > 1
    rows = [
        ("loader", "empty stage", LOADER, ["empty"], sampled),
        ("loader", "signals", LOADER, ["ready"], False),
        ("multiplier 0", "full stage", 0, ["full"], sampled),
        ("multiplier 1", "full stage", 1, ["full"], sampled),
    ]
    if trace.layout.num_roles > SENDER:
        rows += [
            ("sender", "full stage", SENDER, ["full"], sampled),
            ("sender", "store read", SENDER, ["read"], sampled),
            ("sender", "store complete", SENDER, ["complete"], False),
        ]
    else:
        rows += [
            ("multiplier 0, column 0", "store read", MULTIPLIERS, ["send", "read"], sampled),
            ("multiplier 0, column 0", "store complete, signal", MULTIPLIERS, ["complete"], False),
        ]
    return [_wait(trace, *row) for row in rows]


def _wait(trace, role_name, reason, role, spans, sampled) -> dict:
    lengths = np.concatenate([_all_lengths(trace, span, role) for span in spans], axis=-1)
    noted = ~np.isnan(lengths)
    ctas, count = int(noted.any(axis=-1).sum()), int(noted.sum())
    entry = {"role": role_name, "reason": reason, "count": count, "sampled": sampled}
    if count:
        total_us, longest_us = float(np.nansum(lengths)) / 1e3, float(np.nanmax(lengths)) / 1e3
        entry |= {"mean_us": round(total_us / count, 4), "max_us": round(longest_us, 3)}
        entry |= {"per_cta_us": round(total_us / ctas, 3)}
    return entry


def step_changes_ns(trace: Trace) -> np.ndarray:
    """Returns the times from the last product of a step to when the first of the next one can start."""
    cells = trace.cells
    changes = []
    for role in (0, 1):
        done = trace.moments("done", role)
        starts = trace.spans("full", role)[1]
        for cta in np.flatnonzero(cells.exists.any(axis=1)):
            opening = np.flatnonzero(cells.opens_tile[cta])
            for before, after in zip(opening, opening[1:]):
                if cells.step[cta, after] > cells.step[cta, before]:
                    changes.append(starts[:, cta, after] - done[:, cta, before])
    return _known(changes)


def stretches_us(trace: Trace, device: int, cta: int) -> dict[str, float]:
    """Returns what one CTA does in a call of a ring kernel, one stretch after the other, by its two multipliers.

    Products of a tile last from the first of the multiplier that begins earlier to the last of the one that ends later.
    So a step change is a little shorter here than for each multiplier by itself (`step_changes_ns`), and what lies
    between two tiles is negative where one multiplier is a tile ahead.

    Args:
      trace: with all marks of this CTA.
      device, cta: a CTA that computes at least one tile.

    Returns:
      Time in µs by name. They add up to the time from the begin of the device's first CTA to the end of its last.
    """
    cells, begin, end = trace.cells, trace.times.begin[device] / 1e3, trace.times.end[device] / 1e3
    tiles = np.flatnonzero(cells.opens_tile[cta])
    at = lambda times: times[..., device, cta, tiles] / 1e3
    starts = np.minimum(*(at(trace.spans("full", role)[1]) for role in (0, 1)))
    done = np.maximum(*(at(trace.moments("done", role)) for role in (0, 1)))
    stored = at(np.fmax(*(trace.spans("store", role)[1] for role in (0, 1))))
    announced, (waits, goes_on) = at(trace.spans("complete", MULTIPLIERS)[1]), at(trace.spans("ready", LOADER))
    # Edges between the products of two tiles, in order. NaN: it does not happen here.
    edges = [done[:-1]]
    for edge in (stored[:-1], announced[:-1], waits[1:], goes_on[1:], starts[1:]):
        edges.append(np.clip(np.nan_to_num(edge), edges[-1], starts[1:]))
    epilogue, announcement, before, signals, after = np.diff(edges, axis=0)
    last, changes = cells.step[cta, tiles] == trace.layout.axis_size - 1, np.diff(cells.step[cta, tiles]) > 0
    stretches = {
        "begins later than the first CTA": begin[cta].min() - begin.min(),
        "until its first product": starts[0] - begin[cta].min(),
        "products, steps that send": (done - starts)[~last].sum(),
        "step change: epilogue": epilogue[changes].sum(),
        "step change: its stores arrive, it signals": announcement[changes].sum(),
        "step change: waits for signals": signals[changes].sum(),
        "step change: loads a first tile": (before + after)[changes].sum(),
        "between tiles of a step": (starts[1:] - done[:-1])[~changes].sum(),
        "products, last step": (done - starts)[last].sum(),
        "until it ends": end[cta].max() - done[-1],
        "ends earlier than the last CTA": end.max() - end[cta].max(),
    }
    return {name: float(time_us) for name, time_us in stretches.items()}


def links_us(trace: Trace, ctas) -> dict[str, float]:
    """Returns the chain of causes that makes the change from step 0 to step 1 in the readable kernel, link by link.

    Times of two devices are compared in one link only, `signal seen`. What timers are off against each other adds up to
    nothing around the ring, so its mean over devices does not hold it.

    Args:
      trace: of the readable kernel.
      ctas: which CTAs count; some of them must compute a tile of column 0 last in step 0, and some another one.

    Returns:
      Medians over these CTAs and all devices, in µs. By name: `column 0 is late`, `epilogue`, `sends arrive`, `signal
      seen` and `first tile loaded` are the links. `one product` is the time of one, and `loader is ahead` how long
      before a CTA's last product ends its loader asks for the next step.
    """
    cells, ctas = trace.cells, np.asarray(ctas)
    number = np.arange(cells.step.shape[1])
    at = lambda step, choose: [choose(number[cells.opens_tile[c] & (cells.step[c] == step)]) for c in ctas]
    last, first = at(0, max), at(1, min)  # The last tile of step 0, and the first one of step 1.
    column_0 = cells.n_tile[ctas, last] == 0
    done, begun = trace.moments("done", MULTIPLIERS)[:, ctas, last], trace.spans("full", MULTIPLIERS)[1][:, ctas, last]
    starts = trace.spans("full", MULTIPLIERS)[1][:, ctas, first]
    asks, sees = trace.spans("ready", LOADER)[:, :, ctas, first]
    arrives, signals = trace.spans("complete", MULTIPLIERS)[:, :, ctas, last]
    above = np.roll(signals[:, column_0].max(axis=1), -1)  # The last signal of the device that sends to this one.
    links = {
        "column 0 is late": np.median(done[:, column_0]) - np.median(done[:, ~column_0]),
        "epilogue": np.median((arrives - done)[:, column_0]),
        "sends arrive": np.median((signals - arrives)[:, column_0]),
        "signal seen": np.mean(np.median(sees, axis=1) - above),
        "first tile loaded": np.median(starts - sees),
        "one product": np.median((done - begun)[:, ~column_0]) / trace.layout.plan.k_steps,
        "loader is ahead": np.median((done - asks)[:, ~column_0]),
    }
    return {name: float(time_ns) / 1e3 for name, time_ns in links.items()}


def hidden_send_share(trace: Trace) -> float:
    """Returns the share of the time of sends that lies under products of the same CTA; NaN if nothing is sent."""
    cells = trace.cells
    full = [trace.spans("full", role) for role in (0, 1)]
    done = [trace.moments("done", role) for role in (0, 1)]
    per_tile = trace.layout.plan.k_steps // trace.layout.every
    by_cta: dict[tuple, list] = {}
    for event in trace.events(kinds=("send",)):
        by_cta.setdefault((event.device, event.cta), []).append((event.start_s * 1e9, event.end_s * 1e9))
    sent = hidden = 0.0
    for (device, cta), sends in by_cta.items():
        products = []
        for cell in np.flatnonzero(cells.exists[cta]):
            tile = cell - cells.k_step[cta, cell] // trace.layout.every
            last = cell + 1 == tile + per_tile
            for (waits, goes_on), finished in zip(full, done):
                end = finished[device, cta, tile] if last else waits[device, cta, cell + 1]
                products.append((goes_on[device, cta, cell], end))
        sends, products = _union(sends), _union(products)
        sent += sum(end - start for start, end in sends)
        hidden += sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sends for b in products)
    return hidden / sent if sent else float("nan")


def _union(intervals) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _all_lengths(trace, span, role) -> np.ndarray:
    begin, end = trace.spans(span, role)
    return end - begin


def _lengths(trace, span, role) -> np.ndarray:
    return _known(_all_lengths(trace, span, role))


def _known(values) -> np.ndarray:
    values = np.asarray(values, float).ravel()
    return values[~np.isnan(values)]


def _spread(values_ns) -> dict | None:
    if not len(values_ns):
        return None
    p10, median, p90 = np.percentile(values_ns, [10, 50, 90]) / 1e3
    named = {"median": median, "p10": p10, "p90": p90, "max": values_ns.max() / 1e3}
    return {name: round(float(value), 3) for name, value in named.items()} | {"count": len(values_ns)}


def _us(values_ns) -> list[float]:
    return [round(float(value) / 1e3, 3) for value in np.asarray(values_ns)]
