"""On what machine, and with which versions, was this run?"""

import platform

import jax
import jaxlib
import numpy as np


def machine(mesh) -> dict[str, str]:
    """Returns what identifies the machine of `mesh`: kind of device, backend and host system."""
    device = mesh.devices.flat[0]
    return {
        "device_kind": device.device_kind,
        "backend": device.client.platform_version.replace("\n", " "),
        "host": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide on results and times."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }
