#!/usr/bin/env bash
# The checks, in order; the first that fails ends them.   scripts/test.sh [--lint | --all]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
# Many processes share few cores here: one thread each. Nothing is fetched from a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

# Each test has a limit of its own; this one is for a run that no longer comes to that. $1: seconds.
tests() { timeout --foreground --kill-after=30 "$1" python -m pytest "${@:2}"; }

lint() {
    say "style"
    ruff check --quiet .
    ruff format --check --quiet .
    say "import floors"
    lint-imports --no-cache --no-logo
    say "types"
    basedpyright
}

case "${1:-}" in
--lint)
    lint
    ;;
--all)
    lint
    say "all tests"
    export VERL_TEST_NEW_EXAMPLES=1
    tests 7200 -m '' tests
    ;;
"")
    lint
    say "unit and parity"
    tests 1200 tests/unit tests/parity
    say "distributed"
    tests 1800 tests/distributed
    say "end to end"
    tests 1800 tests/e2e
    say "several nodes (skipped where no network namespaces can be made)"
    tests 1200 tests/cluster
    ;;
*)
    echo "usage: scripts/test.sh [--lint | --all]" >&2
    exit 2
    ;;
esac
say "all good"
