"""Whether a process that a test started, or had started, still runs."""


def runs(pid):
    """Returns whether the process runs; one that is dead but not yet collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
