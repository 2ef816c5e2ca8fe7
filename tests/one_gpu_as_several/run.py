"""Runs a command in which JAX sees several GPUs, on a machine that has one.

    python tests/one_gpu_as_several/run.py --gpus 4 -- python -m pytest -m gpu tests/test_gpu_hopper.py -k small

A `libcuda.so.1` stands in front of the driver and reports copies of the one GPU, each with a context handle of its own
and its share of the multiprocessors (`cuda.c`). A `libnccl.so.2` stands in place of NCCL and has what XLA's barrier
kernel needs (`nccl.c`). Both are compiled for each run.

It shows what compiled kernels, signals, addresses of peers, command buffers (CUDA graphs) and the barrier between
devices do: kernels of different copies run at the same time, and write into each other's memory. It says nothing of
speed or NVLink, for all copies are one GPU, and a machine of several may order what they write in other ways.
Collectives of NCCL do not run: they return an error.

The barrier takes 4 GiB of GPU memory for each copy. JAX reserves 60% of the memory for all copies together, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says how much each of them reserves.
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
DRIVER, NCCL = "libcuda.so.1", "libnccl.so.2"
CONTAINERS = "/usr/local/nvidia/lib64"  # Where NVIDIA's container images look for the driver.
MOST_GPUS = 64


def find_driver(environ=os.environ):
    """Returns the path of the driver: from LD_LIBRARY_PATH, the loader's cache, or where containers have it.

    Raises:
      RuntimeError: There is none.
    """
    named = [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    candidates = [pathlib.Path(entry, DRIVER) for entry in named] + _cached() + [pathlib.Path(CONTAINERS, DRIVER)]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    raise RuntimeError(
        f"no NVIDIA driver: {DRIVER} is not in LD_LIBRARY_PATH, not in what `ldconfig -p` lists, not in {CONTAINERS}"
    )


def _cached():
    """Returns the paths of 64-bit drivers that `ldconfig -p` lists; it may be outside of a user's PATH."""
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if not ldconfig:
        return []
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    return [pathlib.Path(path) for path in re.findall(rf"{re.escape(DRIVER)} \(.*64.*\) => (.+)", listed)]


def find_compiler(environ=os.environ):
    """Returns the words of the command that compiles C: `$CC`, or `cc`.

    Raises:
      RuntimeError: There is no such program.
    """
    words = shlex.split(environ.get("CC", "")) or ["cc"]
    if not shutil.which(words[0], path=environ.get("PATH")):
        raise RuntimeError(f"no C compiler: {words[0]} is not on PATH; install one, or name one in CC")
    return words


def build(folder, driver, compiler, flags=()):
    """Compiles both libraries into `folder`.

    Raises:
      RuntimeError: The compiler fails; the message has what it said.
    """

    def make(library, source, soname, *more):
        options = ["-O1", "-shared", "-fPIC", *flags, f"-Wl,-soname,{soname}", "-Wl,--no-as-needed"]
        command = [*compiler, *options, "-o", library, "-xc", source, "-xnone", *more, "-ldl"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{done.stderr}")

    # The library in front must depend on the driver by its whole path: by name it would find itself. As the name to
    # load, the linker notes the soname of what it links, so it gets an empty library whose soname is that path.
    make("driver.so", os.devnull, driver)
    # The driver has the soname libcuda.so.1, so this library has another, and is found by the name of its file.
    make(DRIVER, HERE / "cuda.c", "libcuda_posed.so", "./driver.so")
    make(NCCL, HERE / "nccl.c", NCCL)


def environment(folder, driver, gpus, environ=os.environ):
    """Returns the environment in which the libraries in `folder` are found first and pose as `gpus` GPUs."""

    def before(name, value, separator):
        return separator.join(filter(None, [str(value), environ.get(name)]))

    return {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.6 / gpus:.4f}",
        **environ,
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", folder, ":"),
        # JAX loads NCCL from its own package by path. Who asks by name gets the first one that was loaded.
        "LD_PRELOAD": before("LD_PRELOAD", pathlib.Path(folder, NCCL), " "),
        "CMM_POSED_GPUS": str(gpus),
        "CMM_REAL_LIBCUDA": str(driver),
        # JAX's check of the versions of CUDA's libraries is not needed here.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }


def _gpus(text):
    gpus = int(text)
    if not 1 <= gpus <= MOST_GPUS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST_GPUS}, got {gpus}")
    return gpus


def main(argv=None):
    """Runs the command that `argv` names, and returns its exit status, or 128 and the signal that ended it."""
    parser = argparse.ArgumentParser(
        prog="one_gpu_as_several", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=_gpus, default=2, help="how many GPUs JAX sees (default: 2)")
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="one_gpu_as_several_") as folder:
        try:
            driver = find_driver()
            build(folder, driver, find_compiler())
            status = subprocess.run(options.command, env=environment(folder, driver, options.gpus)).returncode
        except (OSError, RuntimeError) as error:
            print(f"one_gpu_as_several: {error}", file=sys.stderr)
            return 2
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
