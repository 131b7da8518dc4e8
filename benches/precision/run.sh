#!/usr/bin/env bash
# One checkpoint, 200 steps of real text, on the CPU in fp32 and on a GPU in fp32 and bf16; and a run that moves between
# the two devices every 50 steps. Writes OUT/losses.json, which plot.py draws.
#
#   benches/precision/run.sh TEXT_FOLDER OUT
#
# PROGRAM names the program (target/release/tidemill), WORKERS the CPU's workers (8).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
text=${1:?a folder of text} out=${2:?a folder for results}
program=${PROGRAM:-target/release/tidemill} workers=${WORKERS:-8}
mkdir -p "$out"
log="$out/log"

"$program" prepare --input "$text" --glob '**/*' --seq-len 512 --output "$out/data" 2>>"$log"
cat >"$out/run.toml" <<TOML
[run]
dir = "$out/start"
seed = 17
steps = 20

[data]
dataset = "$out/data"

[batch]
samples_per_step = 8
lanes = 8

[schedule]
warmup_steps = 20
steps = 220

[checkpoint]
every_steps = 50
keep = 10
TOML

train() { "$program" train "$out/run.toml" "$@" >>"$log" 2>&1; }
train --set model.preset=mamba-10m --set device.backend=cpu -w "$workers"
start="$out/start/checkpoints/step-00000020"

# An arm begins with the checkpoint's weights, and a new optimizer.
arm() {
    local name=$1 steps=$2
    shift 2
    train --set run.dir="$out/$name" --set run.steps="$steps" --set schedule.steps=200 \
        --set schedule.warmup_steps=1 --set model.from="$start" "$@"
}
arm cpu-fp32 200 --set device.backend=cpu -w "$workers"
arm cuda-fp32 200 --set device.backend=cuda -w 1
arm cuda-bf16 200 --set device.backend=cuda --set device.precision=bf16 -w 1
for part in 1 2 3 4; do
    if ((part % 2)); then device=(--set device.backend=cpu -w "$workers"); else device=(--set device.backend=cuda -w 1); fi
    arm moving $((50 * part)) "${device[@]}"
done
python3 "$here/compare.py" "$out" cpu-fp32 cuda-fp32 cuda-bf16 moving
