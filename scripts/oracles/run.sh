#!/usr/bin/env bash
# Asks public libraries what our arithmetic should give, and stores their answers in tests/parity/expected/.
#   scripts/oracles/run.sh              all of them
#   scripts/oracles/run.sh verl trl     these
# Each library gets an environment of its own, which is kept: in .venv-oracles/, or in $ORACLE_VENVS.
set -euo pipefail
cd "$(dirname "$0")/../.."
venvs=${ORACLE_VENVS:-.venv-oracles}
export OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1

install() {
    local library=$1 pip="$venvs/$1/bin/python -m pip install --quiet"
    python3 -m venv "$venvs/$library"
    $pip torch==2.13.0 numpy
    case $library in
        verl) # its full dependencies ask for GPU packages
            $pip packaging ray==2.55.0 tensordict==0.10.0 omegaconf transformers==5.10.1 codetiming
            $pip --no-deps verl==0.9.1
            ;;
        trl) $pip trl==1.12.0 transformers==5.19.0 ;; # 1.13 has no PPO
        torchrl) $pip torchrl==0.14.1 ;;
        openrlhf) # flash-attn, which it requires, does not install without CUDA
            $pip transformers==5.10.1 peft pylatexenc sympy
            $pip --no-deps openrlhf==0.11.2
            ;;
    esac
    touch "$venvs/$library/ready"
}

[ $# -gt 0 ] || set -- verl trl torchrl openrlhf
for library in "$@"; do
    if [ ! -e "scripts/oracles/${library}_oracle.py" ]; then
        echo "no oracle called $library: there are verl, trl, torchrl and openrlhf" >&2
        exit 2
    fi
    [ -e "$venvs/$library/ready" ] || install "$library"
    "$venvs/$library/bin/python" "scripts/oracles/${library}_oracle.py"
done
