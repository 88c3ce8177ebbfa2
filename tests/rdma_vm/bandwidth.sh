#!/usr/bin/env bash
# bandwidth.sh BUILD OUT: ib_write_bw (Debian: perftest) and our put+signal on one soft-RoCE device,
# if the benchmarks were built. Emulated: good for a comparison in one run, for nothing else.
set -euo pipefail
build=$1 out=$2
command -v ib_write_bw >/dev/null || { echo "ib_write_bw is not installed" && exit 1; }
[ -x "$build/benchmarks/bench_wire" ] || { echo "no benchmarks in $build" && exit 1; }
ib_write_bw -d "$RXE_DEV" -x "$RXE_GID_INDEX" -s 65536 -n 1000 -F >/dev/null &
sleep 1
ib_write_bw -d "$RXE_DEV" -x "$RXE_GID_INDEX" -s 65536 -n 1000 -F --report_gbits "$RXE_IP" |
  awk '$1 == 65536 {printf "ib_write_bw bandwidth 65536 %d %.4f\n", $2, $4 / 8}' | tee "$out/bandwidth"
wait
timeout 60 "$build/benchmarks/bench_wire" verbs 256 8388608 "" 40 | tee -a "$out/bandwidth"
