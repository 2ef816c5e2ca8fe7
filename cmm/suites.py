"""Which problems are worth tuning and measuring together?"""

from collections.abc import Callable

from cmm.roofline import Problem

# Hidden size and width of the MLP. Source: "The Llama 3 Herd of Models" (Grattafiori et al., 2024), table 3.
_LLAMA3 = {"llama3-8b": (4096, 14336), "llama3-70b": (8192, 28672), "llama3-405b": (16384, 53248)}
_LLAMA3_ROWS = (4096, 8192)
_SWEEP_ROWS = tuple(2**power for power in range(4, 14))


def suite(name: str, axis_size: int, dtype: str | None = None) -> list[Problem]:
    """Returns the problems of a suite on `axis_size` devices.

    - `W1`: per shard 1024 x 4096 x 4096, the shapes of the published table, in float16 and bfloat16.
    - `llama3-8b`, `llama3-70b`, `llama3-405b`: the up-projection of the MLP with tensor parallelism over all devices,
      for 4096 and 8192 rows in all, bfloat16. Gate and up-projection read the same rows, and a model may fuse them into
      one product with twice the columns. Here they are not fused: it is the up-projection alone.
    - `m-sweep`: 16 to 8192 rows per shard in powers of two, 4096 x 4096 weights per shard, float16.

    Args:
      name: one of `SUITES`.
      axis_size: number of devices.
      dtype: takes the place of the suite's own dtypes.

    Raises:
      ValueError: there is no such suite, or its rows or columns do not divide by `axis_size`.
    """
    if name not in SUITES:
        raise ValueError(f"There is no suite {name!r}. Known suites: {', '.join(SUITES)}.")
    return SUITES[name](axis_size, (dtype,) if dtype else None)


def _w1(axis_size, dtypes):
    return [Problem(axis_size, 1024, 4096, 4096, dtype) for dtype in dtypes or ("float16", "bfloat16")]


def _llama3(name):
    k, n = _LLAMA3[name]

    def problems(axis_size, dtypes):
        for size, what in ((n, "columns of the weights"), *((m, "rows") for m in _LLAMA3_ROWS)):
            if size % axis_size:
                raise ValueError(f"{name}: {size} {what} do not divide by {axis_size} devices. Try 1, 2, 4 or 8.")
        return [
            Problem(axis_size, m // axis_size, k, n // axis_size, dtype)
            for dtype in dtypes or ("bfloat16",)
            for m in _LLAMA3_ROWS
        ]

    return problems


def _m_sweep(axis_size, dtypes):
    return [Problem(axis_size, m, 4096, 4096, dtype) for dtype in dtypes or ("float16",) for m in _SWEEP_ROWS]


SUITES: dict[str, Callable[[int, tuple[str, ...] | None], list[Problem]]] = {
    "W1": _w1,
    **{name: _llama3(name) for name in _LLAMA3},
    "m-sweep": _m_sweep,
}
