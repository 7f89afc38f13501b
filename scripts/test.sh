#!/usr/bin/env bash
# The checks, in order; the first that fails ends them.   scripts/test.sh [--lint | --all]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
# Many processes share few cores here: one thread each. Nothing is fetched from a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

# Each test has a limit of its own; this one is for a run that no longer comes to that.
HANGS=7200
tests() { timeout --foreground --kill-after=30 $HANGS python -m pytest "$@"; }
# Two files at a time: many tests have one thing to do, or wait. What needs the machine's network alone has it.
BY_TWO=(--numprocesses=2 --dist=loadfile)

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
    HANGS=28800
    tests "${BY_TWO[@]}" -m '' tests/unit tests/parity tests/distributed tests/e2e
    tests -m '' tests/cluster
    ;;
"")
    lint
    say "unit and parity"
    tests "${BY_TWO[@]}" tests/unit tests/parity
    say "distributed"
    tests "${BY_TWO[@]}" tests/distributed
    say "end to end"
    tests "${BY_TWO[@]}" tests/e2e
    say "several nodes (skipped where no network namespaces can be made)"
    tests tests/cluster
    ;;
*)
    echo "usage: scripts/test.sh [--lint | --all]" >&2
    exit 2
    ;;
esac
say "all good"
