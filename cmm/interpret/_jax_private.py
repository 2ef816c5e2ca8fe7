"""All that this package takes from inside JAX, checked in one place.

The rest of the package knows JAX's kernels only as data: equations, told apart
by the names of their primitives, and views of references, told apart by the
names of their classes. What has no public name is gathered here:

- the hook: the setting that asks for interpretation, the parameter class that
  selects the Mosaic GPU interpreter, and the function that is called for it;
- the names and sizes of the mesh axes around a kernel;
- the type of a view of a reference, to learn the shape of tiled memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterator

import jax

SUPPORTED_VERSIONS = ("0.11.2", "0.12.0.1")

_HOOK = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
_NEEDED = {
    "jax._src.config": ("pallas_tpu_interpret_mode_context_manager",),
    "jax._src.core": ("get_axis_env", "Literal"),
    "jax._src.state.types": ("TransformedRef", "AbstractRef"),
    "jax._src.pallas.mosaic_gpu.interpret.params": ("InterpretGPUParams",),
    _HOOK: ("interpret_pallas_call",),
}


class UnsupportedJaxError(ImportError):
    """This JAX lacks a name that the simulator needs."""


@functools.cache
def private(module: str, name: str):
    """A private name of JAX; `check` has made sure that it is there."""
    return getattr(importlib.import_module(module), name)


@functools.cache
def check() -> None:
    """Makes sure that every private name used here exists.

    Raises:
      UnsupportedJaxError: names what is missing and the supported versions.
    """
    missing = []
    for module, names in _NEEDED.items():
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            missing.append(module)
            continue
        missing += [f"{module}.{n}" for n in names if not hasattr(loaded, n)]
    if missing:
        raise UnsupportedJaxError(
            f"cmm.interpret supports JAX {' and '.join(SUPPORTED_VERSIONS)}; JAX"
            f" {jax.__version__} lacks {', '.join(missing)}"
        )


@functools.cache
def _marker(key):
    """The value of the interpret setting that means "simulated by cmm".

    Pallas asks for the class by name before it hands over the transforms of
    kernel arguments, hence the name. A class of its own keeps jitted functions
    apart from those that JAX's interpreter traced, and each `key` those that were
    traced under other circumstances.
    """
    base = private("jax._src.pallas.mosaic_gpu.interpret.params", "InterpretGPUParams")
    return type("InterpretGPUParams", (base,), {})()


@contextlib.contextmanager
def hooked(interpret: Callable, key) -> Iterator[None]:
    """Sends Mosaic GPU kernels traced in this block to `interpret`.

    Functions that were traced before in a block with an equal `key` are not traced
    again.
    """
    check()
    setting = private("jax._src.config", "pallas_tpu_interpret_mode_context_manager")
    hook = importlib.import_module(_HOOK)
    theirs = hook.interpret_pallas_call
    marker = _marker(key)

    def dispatch(*args, interpret_params, **kwargs):
        chosen = interpret if interpret_params is marker else theirs
        return chosen(*args, interpret_params=interpret_params, **kwargs)

    hook.interpret_pallas_call = dispatch
    before = setting.swap_local(marker)
    try:
        yield
    finally:
        setting.set_local(before)
        hook.interpret_pallas_call = theirs


def axis_sizes() -> dict:
    """Names and sizes of the mesh axes around the kernel, major axis first."""
    return dict(private("jax._src.core", "get_axis_env")().axis_sizes)


def is_literal(atom) -> bool:
    return isinstance(atom, private("jax._src.core", "Literal"))


def is_ref(aval) -> bool:
    return isinstance(aval, private("jax._src.state.types", "AbstractRef"))


def logical_aval(aval, transforms):
    """The type of a reference once its tiling and swizzling are undone."""
    if not transforms:
        return aval
    transformed = private("jax._src.state.types", "TransformedRef")
    return transformed(aval, tuple(transforms)).type


_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SKIP = f"{os.sep}jax{os.sep}_src{os.sep}"


@functools.lru_cache(maxsize=8192)
def frame_line(source_info) -> tuple[str | None, str]:
    """Innermost frame outside JAX's core as `file:line (function)`, or None.

    JAX's own kernels count as user code here. Where the innermost frame belongs to
    the pipeline emitter, the second result names that line.
    """
    traceback = getattr(source_info, "traceback", None)
    inner = ""
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        if _SKIP in name:
            if not inner and name.endswith(f"mosaic_gpu{os.sep}pipeline.py"):
                inner = f" via pipeline.py:{frame.line_num}"
            continue
        if name.startswith(_STDLIB) and "site-packages" not in name:
            continue
        short = os.sep.join(name.split(os.sep)[-2:])
        return f"{short}:{frame.line_num} ({frame.function_name})", inner
    return None, inner
