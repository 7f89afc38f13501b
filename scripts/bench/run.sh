#!/usr/bin/env bash
# make bench: the benchmarks, one after the other. Arguments go to each:   scripts/bench/run.sh [--quick | --model DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 # folders on this machine alone, and tables alone
case " $* " in
*" --quick "* | *" --model"*) ;;
*) .venv/bin/python scripts/prepare_model.py --out outputs/demo/model ;;
esac
for bench in training generation reshard overlap ppo_step memory checkpoint layouts; do
    .venv/bin/python -m "scripts.bench.$bench" "$@"
done
