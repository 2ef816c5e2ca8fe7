"""How does a process follow another one that may crash or hang?

The child prints events, one line of JSON each, on its standard output. Whatever else appears there is passed over:
libraries print what they like.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

# A line that is an event is an object with this key.
_KEY = "event"
_STDERR_LINES = 8


def say(event: str, **fields) -> None:
    """Prints an event of this process for the one that follows it."""
    # The line end before it keeps it apart from a library's unfinished line.
    print("\n" + json.dumps({_KEY: event} | fields), flush=True)


def follow(command: Sequence[str], on_event: Callable[[dict], None], silence_s: float) -> str:
    """Runs a command to its end and hands on its events.

    Args:
      command: the command. It gets a process group of its own, of which nothing is left when this returns or raises.
      on_event: called with every event, in this thread.
      silence_s: a command that prints nothing for so many seconds hangs, and is killed.

    Returns:
      What went wrong, with the last lines of standard error, or "" if the exit status is 0.
    """
    # A file, not a pipe: nobody has to read it meanwhile.
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=silence_s)) is not None:
                if event := _event(line):
                    on_event(event)
            ended = _ended(process.wait(silence_s))
        except (queue.Empty, subprocess.TimeoutExpired):
            ended = f"killed after {silence_s:g} s of silence"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        stderr.seek(0)
        last = " | ".join(stderr.read().strip().splitlines()[-_STDERR_LINES:])
    return f"{ended}: {last}" if ended and last else ended


def python_module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def _read(stream, lines):
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _event(line) -> dict | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and _KEY in event else None


def _ended(status) -> str:
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"ended with exit status {status}" if status else ""
