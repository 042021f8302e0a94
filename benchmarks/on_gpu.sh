#!/usr/bin/env bash
# Measure every figure that needs a GPU, in one run of less than ten minutes.
#
#     benchmarks/on_gpu.sh                       on a machine with a GPU; the report lands in benchmarks/results
#     benchmarks/on_gpu.sh --rehearse            the same with tiny models on a CPU, to show that it works
#     benchmarks/on_gpu.sh --table [FILE]        show a report
#
# From a checkout, with nothing but torch, transformers and accelerate installed. PYTHON names the
# interpreter, COMMIT the commit where there is no .git, OUT the folder for the report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"
