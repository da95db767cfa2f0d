"""The package as installed: its version, its commands, and that each dependency is accounted for."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import outfeed
import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("outfeed-gateway", "outfeed-launch", "outfeed-replay")
NEEDS = {"--instance": "--instance NAME", "--tokenizer": "--tokenizer PATH", "--text": "--text FILE"}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_the_installed_version_is_the_packages() -> None:
    assert importlib.metadata.version("outfeed") == outfeed.__version__


def test_installing_brings_the_commands() -> None:
    points = importlib.metadata.distribution("outfeed").entry_points.select(group="console_scripts")
    assert sorted(point.name for point in points) == sorted(COMMANDS)
    for point in points:
        assert callable(point.load())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_installed_command_runs(command: str) -> None:
    path = Path(sysconfig.get_path("scripts")) / command
    done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--instance" in done.stdout
    usage, options = done.stdout.split("\n\n", 1)
    for option in re.split(r"\n  (?=-)", options):
        name, _, said = " ".join(option.split()).partition(" ")
        flag = not re.match(r"[A-Z]+ ", said)
        assert flag or "default" in said or f"{name} " in usage, f"{command} {name} says no default: {said}"


@pytest.mark.parametrize("script", ["demo", "serve", "top", "chaos"])
def test_a_script_runs_without_its_docstrings(script: str) -> None:
    """As under PYTHONOPTIMIZE=2."""
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{script}.py"
    command = [sys.executable, "-OO", str(path), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("outfeed-gateway", ["--instance=x"]),
        ("outfeed-launch", ["--tokenizer=x"]),
        ("outfeed-replay", ["--instance=x", "--tokenizer=x", "--text=x"]),
    ],
)
def test_a_wrong_option_is_a_line_of_usage_and_a_line_that_says_it(
    command: str, needs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (point,) = importlib.metadata.entry_points(group="console_scripts", name=command)
    with pytest.raises(SystemExit) as left:
        point.load()([*needs, "--odd"])
    usage, said = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert usage == f"usage: {command} {' '.join(NEEDS[need.partition('=')[0]] for need in needs)} [options]"
    assert said == f"{command}: error: unrecognized arguments: --odd"


def test_an_sdist_has_what_is_built_and_read_and_no_part_of_the_tests(tmp_path: Path) -> None:
    checkout, made = tmp_path / "checkout", tmp_path / "made"
    leave = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=leave)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, str(made)]
    subprocess.run(command, cwd=checkout, capture_output=True, timeout=120, check=True)
    with tarfile.open(next(made.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["LICENSE", "README.md", "CHANGELOG.md", "setup.py", "py.typed"]
    for pattern in ("docs/*.md", "*/core/*.[ch]", "*/core/python/*.[ch]", "*/*.pyi"):
        found = [str(path.relative_to(checkout)) for path in checkout.glob(pattern)]
        assert found, pattern
        wanted += found
    wanted = [name for name in wanted if not name.startswith("tests/")]
    assert [name for name in wanted if name not in names] == []
    assert [name for name in names if name.startswith(("tests", "scripts"))] == []


def test_a_gateway_without_its_extra_says_what_to_install() -> None:
    hide = "import sys; sys.modules['uvloop'] = None; "
    code = hide + "from outfeed.gateway import __main__; sys.exit(__main__.main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "outfeed-gateway: uvloop is missing: install outfeed with its extra `gateway`"
    )


def test_a_free_threaded_python_is_refused_before_anything_is_compiled() -> None:
    code = (
        "import runpy, sysconfig; real = sysconfig.get_config_var\n"
        "sysconfig.get_config_var = lambda name: 1 if name == 'Py_GIL_DISABLED' else real(name)\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("outfeed does not run on a free-threaded Python")


def test_the_readme_names_each_installed_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in project()["scripts"]:
        assert f"| `{command}` |" in readme


def test_each_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    extras = project()["optional-dependencies"].values()
    for need in [*project()["dependencies"], *(need for extra in extras for need in extra)]:
        name = re.split(r"[>\[]", need)[0]
        if name != "outfeed":
            assert f"`{name}`" in page, f"docs/dependencies.md does not say why {name} is needed"
