# Sourced by every command here: leaves a ready .venv, whatever state the checkout is in.
#
#   EXTRAS=demo,gateway; . "$(dirname "$0")/env.sh"    sets $ROOT and $PY; installs outfeed[EXTRAS] when it has to
#
# PYTHON names the Python to make .venv with (PYTHON=python3.13 ./scripts/test).
#
# It compiles only when pyproject.toml, setup.py or a C source changed, so that no command replaces the code of an
# instance that runs; and asks pip for packages only when pyproject.toml changed, or an extra is new that no extra
# before it held.

set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PY="$ROOT/.venv/bin/python"

outfeed_fail() {
    echo "$(basename "$0"): $1" >&2
    exit 1
}

outfeed_python() {
    [ -n "${PYTHON:-}" ] && set -- "$PYTHON" || set -- python3.11 python3 python3.12 python3.13 python3.14
    fits='import sys, sysconfig
sys.exit(sys.version_info < (3, 11) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'
    for candidate in "$@"; do
        if "$candidate" -c "$fits" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    outfeed_fail "needs Python 3.11 or newer, not free-threaded; looked for: $*. Install one, or set PYTHON to its path"
}

# A .venv keeps the Python that it was made with: say so, rather than run on another one than PYTHON names.
outfeed_same_python() {
    version='import sys; print(sys.version)'
    asked=$("$PYTHON" -c "$version") || outfeed_fail "PYTHON is $PYTHON, which does not run"
    made=$("$PY" -c "$version") || made="one that no longer runs"
    [ "$asked" = "$made" ] ||
        outfeed_fail "PYTHON=$PYTHON is $asked, but .venv was made with $made; delete .venv when nothing runs from it"
}

outfeed_stamp() {
    cat "$@" | cksum | tr ' ' '-'
}

# `outfeed_needs FILE EXTRA...`: prints the extras that these ones hold, themselves too; writes all packages to FILE.
outfeed_needs() {
    "$PY" - "$ROOT/pyproject.toml" "$@" <<'END'
import re, sys, tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
asked, packages, held = sys.argv[3:], list(project["dependencies"]), []
while asked:
    extra = asked.pop()
    held.append(extra)
    for need in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"outfeed\[(.*)\]", need)
        asked += own[1].split(",") if own else []
        packages += [] if own else [need]
open(sys.argv[2], "w").write("\n".join(packages))
print(*held)
END
}

outfeed_install() {
    [ -z "${PYTHON:-}" ] || ! [ -x "$PY" ] || outfeed_same_python
    extras=$(echo "$1" | tr ',' ' ')
    marks="$ROOT/.venv/outfeed"
    built="built+$(cd "$ROOT" &&
        outfeed_stamp pyproject.toml setup.py __init__.py ./*/core/*.h ./*/core/*.c ./*/core/python/*.c)"
    listed=$(outfeed_stamp "$ROOT/pyproject.toml")
    missing=
    for extra in $extras; do
        [ -f "$marks/$extra+$listed" ] || missing="$missing $extra"
    done
    [ -f "$marks/$built" ] && [ -z "$missing" ] && return
    [ -w "$ROOT" ] ||
        outfeed_fail "$ROOT cannot be written to, and its .venv is not ready for this: run it once where, and as who, it can"
    # Before anything is downloaded: a missing compiler is said at once.
    [ -f "$marks/$built" ] || command -v "${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 ||
        outfeed_fail "needs a C compiler and found none; install one (Debian: apt-get install gcc python3-dev) or set CC"
    log="$ROOT/.venv/install.log"
    if ! [ -x "$PY" ]; then
        base=$(outfeed_python)
        echo "$(basename "$0"): making .venv with $base" >&2
        "$base" -m venv "$ROOT/.venv" ||
            outfeed_fail "could not make .venv with $base (Debian: apt-get install python3-venv)"
    fi
    mkdir -p "$marks"
    if [ -n "$missing" ]; then
        echo "$(basename "$0"): installing what outfeed[$1] needs into .venv" >&2
        held=$(outfeed_needs "$ROOT/.venv/packages.txt" $missing)
        outfeed_pip -r "$ROOT/.venv/packages.txt"
        find "$marks" -type f ! -name "*+$listed" ! -name 'built+*' -delete
        for extra in $held; do
            touch "$marks/$extra+$listed"
        done
    fi
    if ! [ -f "$marks/$built" ]; then
        echo "$(basename "$0"): compiling outfeed into .venv" >&2
        outfeed_pip 'setuptools>=77' 'cffi>=1.17'
        outfeed_pip --no-build-isolation --no-deps -e "$ROOT"
        find "$marks" -type f -name 'built+*' -delete
        touch "$marks/$built"
    fi
}

outfeed_pip() {
    if ! (cd "$ROOT" && OUTFEED_WERROR=1 "$PY" -m pip install --quiet "$@") >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        outfeed_fail "installing failed; the end of .venv/install.log is above"
    fi
}

# One install at a time: two commands started together must not build over each other. Where nothing can be written
# nothing is installed, and a .venv that is ready does without.
[ -w "$ROOT" ] && mkdir -p "$ROOT/.venv"
if [ -w "$ROOT" ] && command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
fi
outfeed_install "$EXTRAS"
exec 9>&-
