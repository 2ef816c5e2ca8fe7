"""Can the GPUs of this process read and write each other's memory?"""

import ctypes
import functools
import itertools

import jax

_DRIVER = "libcuda.so.1"


@functools.cache  # The answer stays; asking for 8 GPUs takes 56 calls of the driver.
def pair_without_peer_access() -> tuple[int, int] | None:
    """Returns the CUDA ordinals of two GPUs of which the first has no peer access to the second, or `None`.

    Without GPUs there is no such pair. Asks the CUDA driver: JAX has no function for it.
    """
    if jax.default_backend() != "gpu":
        return None
    ordinals = [device.local_hardware_id for device in jax.local_devices()]
    driver = ctypes.CDLL(_DRIVER)
    for pair in itertools.permutations(ordinals, 2):
        if not _can_access(driver, *pair):
            return pair
    return None


def _can_access(driver, ordinal: int, peer: int) -> bool:
    answer = ctypes.c_int(0)
    error = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), ctypes.c_int(ordinal), ctypes.c_int(peer))
    if error:
        raise RuntimeError(f"cuDeviceCanAccessPeer({ordinal}, {peer}) failed with CUDA error {error}.")
    return bool(answer.value)
