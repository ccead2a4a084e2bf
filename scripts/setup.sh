#!/bin/sh
# Prepares what the named tasks need, inside the checkout: scripts/setup.sh demo|fast|test.
# Finds a Python 3.11 or newer and leaves the rest to setup.py.
set -eu
cd "$(dirname "$0")/.."

runs() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    runs "$PYTHON" || {
        echo "setup: PYTHON=$PYTHON is not a Python 3.11 to 3.14; set PYTHON to one" >&2
        exit 2
    }
    exec "$PYTHON" scripts/setup.py "$@"
fi
for python in python3.11 python3.12 python3.13 python3.14 python3; do
    if runs "$python"; then
        exec "$python" scripts/setup.py "$@"
    fi
done
echo "setup: no Python 3.11 to 3.14 on PATH; install one (apt install python3 python3-venv) or set PYTHON=/path/to/python3.11" >&2
exit 2
