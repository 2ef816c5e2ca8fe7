"""One kernel call on all devices: its memory, its threads, its verdict."""

from __future__ import annotations

import numpy as np

from cmm.interpret import clocks, errors, memory, races, scheduler, sync
from cmm.interpret.cta import Cta
from cmm.interpret.evaluate import evaluate, source_line
from cmm.interpret.threads import Thread


class Machine:
    """Runs one kernel call.

    Args:
      plan: the kernel (`plan.Plan`).
      options: `simulation.Options`.
      recorder: where events go.
      inputs: per device, the arrays of the kernel's operands.
    """

    def __init__(self, plan, options, recorder, inputs):
        self.plan = plan
        self.options = options
        self.recorder = recorder
        self.call = recorder.new_call()
        self.detect_races = options.detect_races
        self.program = plan.program
        self.scheduler = scheduler.Scheduler(options.call_seed(self.call), options.deadlock_timeout_s, source_line)
        self.races: list[races.Race] = []
        self._seen_races: set = set()
        self._operations = 0
        self._semaphores: dict = {}
        self._ends: dict[int, clocks.Clock] = {}
        self.num_devices = plan.num_devices
        self._width = plan.num_threads * (5 if plan.has_warps else 1)
        self._starts = [self.new_operation() for _ in range(self.num_devices)]
        self.buffers = self._global_memory(inputs)
        self._waiting_ctas = {d: list(range(plan.num_ctas)) for d in range(self.num_devices)}

    def new_operation(self) -> int:
        self._operations += 1
        return self._operations - 1

    def _global_memory(self, inputs):
        per_device = []
        check_loads = self.options.check_proxy_fences
        for device in range(self.num_devices):
            buffers = []
            for i, name in enumerate(self.plan.operand_names):
                alias = self.plan.aliases.get(i)
                if alias is not None:
                    buffers.append(buffers[alias])
                    continue
                if i < len(inputs[device]):
                    content = np.array(inputs[device][i])
                else:
                    content = memory.uninitialized(*self.plan.operand_types[i])
                buffer = memory.Buffer(f"{name} of device {device}", "gmem", device, content, check_loads=check_loads)
                # Whoever comes before the owner has started finds no buffer.
                whole = tuple((0, n) for n in content.shape)
                buffer.history.accesses.append(
                    races.Start(
                        True, 0, 0, self._starts[device], whole, (device, 0, "the start of the kernel"), "thread", None
                    )
                )
                buffers.append(buffer)
            per_device.append(buffers)
        for same in zip(*per_device):
            for buffer in same:
                buffer.peers = list(same)
        return per_device

    def run(self) -> list[list[np.ndarray]]:
        """Runs all devices to the end; returns per device the kernel's outputs.

        Raises:
          DeadlockError, BarrierError, RaceError, or what the kernel itself raised.
        """
        resident = self.options.ctas_per_device or self.plan.num_ctas
        for device in range(self.num_devices):
            for _ in range(resident):
                self._start_cta(device)
        try:
            self.scheduler.run()
        except errors.DeadlockError as e:
            raise errors.DeadlockError(e.reason, [*e.waiting, *self._not_started()]) from None
        if self.detect_races:
            self._check_ends()
        outputs = self.plan.outputs
        return [[b.content for b in buffers[outputs]] for buffers in self.buffers]

    def _not_started(self):
        for device, numbers in self._waiting_ctas.items():
            for number in numbers:
                yield errors.Waiting(
                    f"device {device}, CTA {number}",
                    f"one of {self.options.ctas_per_device} place(s) on its device",
                    None,
                    None,
                    "the start of the kernel",
                )

    def _start_cta(self, device: int) -> None:
        if not self._waiting_ctas[device]:
            return
        number = self._waiting_ctas[device].pop(0)
        cta = Cta(self, device, number)
        start_s = self.scheduler.now
        for warpgroup in range(self.plan.num_threads):
            clock = self._start_clock(device)
            coords = self.plan.coords(device, number, warpgroup)
            thread = Thread(self, cta, warpgroup, None, coords, self._position(cta, warpgroup, None), clock)
            cta.threads.append(thread)
        for thread in cta.threads:
            body = self._thread_body(thread, start_s)
            thread.task = scheduler.Task(thread.name, body, start_s)
            self.scheduler.spawn(thread.task)

    def _start_clock(self, device: int) -> clocks.Clock:
        clock = clocks.Clock(self.num_devices * self.plan.num_ctas * self._width)
        known = [device] if self.plan.skips_device_barrier else range(self.num_devices)
        for d in known:
            clock.complete(self._starts[d])
        return clock

    def _position(self, cta, warpgroup, warp) -> int:
        first = (cta.device * self.plan.num_ctas + cta.number) * self._width
        if not self.plan.has_warps:
            return first + warpgroup
        return first + warpgroup * 5 + (0 if warp is None else 1 + warp)

    def warp_of(self, thread, warp: int) -> Thread:
        """The thread for one warp of a warpgroup; it outlives one warp_map."""
        if warp not in thread.warps:
            clock = clocks.Clock(len(thread.clock.seen))
            thread.warps[warp] = Thread(
                self,
                thread.cta,
                thread.warpgroup,
                warp,
                dict(thread.coords),
                self._position(thread.cta, thread.warpgroup, warp),
                clock,
            )
        return thread.warps[warp]

    def _thread_body(self, thread, start_s: float):
        for late in self.options.late:
            if late.applies(thread):
                yield from self.scheduler.sleep(late.seconds)
        yield thread.busy()
        yield from evaluate(thread, self.plan.jaxpr, self.buffers[thread.device])
        cta = thread.cta
        thread.task.where = None
        self._finish(thread, cta, start_s)

    def _finish(self, thread, cta, start_s) -> None:
        cta.finished += 1
        if cta.finished < len(cta.threads):
            return
        known = cta.known()
        if cta.device in self._ends:
            self._ends[cta.device].join(known)
        else:
            self._ends[cta.device] = known
        if self.detect_races:
            for buffer in cta.buffers:
                for access in buffer.history.unfinished(known):
                    self.report(
                        buffer.name,
                        "the CTA ended while an asynchronous operation still used its shared memory",
                        access,
                        None,
                    )
        self.recorder.add(
            kind="kernel",
            call=self.call,
            device=cta.device,
            cta=cta.number,
            thread=None,
            start_s=start_s,
            end_s=self.scheduler.now,
            name=self.plan.name,
        )
        self._start_cta(cta.device)

    def _check_ends(self) -> None:
        """Remote accesses and signals must be ordered before the owner's kernel ends."""
        for device, buffers in enumerate(self.buffers):
            for buffer in dict.fromkeys(buffers):
                for access in buffer.history.unfinished(self._ends[device]):
                    if access.who[0] != device:
                        self.report(
                            buffer.name,
                            "nothing orders this remote access before"
                            " the end of its owner's kernel, after which the"
                            " memory may be reused",
                            access,
                            None,
                        )
        for array in (array for arrays in self._semaphores.values() for array in arrays):
            for semaphore in array.items:
                for signal in semaphore.unheard(self._ends[array.device]):
                    self.report(
                        f"semaphore {semaphore.name}",
                        f"no wait of device {array.device} has learned of this remote signal before its kernel ended,"
                        " after which the semaphore may belong to the next kernel",
                        signal,
                        None,
                    )

    def report(self, buffer: str, reason: str, first, second) -> None:
        def line(access):
            return None if access is None else access.side(source_line)

        race = races.Race(buffer, reason, line(first), line(second))
        key = (race.reason, first.where, first.who, second and (second.where, second.who))
        # An unrolled loop has one line and many places; the same text twice says nothing new.
        if key not in self._seen_races and race not in self.races:
            self._seen_races.add(key)
            self.races.append(race)

    def logical_device(self, thread):
        return lambda device_id, kind: self.plan.logical_device(thread.coords, device_id, kind)

    def _semaphore_arrays(self, key, shape, name):
        if key not in self._semaphores:
            indices = [list(map(int, i)) for i in np.ndindex(*shape)]
            arrays = [
                memory.SemaphoreArray(d, shape, [sync.Semaphore(f"{name}{i or ''} of device {d}") for i in indices])
                for d in range(self.num_devices)
            ]
            for array in arrays:
                array.peers = arrays
            self._semaphores[key] = arrays
        return self._semaphores[key]

    def global_semaphores(self, device: int, op):
        """What `get_global` names: one allocation per call site."""
        number = self.plan.number_of(op)
        arrays = self._semaphore_arrays(("global", number), op.params["what"].shape, f"global {number}")
        return arrays[device]

    def scoped_semaphores(self, cta, shape, op, index):
        number = self.plan.number_of(op)
        key = ("scoped", number, index, cta.number)
        return self._semaphore_arrays(key, shape, f"scoped {number}.{index} of CTA {cta.number}")[cta.device]
