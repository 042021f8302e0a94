#!/usr/bin/env bash
# Measure every figure that needs a GPU, in one run of less than ten minutes.
#
#     benchmarks/on_gpu.sh                       on a machine with a GPU; the report lands in benchmarks/results
#     benchmarks/on_gpu.sh --rehearse            the same with tiny models on a CPU, to show that it works
#     benchmarks/on_gpu.sh --table [FILE]        show a report
#     benchmarks/on_gpu.sh --distil ...          distil at full width next to the plain loop; see full_width.py
#
# From a checkout, with nothing but torch, transformers and accelerate installed. PYTHON names the
# interpreter, COMMIT the commit where there is no .git, OUT the folder for the report. `--distil` also
# needs what `distil pretrain` needs (pydantic, pyarrow, typer, rich, xxhash), and a corpus.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [[ ${1-} == --distil ]]; then
  shift
  exec "${PYTHON:-python3}" -m benchmarks.full_width "$@"
fi
exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"
