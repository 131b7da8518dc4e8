#!/usr/bin/env bash
# How training scales over the GPUs of one machine: 1, 2, 4 and so on of those that nvidia-smi lists.
#
#   benches/scaling/run.sh OUT [measure.py's flags]
#
# Writes OUT/results.jsonl, one line for each measurement, and a log of each. Finished measurements are not repeated, so the
# jobs may be spread over several calls (--seconds limits the time of a call). PROGRAM names the program
# (target/release/tidemill), PYTHON a Python with PyTorch, whose DDP and FSDP2 are measured too (python3), PROMISES the test program of
# the whole system, whose tests of elasticity and of kills then run on all GPUs too.
#
# Then, on any machine, with matplotlib:
#
#   benches/scaling/simulate.py OUT/results.jsonl --plot benches/scaling/scaling.svg
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?a folder for results}
shift
mkdir -p "$out"
exec "${PYTHON:-python3}" "$here/measure.py" "$out" --program "${PROGRAM:-target/release/tidemill}" ${PROMISES:+--promises "$PROMISES"} "$@"
