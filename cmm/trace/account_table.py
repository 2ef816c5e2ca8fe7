"""How does an account look in a terminal?"""

from rich.console import Console
from rich.table import Table

from cmm.results import Spread
from cmm.trace.account import INSIDE, NOT_ATTRIBUTED, TERMS, Account, MethodAccount


def print_account(console: Console, account: Account) -> None:
    """Prints one table of all methods, and for each ring kernel the sum of its kernel time."""
    console.rule(account.caption())
    table = Table(title="µs per call in a program, by the host's clock; medians")
    table.add_column("", no_wrap=True)
    for method in account.methods:
        table.add_column(method.title, justify="right")
    rows = {"total": [_median(method.wall_us) for method in account.methods]}
    rows["GEMM only"] = [_median(account.gemm_only_us)] * len(account.methods)
    with_cause = [name for name in TERMS if name not in NOT_ATTRIBUTED]
    for name in (*with_cause, *NOT_ATTRIBUTED):
        if any(name in method.terms for method in account.methods):
            title = TERMS[name][0] + " (not attributed)" * (name in NOT_ATTRIBUTED)
            rows[title] = [_median(method.terms.get(name)) for method in account.methods]
    rows["unexplained"] = [_median(method.rest_us) for method in account.methods]
    sums = [method.sums() for method in account.methods]
    rows["not attributed and unexplained"] = [
        f"{of.not_attributed_us + method.rest_us.median:.2f}" for of, method in zip(sums, account.methods)
    ]
    rows["sum of absolute terms"] = [f"{of.absolute_us:.2f}" for of in sums]
    for title, cells in rows.items():
        table.add_row(title, *cells, end_section=title in ("total", "GEMM only", "unexplained"))
    console.print(table)
    for method in account.methods:
        if method.kernel:
            _print_kernel(console, method)
    for name, reason in account.skipped.items():
        console.print(f"[yellow]{name}: {reason}", highlight=False, soft_wrap=True)


def _print_kernel(console, method: MethodAccount) -> None:
    kernel = method.kernel
    terms = {name: method.terms[name].median for name in INSIDE}
    sums = method.sums(INSIDE)
    largest = sorted(terms, key=lambda name: -abs(terms[name]))[:5]
    console.print(
        f"{method.title}: kernel {method.kernel_us.median:.2f} µs, beyond GEMM only {_text(kernel.difference_us)} µs, "
        f"sum of terms {_text(kernel.explained_us)}, rest {_text(kernel.rest_us)}: the sum covers "
        f"{100 * kernel.share:.0f} %. That says how well recorded calls stand for usual ones, of the kernel and of its "
        f"twin, since parts of a call add up to it whatever they are. With a cause {sums.attributed_us:+.2f}, not "
        f"attributed {sums.not_attributed_us:+.2f}, absolute terms {sums.absolute_us:.2f} together. "
        f"Largest: {', '.join(f'{TERMS[name][0]} {terms[name]:+.2f}' for name in largest)}. "
        f"{kernel.recorded_calls} calls recorded, which lengthens them by {_text(kernel.recording_us)} µs more than "
        f"the twin's; times within a device are off by {kernel.clock_error_ns:.0f} ns at most, devices by "
        f"{kernel.device_bound_ns:.0f} ns.",
        highlight=False,
        soft_wrap=True,
    )


def _median(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.2f}"


def _text(value: Spread) -> str:
    return f"{value.median:.2f} ({value.p10:.2f} to {value.p90:.2f})"
