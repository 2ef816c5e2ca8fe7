"""Set-up: what is declared agrees, an import does nothing, and the scripts choose rightly from what a machine has."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = SpecifierSet(PROJECT["requires-python"])
PINS = {
    requirement.name: requirement
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}
SH = shutil.which("sh")


def declared_requirements():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    requirements = [Requirement(text) for group in groups for text in group]
    return [r for r in requirements if r.name != PROJECT["name"]]


def write_script(path, body):
    """Writes an executable shell script that needs no other program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{SH}\n{textwrap.dedent(body)}\n")
    path.chmod(0o755)
    return path


def fake_python(path, version, modules="venv"):
    return write_script(path, f'echo "{version} {modules} $0"')


def fake_shim(path):
    return write_script(path, f'echo "pyenv: {path.name}: command not found" >&2; exit 127')


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine whose PATH holds nothing but `cat`, and whose home is empty."""

    bin: pathlib.Path
    home: pathlib.Path

    def call(self, script, *args, **environment):
        """Runs a script of `.ci` there."""
        env = {"PATH": str(self.bin), "HOME": str(self.home), **environment}
        return subprocess.run([SH, ROOT / ".ci" / script, *args], env=env, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path):
    bare = Machine(tmp_path / "bin", tmp_path / "home")
    bare.bin.mkdir()
    bare.home.mkdir()
    (bare.bin / "cat").symlink_to(shutil.which("cat"))
    return bare


# What is declared


def test_pins_lie_in_the_declared_ranges():
    for requirement in declared_requirements():
        pin = PINS[requirement.name]
        version = str(pin.specifier).removeprefix("==")
        assert str(pin.specifier) == f"=={version}"
        assert requirement.specifier.contains(version), f"{pin} is outside {requirement}"
    assert str(PINS["jax"].specifier) == str(PINS["jaxlib"].specifier)


def test_interpreters_and_jax_in_use_lie_in_the_declared_ranges():
    default = (ROOT / ".python-version").read_text().strip()
    jax_range = next(r.specifier for r in declared_requirements() if r.name == "jax")
    assert PYTHONS.contains(f"{default}.0")
    assert PYTHONS.contains("{}.{}.{}".format(*sys.version_info))
    assert jax_range.contains(metadata.version("jax"))


def test_version_is_a_literal_that_needs_no_import():
    import cmm

    literal = re.search(r'^__version__ = "(.+)"$', (ROOT / "cmm" / "__init__.py").read_text(), re.MULTILINE)
    assert cmm.__version__ == literal[1] == str(Version(literal[1]))


def test_import_starts_no_backend_and_changes_nothing(tmp_path):
    program = """
        import json, os, sys
        import jax
        from jax._src import xla_bridge
        environment, config = dict(os.environ), {k: repr(v) for k, v in jax.config.values.items()}
        import cmm
        print(json.dumps({
            "backends": xla_bridge.backends_are_initialized(),
            "environment": dict(os.environ) == environment,
            "config": {k: repr(v) for k, v in jax.config.values.items()} == config,
            "modules": list(sys.modules),
        }))
    """
    # A bare environment: this process's may already hold what an import of cmm has set.
    command, bare = (
        [sys.executable, "-c", textwrap.dedent(program)],
        {"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    out = subprocess.run(command, cwd=ROOT, env=bare, check=True, capture_output=True, text=True)
    seen = json.loads(out.stdout)
    assert not seen["backends"]
    assert seen["environment"] and seen["config"]
    heavy = {"matplotlib", "PIL", "absl", "rich", "jax.experimental.pallas", "jax.experimental.mosaic"}
    assert not heavy & set(seen["modules"])


# .ci/find-python


@pytest.mark.parametrize("minor", [9, 11, 12, 13, 14])
def test_find_python_accepts_the_declared_range(machine, minor):
    version = f"3.{minor}.4"
    fake_python(machine.bin / "python3", version)
    assert (machine.call("find-python").returncode == 0) == PYTHONS.contains(version)


def test_find_python_passes_over_a_shim_that_does_not_start(machine):
    fake_shim(machine.bin / "python3.13")
    fake_python(machine.bin / "python3", "3.11.2")
    right = fake_python(machine.bin / "python3.12", "3.12.1")
    assert machine.call("find-python").stdout == f"{right}\n"


def test_find_python_looks_behind_a_shim_on_path(machine, tmp_path):
    fake_shim(machine.bin / "python3.13")
    right = fake_python(tmp_path / "second folder" / "python3.13", "3.13.2")
    fake_python(machine.bin / "python3.12", "3.12.1")
    found = machine.call("find-python", PATH=f"{machine.bin}:{right.parent}")
    assert found.stdout == f"{right}\n"


def test_find_python_prefers_the_newer_name_and_path_to_managed_interpreters(machine):
    fake_python(machine.home / ".pyenv/versions/3.13.0/bin/python3.13", "3.13.0")
    fake_python(machine.bin / "python3", "3.12.9")
    plain = fake_python(machine.bin / "python3.12", "3.12.1")
    assert machine.call("find-python").stdout == f"{plain}\n"
    newer = fake_python(machine.bin / "python3.13", "3.13.1")
    assert machine.call("find-python").stdout == f"{newer}\n"


@pytest.mark.parametrize(
    "variable, folder, below",
    [
        (None, "home/.pyenv", "versions/3.12.7/bin"),
        ("PYENV_ROOT", "opt/pyenv", "versions/3.12.7/bin"),
        (None, "home/.local/share/uv/python", "cpython-3.12.7-linux-x86_64-gnu/bin"),
        ("UV_PYTHON_INSTALL_DIR", "opt/uv", "cpython-3.12.7-linux-x86_64-gnu/bin"),
    ],
)
def test_find_python_knows_where_pyenv_and_uv_keep_theirs(machine, tmp_path, variable, folder, below):
    fake_shim(machine.bin / "python3.12")
    fake_python(machine.bin / "python3", "3.11.2")
    right = fake_python(tmp_path / folder / below / "python3.12", "3.12.7")
    environment = {variable: str(tmp_path / folder)} if variable else {}
    assert machine.call("find-python", **environment).stdout == f"{right}\n"
    assert machine.call("find-python", "python3.13", **environment).returncode == 1


def test_find_python_says_what_it_found(machine):
    fake_shim(machine.bin / "python3.13")
    fake_python(machine.bin / "python3.12", "3.12.3", modules="no-venv")
    fake_python(machine.bin / "python3", "3.11.2")
    found = machine.call("find-python")
    assert found.returncode == 1 and found.stdout == ""
    assert f"{machine.bin}/python3.13 does not start: pyenv: python3.13: command not found" in found.stderr
    assert f"{machine.bin}/python3.12 is 3.12.3 but lacks venv or ensurepip" in found.stderr
    assert "apt install python3.12-venv" in found.stderr
    assert f"{machine.bin}/python3 is 3.11.2" in found.stderr
    assert "uv python install 3.12" in found.stderr


def test_find_python_on_a_machine_without_any(machine):
    found = machine.call("find-python")
    assert found.returncode == 1
    assert "nothing of that name" in found.stderr


def test_find_python_refuses_a_free_threaded_build(machine):
    fake_python(machine.bin / "python3.13", "3.13.1t")
    found = machine.call("find-python")
    assert found.returncode == 1
    assert "is 3.13.1t, a special build" in found.stderr


def test_find_python_gives_the_interpreter_behind_a_virtual_environment(machine):
    found = machine.call("find-python", sys.executable)
    assert found.stdout == f"{sys._base_executable}\n"


# .ci/find-jax


@pytest.mark.parametrize(
    "report, requirement, reason",
    [
        ("580.95.05, 9.0\n580.95.05, 9.0", "jax[cuda13]", "driver 580: JAX with CUDA 13"),
        ("610.11, 10.0", "jax[cuda13]", "driver 610: JAX with CUDA 13"),
        ("580.95.05, 7.0", "jax[cuda12]", "driver 580: JAX with CUDA 12"),
        ("575.57.08, 9.0", "jax[cuda12]", "driver 575: JAX with CUDA 12"),
        ("525.60.13, 8.0", "jax[cuda12]", "driver 525: JAX with CUDA 12"),
        ("470.82.01, 8.0", "jax", "driver 470 is older than 525"),
        ("No devices were found", "jax", 'lists no GPU ("No devices were found")'),
        ("", "jax", 'lists no GPU ("")'),
    ],
)
def test_find_jax_fits_the_driver(machine, report, requirement, reason):
    write_script(machine.bin / "nvidia-smi", f"cat <<END\n{report}\nEND")
    found = machine.call("find-jax")
    assert (found.returncode, found.stdout) == (0, f"{requirement}\n")
    assert reason in found.stderr


def test_find_jax_without_a_driver(machine):
    assert machine.call("find-jax").stdout == "jax\n"
    write_script(machine.bin / "nvidia-smi", "echo 'couldn\\'t communicate with the NVIDIA driver'; exit 9")
    assert machine.call("find-jax").stdout == "jax\n"


# Makefile


# Answers the search, makes an environment out of itself, notes what is asked for, and lets pip fail on demand.
FAKE_INTERPRETER = """
    case "$*" in
    "-I -c"*) echo "3.12.1 venv $0" ;;
    "-c print"*) cat .venv/ready ;;
    "-m venv"*) echo "$*" >>calls; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip"*) echo "$*" >>calls; [ ! -e pip.fails ] ;;
    "-m cmm"* | "-m pytest"*) echo "$*" >>calls ;;
    esac
"""
VENV, INSTALL, RUN = "-m venv --clear .venv", "-m pip install", "-m cmm"


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A copy of the set-up files, in a folder with a space in its name, and a fake interpreter."""

    root: pathlib.Path

    def make(self, *args):
        """Returns the exit status, and what the interpreter was asked for."""
        log = self.root / "calls"
        log.unlink(missing_ok=True)
        env = {"PATH": f"{self.root / 'tools'}:{os.environ['PATH']}", "HOME": str(self.root)}
        done = subprocess.run(["make", *args], cwd=self.root, env=env, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines() if log.exists() else []


def same_calls(calls, starts):
    return len(calls) == len(starts) and all(call.startswith(s) for call, s in zip(calls, starts, strict=True))


@pytest.fixture
def checkout(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    root = tmp_path / "a check out"
    shutil.copytree(ROOT / ".ci", root / ".ci")
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    # Under the name that is looked for first, lest an interpreter of this machine come before it.
    write_script(root / "tools" / "python3.13", FAKE_INTERPRETER)
    return Checkout(root)


def test_make_installs_once_and_passes_arguments_on(checkout):
    status, calls = checkout.make("run", "ARGS=--devices 2")
    assert status == 0 and same_calls(calls, [VENV, INSTALL, INSTALL, RUN])
    assert "-r requirements.txt" in calls[1] and "--no-deps --editable ." in calls[2]
    assert calls[3] == f"{RUN} --devices 2"
    status, calls = checkout.make("run")
    assert status == 0 and same_calls(calls, [RUN])


@pytest.mark.parametrize("first", [True, False])
def test_make_starts_anew_after_an_interrupted_set_up(checkout, first):
    if not first:
        assert checkout.make("run")[0] == 0
        change_pins(checkout)
    (checkout.root / "pip.fails").touch()
    status, calls = checkout.make("run")
    assert status != 0 and RUN not in calls
    (checkout.root / "pip.fails").unlink()
    status, calls = checkout.make("run")
    assert status == 0 and same_calls(calls, [VENV, INSTALL, INSTALL, RUN])


def change_pins(checkout):
    later = (checkout.root / ".venv/ready").stat().st_mtime + 10
    os.utime(checkout.root / "requirements.txt", (later, later))


@pytest.mark.parametrize("change", ["interpreter vanished", "folder moved", "pins changed"])
def test_make_notices_that_the_environment_no_longer_fits(checkout, change):
    assert checkout.make("run")[0] == 0
    if change == "interpreter vanished":
        (checkout.root / ".venv/bin/python").unlink()
    elif change == "folder moved":
        moved = Checkout(checkout.root.with_name("elsewhere"))
        checkout.root.rename(moved.root)
        checkout = moved
    else:
        change_pins(checkout)
    status, calls = checkout.make("run")
    update = [INSTALL, INSTALL, RUN]
    assert status == 0 and same_calls(calls, update if change == "pins changed" else [VENV, *update])


def test_make_clean_can_precede_another_target(checkout):
    for goals in (["run"], ["clean", "run"]):
        status, calls = checkout.make(*goals)
        assert status == 0 and same_calls(calls, [VENV, INSTALL, INSTALL, RUN])


def test_make_runs_tests_and_then_notebooks_where_there_are_some(checkout):
    status, calls = checkout.make("test", "ARGS=-k ring", "JOBS=3")
    assert status == 0 and same_calls(calls, [VENV, INSTALL, INSTALL, "-m pytest -n 3"])
    assert calls[3].endswith("-k ring")
    (checkout.root / "notebooks").mkdir()
    (checkout.root / "notebooks" / "01_why.ipynb").touch()
    status, calls = checkout.make("test")
    assert status == 0 and same_calls(calls, ["-m pytest", "-m pytest"])
    assert (
        "--nbval " in calls[1] and "--nbval-cell-timeout=" in calls[1] and calls[1].endswith("notebooks/01_why.ipynb")
    )


def test_make_runs_one_test_process_where_there_are_gpus(checkout):
    write_script(checkout.root / "tools" / "nvidia-smi", "exit 9")
    status, calls = checkout.make("test")
    assert status == 0 and "-m pytest -n 0 " in calls[-1]


def test_make_without_an_interpreter_leaves_nothing_behind(checkout):
    write_script(checkout.root / "tools" / "python3.12", 'echo "3.11.2 venv $0"')
    status, calls = checkout.make("run", "PYTHON=tools/python3.12")
    assert status != 0 and calls == []
    assert not (checkout.root / ".venv").exists()


def test_make_sets_no_flags_of_jax():
    text = (ROOT / "Makefile").read_text() + (ROOT / ".ci" / "run").read_text()
    assert not re.search("XLA_FLAGS|JAX_|PJRT_", text)
