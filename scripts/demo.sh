#!/usr/bin/env bash
# make demo: the environment, then everything else in it (scripts/demo.py, which takes the same arguments).
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" scripts/setup_env.py --group demo
exec .venv/bin/python scripts/demo.py --setup-seconds "$SECONDS" "$@"
