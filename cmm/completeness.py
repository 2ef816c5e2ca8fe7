"""Does a recording hold all events of the calls that were recorded?

A profiler may lose events, and says nothing. A mean over the events that are left is then too small, and looks right.
"""

from collections.abc import Mapping, Sequence


class IncompleteRecording(RuntimeError):
    """Events are missing in a recording: what is left of them says nothing about times."""


def check_complete(events: Mapping[int, Sequence], calls: int, gpus: int) -> None:
    """Raises `IncompleteRecording` if events of equal calls are missing.

    Products and transfers come in the same number in each call, and on each GPU. Fills and copies within a GPU's own
    memory need not: a program may do some of them once.

    Args:
      events: by GPU, its events (`cmm.recording.GpuEvent`).
      calls: number of calls.
      gpus: number of GPUs on which they ran.
    """
    if len(events) < gpus:
        raise IncompleteRecording(f"Of {gpus} GPUs only {len(events)} are in the recording: {sorted(events)}.")
    for role in ("matmul", "transfer"):
        counts = {gpu: sum(event.role == role for event in of_gpu) for gpu, of_gpu in events.items()}
        if len(set(counts.values())) > 1 or any(count % calls for count in counts.values()):
            raise IncompleteRecording(
                f"{calls} equal calls on each GPU cannot have run these numbers of events of role {role!r}: {counts}."
            )
