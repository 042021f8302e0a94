#!/usr/bin/env bash
# Measure on one GPU, in 12 minutes or less, what CPUs cannot show: the published step of 4,096 rows in bf16
# and fp16, ZeRO, a kill, an export, and what a teacher is worth in a few minutes.
#
#   bash benchmarks/gpu.sh pack IN CORPUS BODY    where packages can be downloaded: wheels, shards of
#                     the config CORPUS in rows of 512, and the sentence encoder BODY in fp16
#   bash benchmarks/gpu.sh run IN OUT             on the machine with the GPU
#   bash benchmarks/gpu.sh dry IN OUT             every step at tiny size on the CPU
#
# For an image with torch, transformers, accelerate and pyarrow. OUT receives exit codes and seconds in
# steps.txt, the steps' logs in logs.tar.gz, and records for `make results`. A step that fails or
# takes longer than its limit does not end the others. PEAK is the data sheet's FLOP/s, BUDGET the
# seconds of all steps: the last ones train for as long as is left, so set what the machine allows.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PYTHON:-python3} BUDGET=${BUDGET:-700} PEAK=${PEAK:-989e12}
distil() { "$PY" -m launch "$@"; }
tool() { "$PY" -m benchmarks.gpu "$@"; }

pack() {
    set -e
    mkdir -p "$1/wheels"
    "$PY" -m pip download --quiet --no-deps -c constraints.txt --dest "$1/wheels" -r tests/gpu/wheels.txt \
        hjson py-cpuinfo msgpack ninja einops
    DS_BUILD_OPS=0 "$PY" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1/wheels" deepspeed
    distil prepare "$2" output="$1/shards" tokenizer="$3" row_length=512
    tool half "$3" "$1/body"
    du -a -B1 "$1" | awk '{print $1, $2}'
    local size
    size=$(du -s -B1 "$1" | cut -f1)
    echo "in all: $size bytes, of at most 60000000"
    [ "$size" -lt 60000000 ]
}

# step NAME SECONDS COMMAND...: no command starts once the budget is spent.
step() {
    local name=$1 limit=$2 began=$SECONDS code left=$((BUDGET - SECONDS))
    shift 2
    [ "$DRY" = 0 ] || limit=$((4 * limit)) left=$limit
    ((left < limit)) && limit=$left
    if ((limit < 5)); then echo "$name: not started" | tee -a "$OUT/steps.txt"; return; fi
    timeout --kill-after=40 "$limit" bash -c '"$@"' step "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code, $((SECONDS - began)) s" | tee -a "$OUT/steps.txt"
    tail -n 3 "$OUT/$name.log"
    return $code
}

# The published config on random weights; the others below are small.
published() { echo pretrain configs/distilbert-base-uncased.yaml teacher="$W/teacher" shards="$IN/shards" \
    evaluation.every=0 logging.every=1 train.num_workers=2 train.micro_batch_size="$MICRO" "$@"; }
small() { published train.global_batch_size="$ROWS" train.micro_batch_size="$FEW" train.precision="$HALF" \
    student.dropout=0 student.attention_dropout=0 checkpoint.every=2 train.max_steps=12 "$@"; }

pair() {  # ZeRO $1 in two processes of this machine, which share its GPU by gloo
    local n=$1
    shift
    ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_CONFIG_FILE=launch/deepspeed/zero$n.json \
        "$PY" -m torch.distributed.run --standalone --nproc-per-node 2 --shutdown-timeout 10 -m launch "$@"
}
kill_and_resume() {  # $1: the run; the rest is its command
    local run=$1
    set -o pipefail
    shift
    "$PY" -m launch "$@" &
    until grep -q '"step": 4' "$run/metrics.jsonl" 2>/dev/null; do sleep 0.2; kill -0 $! || return 1; done
    kill -KILL $! || return 1  # it was over: nothing was killed
    wait $! 2>/dev/null
    "$PY" -m launch "$@" | tee "$run.again" && grep -q "continuing after step" "$run.again"
}
export -f distil tool kill_and_resume pair  # for step

# timed NAME SECONDS CONFIG KEYS...: a run that takes about so long.
timed() {
    local name=$1 seconds=$2 steps
    shift 2
    set -- pretrain "$@" logging.every="$EVERY"
    step "$name-probe" 60 distil "$@" output="$W/$name-probe" train.max_steps=$((4 * EVERY)) || return
    steps=$(tool steps "$W/$name-probe" "$seconds")
    step "$name" $((2 * seconds + 30)) distil "$@" output="$W/$name" train.max_steps="$steps"
}

measure() {
    IN=$(realpath "$1") W=$(mktemp -d)
    mkdir -p "$2" && OUT=$(realpath "$2")
    trap 'rm -rf "$W"' EXIT
    export PY PYTHONPATH=$PWD HF_HUB_OFFLINE=1
    if [ "$DRY" = 0 ]; then
        "$PY" -m pip install --quiet --no-deps --no-index "$IN"/wheels/* || exit 1
        WIDTH=768 ROWS=256 FEW=32 MICRO=auto HALF=bf16 PRECISIONS="bf16 fp16" BATCH=() EVERY=5
    else
        WIDTH=64 ROWS=8 FEW=4 MICRO=4 HALF=fp32 PRECISIONS=fp32 EVERY=1
        BATCH=(train.global_batch_size=8)
    fi
    tool teacher "$W/teacher" "$IN/body" --width "$WIDTH" || exit 1

    # a. Kernels and curves.
    step self-check 150 distil bench --self-check --record "$OUT/self-check.json"
    # b. The step of the paper, 4,096 rows by accumulation, beside its plan.
    step plan 60 distil $(published output="$W/plan" train.max_steps=4 train.precision="$HALF" "${BATCH[@]}") \
        --dry-run $([ "$DRY" = 0 ] && echo --hardware h200)
    for precision in $PRECISIONS; do
        step "$precision" 100 distil $(published output="$W/$precision" train.precision="$precision" \
            train.max_steps=4 checkpoint.every=0 "${BATCH[@]}") &&
            step "$precision-rates" 30 tool rates "$W/$precision" --peak "$PEAK" --record "$OUT/main-job-gpu.json"
    done
    # c. ZeRO beside one process.
    step one 60 distil $(small output="$W/one")
    for n in 1 2; do
        step "zero-$n" 60 pair $n $(small output="$W/zero-$n") &&
            step "zero-$n-compare" 20 tool compare "$W/one" "$W/zero-$n" --record "$OUT/main-job-gpu.json"
    done
    # d. SIGKILL in the fifth step, and the same command again.
    step killed 90 kill_and_resume "$W/killed" $(small output="$W/killed") &&
        step killed-compare 20 tool compare "$W/one" "$W/killed" --record "$OUT/main-job-gpu.json"
    # e. Export, and what plain transformers reads.
    step export 40 distil export "$W/killed" "$W/exported" && step guess 30 tool guess "$W/exported" "$IN/body"
    # f. A teacher of half of the time that is left, then both students in a quarter each.
    "$PY" - "$IN" "$W" "$DRY" <<'CONFIG'
import sys, yaml
inside, work, dry = sys.argv[1:]
run = yaml.safe_load(open("configs/english-3x384.yaml"))["runs"][0]
del run["sweep"], run["keep_weights"], run["evaluation"]["rows"]
rows = 32 if dry == "0" else 1
run["train"] |= {"global_batch_size": rows, "micro_batch_size": rows}
run |= {"shards": f"{inside}/shards", "teacher": f"{work}/mlm", "output": f"{work}/none"}
yaml.safe_dump(run, open(f"{work}/student.yaml", "w"))
run["model"] = {"init": f"{inside}/body"}
run["objective"] = {"name": "mlm"}
del run["teacher"], run["student"]
yaml.safe_dump(run, open(f"{work}/mlm.yaml", "w"))
CONFIG
    local left=$((BUDGET - SECONDS - 120))
    [ "$DRY" = 0 ] || left=20
    timed mlm $((left / 2)) "$W/mlm.yaml"
    timed triple $((left / 4)) "$W/student.yaml"
    timed control $((left / 4)) "$W/student.yaml" objective.kl=0 objective.mlm=1 objective.cosine=0
    step accuracy 60 distil evaluate "$W/triple" "$W/control" "$IN/shards" --teacher "$W/mlm" \
        --rows "$([ "$DRY" = 0 ] && echo 128 || echo 4)" --record "$OUT/main-job-gpu.json"
    echo "in all: $SECONDS s" | tee -a "$OUT/steps.txt"
    (cd "$OUT" && tar -czf logs.tar.gz -- *.log && rm -- *.log)
}

case ${1:-} in
    pack) shift && pack "$@" ;;
    run) DRY=0 && measure "$2" "$3" ;;
    dry) DRY=1 && measure "$2" "$3" ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
