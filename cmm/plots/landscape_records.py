"""What did a search over configurations find? What the record of a search says, in the order of the figure."""

import math
import types

from cmm.hopper.config import H100_MULTIPROCESSORS
from cmm.measure import spread
from cmm.peers.jax_example import PUBLISHED_CONFIG
from cmm.report import is_wrong
from cmm.results import Run
from cmm.roofline import MACHINES_BY_DEVICE_KIND, Problem
from cmm.rungs import RUNGS
from cmm.tune.tunable import TUNABLES
from cmm.winners import config_fields

# The fields of a configuration that are the same in all trials of a group. Others order its tiles, or its sends.
GROUP_FIELDS = ("tile_m", "tile_n", "tile_k", "max_concurrent_steps", "wg_dimension", "epi_tile_m", "epi_tile_n")


def landscape_data(record: dict, run: Run | None = None) -> dict:
    """Returns what `cmm.plots.landscape.draw_landscape` draws: each trial with its times, and what is said of them.

    Rows are in the order of the figure: groups by their first trial in the record, which lists finalists first, and
    trials within a group as in the record. `is_untuned` marks the configuration that this version of the package takes
    where nobody has searched. The record does not say which one was that then.

    Args:
      record: of a search on GPUs (see `cmm.tune.tuning_record`), with one trial or more.
      run: of the same problem on GPUs of the same kind; its fastest GEMM only becomes the dashed line.

    Raises:
      ValueError: the record is not one of GPUs, or has no trial.
    """
    if not is_drawn(record):
        raise ValueError("The figure needs a search that was made on GPUs, with one configuration or more that ran.")
    untuned = _untuned(record)
    winner = next((trial for trial in record["trials"] if trial["rounds_us"]), None)
    groups: dict[tuple, list[dict]] = {}
    for trial in record["trials"]:
        times = spread(trial["rounds_us"]) if trial["rounds_us"] else None
        row = trial | {"p10_us": times and times.p10, "p90_us": times and times.p90}
        row |= {"is_winner": trial is winner, "is_untuned": trial["config"] == untuned}
        groups.setdefault(tuple(trial["config"][name] for name in GROUP_FIELDS), []).append(row)
    rows = [row | {"group": number} for number, group in enumerate(groups.values()) for row in group]
    ratio = _untuned_over_winner(rows)
    titles = {rung.name: rung.title for rung in RUNGS}
    own = {"title": titles.get(record["kernel"], record["kernel"]), "headline": _headline(rows, ratio)}
    own |= {"untuned_over_winner": ratio, "gemm_only": _gemm_only(run), "rows": rows}
    data = own | {name: value for name, value in record.items() if name != "trials"}
    return data | {"caption": _caption(data)}


def is_drawn(record: dict) -> bool:
    """Whether a search was made on GPUs, and something ran."""
    # The search refuses other devices than GPUs, so its record has no word for simulated ones.
    return "cuda" in record["machine"]["backend"] and bool(record["trials"])


def is_same_work(run: Run, record: dict) -> bool:
    """Whether a run has measured the problem of a search on GPUs of the same kind."""
    kind = record["machine"]["device_kind"]
    return not run.simulated and run.problem == Problem(**record["problem"]) and run.machine["device_kind"] == kind


def _untuned(record) -> dict | None:
    """Returns the configuration that is taken where nobody has searched; `None` if that cannot be known."""
    kind, kernel = record["machine"]["device_kind"], record["kernel"]
    if kernel == "jax_example":
        return config_fields(PUBLISHED_CONFIG)  # No trial has it if its tiles do not divide the shapes.
    if kernel not in TUNABLES or kind not in MACHINES_BY_DEVICE_KIND:
        return None  # The choice depends on the number of multiprocessors.
    gpu = types.SimpleNamespace(core_count=H100_MULTIPROCESSORS)  # As many as the H200 has.
    first = next(iter(TUNABLES[kernel].candidates(Problem(**record["problem"]), gpu)), None)
    return first and config_fields(first)


def _gemm_only(run) -> dict | None:
    result = next((result for result in run.methods if result.name == run.gemm_only), None) if run else None
    if result is None or result.kernel_time_us is None or result.is_incomplete or is_wrong(run, result):
        return None
    return {"title": result.title, "time_us": result.kernel_time_us.median, "date": run.date, "source": run.caption()}


def _find(rows, name) -> dict | None:
    return next((row for row in rows if row[name]), None)


def _untuned_over_winner(rows) -> dict | None:
    """Returns the ratio of their times within a round; `None` unless both were compared and differ."""
    winner, untuned = _find(rows, "is_winner"), _find(rows, "is_untuned")
    if winner is None or untuned is None or untuned is winner or not untuned["rounds_us"]:
        return None
    pairs = zip(untuned["rounds_us"], winner["rounds_us"], strict=True)
    ratios = spread([own_us / best_us for own_us, best_us in pairs])
    return {"median": ratios.median, "p10": ratios.p10, "p90": ratios.p90}


def _headline(rows, ratio) -> str:
    """Returns the title: what the search gains over the choice without one, and what the worst choice costs."""
    best, untuned = _find(rows, "is_winner"), _find(rows, "is_untuned")
    if best is None:
        return "No configuration that was tried gives a right result"
    if best["right"] is False:
        return f"The fastest of {len(rows)} configurations gives a wrong result"
    others = [row for row in rows if row["right"] is not False]
    if untuned and untuned["right"] is False:
        return f"Without a search the result is wrong; the best of {len(others)} takes {best['time_us']:.1f} µs"
    if len(others) == 1:
        return f"{'The choice without a search' if untuned else 'One configuration'} alone gives a right result"
    factor = max(row["time_us"] for row in others) / best["time_us"]
    worst = f"worst: {factor:.{1 if factor >= 1.1 else 2}f} times as long"
    if untuned is None:
        return f"The best of {len(others)} configurations: {best['time_us']:.1f} µs; {worst}"
    if untuned is best:
        return f"The choice without a search is the best of {len(others)}; {worst}"
    slower = 100 * (untuned["time_us"] / best["time_us"] - 1)
    if ratio and ratio["p10"] <= 1:
        # There are rounds in which it is no slower: the medians do not tell them apart.
        return f"Without a search: within {math.ceil(10 * slower) / 10:.1f} % of the best of {len(others)}; {worst}"
    return f"Without a search: {slower:.1f} % slower than the best of {len(others)}; {worst}"


def _caption(data) -> str:
    rows, title = data["rows"], data["title"]
    rounds = max(len(row["rounds_us"]) for row in rows)
    lines = [f"{title[0].upper()}{title[1:]}: {len(rows)} configurations, kernel time of one call, slowest GPU."]
    if rounds:
        lines.append(
            f"Filled: result checked, median over {rounds} rounds, interleaved; whiskers: 10th to 90th percentile."
        )
    if any(not row["rounds_us"] for row in rows):
        lines.append("Hollow: one short trial, less certain; unless crossed, the result was not checked.")
    lines.append(_about_untuned(data))
    if data["skipped"]:
        lines.append(f"Do not fit: {len(data['skipped'])} more.")
    if data["stopped"]:
        lines.append("The search was stopped before it was through.")
    columns = [
        "Tile: of one warpgroup. Warpgroups: the dimension that the two of a CTA share. Order: the dimension along "
        "which tiles follow each other, and how many wide."
    ]
    if any("chunks" in row["config"] for row in rows):
        columns.append(
            "Chunks: parts of a row of tiles, announced one by one; lag: products until then; auto: by the shape."
        )
    p, kind, jax_version = data["problem"], data["machine"]["device_kind"], data["versions"]["jax"]
    measured = [
        f"Measured: {p['axis_size']} x {kind}, JAX {jax_version}, {p['dtype']}, per shard M={p['m_shard']} K={p['k']} "
        f"N={p['n_shard']}, {data['distribution']}, {data['date']}; one process, chains of calls on distinct operands."
    ]
    if data["gemm_only"]:
        measured.append(f"GEMM only: from the comparison of all methods, {data['gemm_only']['date']}.")
    return "\n".join(" ".join(filter(None, part)) for part in (lines, columns, measured))


def _about_untuned(data) -> str:
    untuned, ratio = _find(data["rows"], "is_untuned"), data["untuned_over_winner"]
    if untuned is None:
        return ""
    text = "Without a search: what this version of the package takes for shapes that nobody has searched"
    if data["kernel"] == "jax_example":
        text = "Without a search: the example's choice for the published shape"
    if ratio:
        spread_text = f"{ratio['median']:.3f} ({ratio['p10']:.3f} to {ratio['p90']:.3f})"
        return f"{text}; within a round {spread_text} times the winner."
    return text + ("." if untuned["rounds_us"] else "; not among those compared in rounds.")
