"""Evaluates a kernel's equations as a coroutine, one thread at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator

import numpy as np

from cmm.interpret import _jax_private as jax_private, arithmetic

# Primitives with side effects, by name. A handler is a generator function
# (thread, operation, inputs) that returns the list of outputs.
HANDLERS: dict[str, Callable] = {}

# They change nothing that is simulated.
_NO_EFFECT = (
    "set_max_registers_p",
    "set_max_registers",
    "async_prefetch",
    "print_layout",
    "debug_print",
    "debug_callback",
)

# They have no visible effect, but what they do is not simulated, unless they say what it is (`simulated_as`).
_REFUSED = ("inline_mgpu_p", "inline_mgpu")


def handles(*names: str):
    """Registers a handler for the primitives of these names."""

    def register(function):
        for name in names:
            HANDLERS[name] = function
        return function

    return register


def simulated_as(name: str):
    """Says what a function for `plgpu.inline_mgpu` stands for; kernels with other such functions are refused.

    Args:
      name: something that the simulator can do: a name given to `handles`, such as "fence.proxy.async.global".

    Returns:
      A decorator, to stand below `plgpu.inline_mgpu`.
    """

    def mark(function):
        function.simulated_as = name
        return function

    return mark


def _name(eqn) -> str:
    return getattr(eqn.params.get("mgpu_fn"), "simulated_as", eqn.primitive.name)


def inner_jaxpr(eqn):
    """The body of a call-like equation, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    return None


def sub_jaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item


def check_supported(jaxpr, outer=None) -> None:
    """Refuses a kernel with operations that are not simulated.

    Raises:
      NotImplementedError: names the operation and its source line.
    """
    for eqn in jaxpr.eqns:
        name = _name(eqn)
        touches = any(jax_private.is_ref(v.aval) for v in eqn.invars if not jax_private.is_literal(v))
        known = name in HANDLERS or name in _NO_EFFECT
        if name in _REFUSED or not known and (touches or eqn.effects) and inner_jaxpr(eqn) is None:
            raise NotImplementedError(
                f"`{name}` is not simulated, used at {source_line(Where(eqn.source_info, outer))}"
            )
        for sub in sub_jaxprs(eqn):
            check_supported(sub, Where(eqn.source_info, outer))


@dataclasses.dataclass(frozen=True, eq=False)
class Where:
    """A place in a kernel: a line, inside a loop, inside a scope, ...

    JAX caches the traces of loop bodies and then the line of an operation is cut
    off from the lines that lead to it; the enclosing operation still has them.
    """

    source_info: object
    outer: Where | None


@functools.lru_cache(maxsize=8192)
def source_line(where: Where | None) -> str:
    """`file:line (function)`, the innermost that is known."""
    inner = ""
    while where is not None:
        line, via = jax_private.frame_line(where.source_info)
        inner = inner or via
        if line is not None:
            return line + inner
        where = where.outer
    return f"unknown source{inner}"


class Operation:
    """An equation, prepared for evaluation.

    Attributes:
      name, params, invars, outvars: as in the equation.
      where: its place, for messages.
      reads: per input (is a value, the value or the variable).
      handler: generator function, or None.
      function: plain function from inputs to list of outputs, if no handler.
    """

    __slots__ = ("name", "params", "invars", "outvars", "where", "reads", "handler", "function")

    def __init__(self, eqn, outer: Where | None):
        self.name = _name(eqn)
        self.params = eqn.params
        self.invars = eqn.invars
        self.outvars = eqn.outvars
        self.where = Where(eqn.source_info, outer)
        self.reads = []
        for atom in eqn.invars:
            if jax_private.is_literal(atom):
                value = np.asarray(atom.val, atom.aval.dtype)
                self.reads.append((True, value[()] if value.ndim == 0 else value))
            else:
                self.reads.append((False, atom))
        self.handler = self.function = None
        if self.name in _NO_EFFECT:
            self.function = lambda *_: []
        elif self.name in HANDLERS:
            self.handler = HANDLERS[self.name]
        elif inner_jaxpr(eqn) is not None:
            self.handler = _call
        else:
            self.function = arithmetic.compile_equation(eqn)


class Program:
    """The operations of a kernel, prepared once and shared by all threads."""

    def __init__(self):
        # Keys hold ids; the values keep what they belong to alive.
        self._operations: dict = {}

    def operations(self, jaxpr, outer: Where | None) -> list[Operation]:
        key = id(jaxpr), id(outer)
        found = self._operations.get(key)
        if found is None:
            found = jaxpr, outer, [Operation(e, outer) for e in jaxpr.eqns]
            self._operations[key] = found
        return found[2]


def evaluate(thread, jaxpr, args, outer: Where | None = None) -> Generator:
    """Runs `jaxpr` on `args` as `thread`; returns the list of results.

    Scopes take what they close over as leading arguments, other bodies carry it.
    """
    if len(args) > len(jaxpr.invars):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    else:
        env = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ())))
        env.update(zip(jaxpr.invars, args, strict=True))
    for op in thread.machine.program.operations(jaxpr, outer):
        values = [v if known else env[v] for known, v in op.reads]
        if op.handler is None:
            outs = op.function(*values)
        else:
            thread.task.where = op.where
            outs = yield from op.handler(thread, op, values)
        if len(outs) == 1 == len(op.outvars):  # The most frequent case, and `zip` is slow.
            env[op.outvars[0]] = outs[0]
        else:
            env.update(zip(op.outvars, outs, strict=True))
    return [np.asarray(v.val)[()] if jax_private.is_literal(v) else env[v] for v in jaxpr.outvars]


def _call(thread, op, values):
    return (yield from evaluate(thread, inner_jaxpr(op), values, op.where))
