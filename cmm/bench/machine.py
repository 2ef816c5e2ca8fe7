"""`python -m cmm.bench.machine`: which kind of device is here? Asked in a process of its own.

JAX reserves most of the GPUs' memory in a process that has started it, and programs of others need it.
"""

import argparse
import sys

from cmm import devices
from cmm.bench.children import follow, python_module, say
from cmm.bench.processes import Refused

_SILENCE_S = 120


def device_kind(count: int, *, simulate: bool = False) -> str:
    """Returns the kind of this machine's devices as JAX names it. This process starts no JAX backend.

    Args:
      count: how many devices must be there.
      simulate: ask for simulated devices.

    Raises:
      Refused: there are not so many GPUs, or nobody can tell.
    """
    heard: list[dict] = []
    arguments = ["--devices", str(count), *["--simulate"] * simulate]
    trouble = follow(python_module("cmm.bench.machine", *arguments), heard.append, _SILENCE_S)
    for event in heard:
        match event:
            case {"event": "machine", "device_kind": kind}:
                return kind
            case {"event": "refused", "reason": reason}:
                raise Refused(reason)
    raise Refused(f"The kind of GPU on this machine cannot be found out: {trouble or 'no answer'}.")


def main(arguments=None) -> int:
    """Says the kind of device, or why there is none; returns 0 or 2."""
    parser = argparse.ArgumentParser(prog="python -m cmm.bench.machine", description=__doc__)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args(arguments)
    try:
        found = devices.gpus_or_simulated(options.devices, options.simulate, "Peers are measured on GPUs")
    except (ValueError, RuntimeError) as error:
        say("refused", reason=str(error))
        return 2
    say("machine", device_kind=found[0].device_kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
