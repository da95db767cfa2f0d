# Sourced by every command here: leaves a ready .venv, whatever state the checkout is in.
#
#   EXTRAS=demo,test; . "$(dirname "$0")/env.sh"    sets $ROOT and $PY; installs outfeed[EXTRAS] when it has to
#
# It installs again only when pyproject.toml, setup.py or a C source changed, or an extra is new.

set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PY="$ROOT/.venv/bin/python"

outfeed_fail() {
    echo "$(basename "$0"): $1" >&2
    exit 1
}

outfeed_python() {
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    outfeed_fail "needs Python 3.11 or newer and found none; install it or set PYTHON to its path"
}

outfeed_stamp() {
    (cd "$ROOT" && cat pyproject.toml setup.py __init__.py ./*/core/*.h ./*/core/*.c ./*/core/python/*.c | cksum | tr ' ' '-')
}

outfeed_install() {
    extras=$1
    stamp=$(outfeed_stamp)
    marks="$ROOT/.venv/outfeed"
    [ -f "$marks/$stamp+$extras" ] && return
    command -v "${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 ||
        outfeed_fail "needs a C compiler and found none; install one (Debian: apt-get install gcc python3-dev) or set CC"
    log="$ROOT/.venv/install.log"
    if ! [ -x "$PY" ]; then
        base=$(outfeed_python)
        echo "$(basename "$0"): making .venv with $base" >&2
        "$base" -m venv "$ROOT/.venv" ||
            outfeed_fail "could not make .venv with $base (Debian: apt-get install python3-venv)"
    fi
    echo "$(basename "$0"): installing outfeed[$extras] into .venv" >&2
    mkdir -p "$marks"
    if ! { "$PY" -m pip install --quiet 'setuptools>=77' 'cffi>=1.17' &&
        cd "$ROOT" && OUTFEED_WERROR=1 "$PY" -m pip install --quiet --no-build-isolation -e ".[$extras]"; } \
        >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        outfeed_fail "installing failed; the end of .venv/install.log is above"
    fi
    find "$marks" -type f ! -name "$stamp+*" -delete
    touch "$marks/$stamp+$extras"
}

# One install at a time: two commands started together must not build over each other.
mkdir -p "$ROOT/.venv"
if command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
fi
outfeed_install "$EXTRAS"
exec 9>&-
