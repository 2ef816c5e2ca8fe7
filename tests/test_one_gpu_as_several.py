"""One GPU that poses as several, in front of a driver that is made here: no GPU is needed."""

import json
import os
import subprocess
import sys
import types

import pytest
from one_gpu_as_several import run

# What the libraries ask of a driver. Large memory is never touched, so an address is enough.
DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static char primary;
static __thread void *stack[8] = {NULL};
static __thread int top;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *n) { *n = getenv("REAL_GPUS") ? atoi(getenv("REAL_GPUS")) : 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 16 ? 132 : 7; return device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &primary; return device; }
int cuCtxSetCurrent(void *context) { stack[top] = context; return context && context != &primary; }
int cuCtxPushCurrent_v2(void *context) { stack[++top] = context; return context != &primary; }
int cuCtxPopCurrent_v2(void **context) { *context = stack[top--]; return 0; }
int cuCtxGetCurrent(void **context) { *context = stack[top]; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuMemSetAccess(uint64_t at, size_t bytes, const int *desc, size_t count) {
    static const int host[] = {3, 1}, device[] = {1, 0};
    return at != 1 || bytes != 2 || count != 1 || memcmp(desc, desc[0] == 3 ? host : device, 8) || desc[2] != 3;
}
int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    *at = bytes <= 4096 ? (uint64_t)calloc(1, bytes) : bytes == 3ull << 32 ? 1ull << 40 : 0;
    return !*at;
}
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes) { return at != 1ull << 40 || value || !bytes; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuCtxSynchronize(void) { return 0; }
int only_in_the_driver(void) { return 41; }
"""

BEGIN = """
import ctypes, json
from ctypes import byref, c_int, c_void_p
driver = ctypes.CDLL("libcuda.so.1")
def ask(library, name, *rest, kind=c_int):
    value = kind()
    assert getattr(library, name)(byref(value), *rest) == 0, name
    return value.value
assert driver.cuInit(0) == 0
count = ask(driver, "cuDeviceGetCount")
contexts = [ask(driver, "cuDevicePrimaryCtxRetain", device, kind=c_void_p) for device in range(count)]
current = lambda: (contexts.index(ask(driver, "cuCtxGetCurrent", kind=c_void_p)), ask(driver, "cuCtxGetDevice"))
"""


@pytest.fixture(scope="module")
def compiler():
    if sys.platform != "linux":
        pytest.skip(f"needs the loader of Linux, found {sys.platform}")
    try:
        return run.find_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def driver(tmp_path_factory, compiler):
    """The driver that is made here; like NVIDIA's it has the name libcuda.so.1 inside."""
    library = tmp_path_factory.mktemp("driver") / run.DRIVER
    command = [*compiler, "-shared", "-fPIC", "-o", library, f"-Wl,-soname,{run.DRIVER}", "-xc", "-"]
    subprocess.run(command, input=DRIVER, check=True, text=True)
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory, driver, compiler):
    folder = tmp_path_factory.mktemp("libraries")
    run.build(folder, driver, compiler, ["-Wall", "-Wextra", "-Werror"])
    return folder


@pytest.fixture
def python(libraries, driver):
    """Returns a function that runs code in a process with posed GPUs."""

    def call(code, gpus, **variables):
        environment = run.environment(libraries, driver, gpus, os.environ | variables)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, cwd=libraries, capture_output=True, text=True, timeout=60)

    return call


def _printed(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("gpus", [1, 2, 5])
def test_copies_have_contexts_and_shares(python, gpus):
    code = """
attributes = [[ask(driver, "cuDeviceGetAttribute", number, device) for number in (16, 20)] for device in range(count)]
ordinals = [ask(driver, "cuDeviceGet", device) for device in range(count)]
beyond = [driver.cuDeviceGet(byref(c_int()), count), driver.cuDevicePrimaryCtxRetain(byref(c_void_p()), count)]
print(json.dumps([count, attributes, ordinals, len(set(contexts)), beyond]))
"""
    numbers = list(range(gpus))
    assert _printed(python(BEGIN + code, gpus)) == [gpus, [[132 // gpus, 7]] * gpus, numbers, gpus, [101, 101]]


def test_the_handle_that_was_set_is_current(python):
    # The driver returns an error for every handle but that of the primary context.
    code = """
seen = []
for step in [2, 0, 1]:
    assert driver.cuCtxSetCurrent(c_void_p(contexts[step])) == 0
    seen.append(current())
assert driver.cuCtxPushCurrent_v2(c_void_p(contexts[2])) == 0
seen.append(current())
assert ask(driver, "cuCtxPopCurrent_v2", kind=c_void_p) == contexts[2]
seen.append(current())
assert driver.cuCtxPushCurrent_v2(c_void_p(contexts[0])) == 0 and driver.cuCtxPopCurrent_v2(None) == 0
seen.append(current())
assert driver.cuCtxSetCurrent(None) == 0
seen.append(ask(driver, "cuCtxGetCurrent", kind=c_void_p))
print(json.dumps(seen))
"""
    assert _printed(python(BEGIN + code, 3)) == [[2, 2], [0, 0], [1, 1], [2, 2], [1, 1], [1, 1], None]


def test_memory_of_devices_is_on_the_one_gpu(python):
    # Of a host's memory, here node 1, the number stays. The driver takes one description at a time.
    code = """
print(json.dumps(driver.cuMemSetAccess(ctypes.c_uint64(1), ctypes.c_size_t(2), (c_int * 9)(1, 2, 3, 3, 1, 3, 1, 0, 3),
                                       ctypes.c_size_t(3))))
"""
    assert _printed(python(BEGIN + code, 3)) == 0


def test_what_it_does_not_define_is_the_drivers(python):
    code = 'print(json.dumps([driver.only_in_the_driver(), ctypes.CDLL("libcuda.so.1")._handle == driver._handle]))'
    assert _printed(python(BEGIN + code, 2)) == [41, True]


@pytest.mark.parametrize(
    "variables, gpus, said",
    [
        ({"REAL_GPUS": "2"}, 2, "there are several GPUs already; set CUDA_VISIBLE_DEVICES to one of them"),
        ({}, 65, "CMM_POSED_GPUS is not a number of GPUs from 1 to 64"),
    ],
)
def test_it_refuses(python, variables, gpus, said):
    done = python(BEGIN, gpus, **variables)
    assert (done.returncode, done.stderr) == (-6, f"one_gpu_as_several: {said}\n")


def test_without_a_gpu_there_are_no_copies(python):
    assert _printed(python(BEGIN + "print(count)", 2, REAL_GPUS="0")) == 0


NCCL = """
nccl = ctypes.CDLL("libnccl.so.2")
class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
class Window(ctypes.Structure):
    _fields_ = [("host", c_void_p), ("base", ctypes.c_uint64), ("numbers", c_int * 3)]
def group(ranks):
    unique = UniqueId()
    assert nccl.ncclGetUniqueId(byref(unique)) == 0
    return [c_void_p(ask(nccl, "ncclCommInitRank", ranks, unique, rank, kind=c_void_p)) for rank in range(ranks)]
def window(comm):
    at = c_void_p()
    assert nccl.ncclCommWindowRegister(comm, None, ctypes.c_size_t(4 << 20), byref(at), 0) == 0
    made = Window.from_address(at.value)
    return [made.base - (1 << 40), *made.numbers]
"""


def test_ranks_share_windows_and_groups_do_not(python):
    code = """
all_three, two = group(3), group(2)
windows = [[window(comm) for comm in all_three] for _ in range(2)] + [[window(comm) for comm in two]]
print(json.dumps(windows))
"""
    first, second, other = _printed(python(BEGIN + NCCL + code, 3))
    assert first == [[0, rank, rank, 1] for rank in range(3)]
    assert second == [[4 << 20, rank, rank, 1] for rank in range(3)]
    assert [row[1:] for row in other] == [[0, 0, 1], [1, 1, 1]]
    assert other[0][0] == other[1][0] >= 8 << 20


def test_what_nccl_lacks_is_an_error(python):
    code = """
(comm,) = group(1)
too_long = nccl.ncclCommWindowRegister(comm, None, ctypes.c_size_t(1 + (4 << 20)), byref(c_void_p()), 0)
too_many = nccl.ncclCommInitRank(byref(c_void_p()), 4, UniqueId(), 0)
print(json.dumps([too_long, too_many, nccl.ncclAllGather(), nccl.ncclCommSplit()]))
"""
    done = python(BEGIN + NCCL + code, 3)
    assert _printed(done) == [3, 3, 3, 3]
    assert "a window of 4194305 bytes is larger than 4 MiB" in done.stderr
    assert "4 ranks are more than the 3 posed GPUs" in done.stderr
    assert "ncclAllGather is not there" in done.stderr


@pytest.mark.parametrize("last, status", [("print(count)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_command_sees_copies_and_its_exit_status_is_passed_on(driver, last, status):
    code = BEGIN + "import os, sys; assert count == 3;" + last
    path = os.pathsep.join([str(driver.parent), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, run.__file__, "--gpus", "3", "--", sys.executable, "-c", code],
        env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == ("3\n" if status == 0 else "")


def test_environment(tmp_path):
    mine = {"LD_LIBRARY_PATH": "/a:/b", "LD_PRELOAD": "/c.so", "HOME": "/home"}
    made = run.environment(tmp_path, "/driver", 4, mine)
    assert made["LD_LIBRARY_PATH"] == f"{tmp_path}:/a:/b"
    assert made["LD_PRELOAD"] == f"{tmp_path}/libnccl.so.2 /c.so"
    assert (made["HOME"], made["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("/home", "0.1500")
    chosen = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}
    assert run.environment(tmp_path, "/driver", 4, chosen)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".2"


def test_drivers_that_the_loader_knows(monkeypatch):
    listed = (
        "\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so\n"
        "\tlibcudart.so.13 (libc6,x86-64) => /cuda/libcudart.so.13\n"
    )
    monkeypatch.setattr(run.shutil, "which", lambda *args, **options: "ldconfig")
    monkeypatch.setattr(run.subprocess, "run", lambda *args, **options: types.SimpleNamespace(stdout=listed))
    assert [str(path) for path in run._cached()] == ["/lib/x86_64-linux-gnu/libcuda.so.1"]


def test_it_names_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "_cached", lambda: [])
    monkeypatch.setattr(run, "CONTAINERS", str(tmp_path / "none"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert run.main(["--", "true"]) == 2
    assert "one_gpu_as_several: no NVIDIA driver: libcuda.so.1 is not in LD_LIBRARY_PATH" in capsys.readouterr().err
    (tmp_path / run.DRIVER).touch()
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert run.main(["--", "true"]) == 2
    assert "one_gpu_as_several: no C compiler: no-such-compiler is not on PATH" in capsys.readouterr().err
    monkeypatch.setenv("CC", f"{sys.executable} -c 1/0")
    assert run.main(["--", "true"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_wrong_number_of_gpus(capsys):
    with pytest.raises(SystemExit):
        run.main(["--gpus", "65", "--", "true"])
    assert "must be from 1 to 64, got 65" in capsys.readouterr().err
