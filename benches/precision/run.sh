#!/usr/bin/env bash
# One checkpoint, 200 steps of real text: on the CPU in fp32, on each GPU backend in fp32 and bf16, and a run that moves every
# 50 steps from the CPU over the GPUs back to the CPU. Writes OUT/losses.json, which plot.py draws.
#
#   benches/precision/run.sh TEXT_FOLDER OUT
#
# PROGRAM names the program (target/release/tidemill), WORKERS the CPU's workers (8), GPUS the backends ("cuda rocm"; "cuda" or
# "rocm" if only one is present). HIP_LIBRARIES is a folder of libraries that replace ROCm's: on an NVIDIA GPU the output of
# kernels/tests/hip_on_cuda/build, without a GPU the libraries that the tests build from kernels/tests/hip_runtime (then
# with a small model and few steps: MODEL, STEPS, SEQ_LEN and LANES).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
text=${1:?a folder of text} out=${2:?a folder for results}
program=${PROGRAM:-target/release/tidemill} workers=${WORKERS:-8}
read -ra gpus <<<"${GPUS:-cuda rocm}"
model=${MODEL:-mamba-10m} steps=${STEPS:-200} seq_len=${SEQ_LEN:-512} lanes=${LANES:-8}
if ((steps % 20 != 0)); then
    echo "STEPS: expected a multiple of 20, found $steps" >&2
    exit 1
fi
mkdir -p "$out"
log="$out/log"

"$program" prepare --input "$text" --glob '**/*' --seq-len "$seq_len" --output "$out/data" 2>>"$log"
cat >"$out/run.toml" <<TOML
[run]
dir = "$out/start"
seed = 17
steps = $((steps / 10))

[data]
dataset = "$out/data"

[batch]
samples_per_step = $lanes
lanes = $lanes

[schedule]
warmup_steps = $((steps / 10))
steps = $((steps + steps / 10))

[checkpoint]
every_steps = $((steps / 4))
keep = 10
TOML

# Trains on a device: cpu, or a GPU backend and a precision.
train() {
    local device=$1
    shift
    local flags=(--set device.backend="${device%%-*}" -w 1) libraries=${LD_LIBRARY_PATH:-}
    case $device in
    cpu*) flags=(--set device.backend=cpu -w "$workers") ;;
    rocm*) libraries="${HIP_LIBRARIES:+$HIP_LIBRARIES${libraries:+:}}$libraries" ;;
    esac
    LD_LIBRARY_PATH=$libraries "$program" train "$out/run.toml" "${flags[@]}" \
        --set device.precision="${device##*-}" "$@" >>"$log" 2>&1
}
train cpu-fp32 --set model.preset="$model"
start=$(echo "$out"/start/checkpoints/step-*)

# An arm begins with the checkpoint's weights, and a new optimizer.
arm() {
    local name=$1 until=$2 device=$3
    train "$device" --set run.dir="$out/$name" --set run.steps="$until" --set schedule.steps="$steps" \
        --set schedule.warmup_steps=1 --set model.from="$start"
}
arm cpu-fp32 "$steps" cpu-fp32
arms=()
for gpu in "${gpus[@]}"; do
    for precision in fp32 bf16; do
        arm "$gpu-$precision" "$steps" "$gpu-$precision"
        arms+=("$gpu-$precision")
    done
done
# A quarter of the steps each: with one GPU backend CPU, GPU, CPU, GPU; with two CPU, the first, the second, CPU.
route=(cpu "${gpus[0]}" "${gpus[1]:-cpu}" "${gpus[1]:+cpu}")
for part in 1 2 3 4; do
    device=${route[$((part - 1))]:-${gpus[0]}}
    arm moving $((steps / 4 * part)) "$device-fp32"
done
python3 "$here/compare.py" "$out" cpu-fp32 "${arms[@]}" moving
