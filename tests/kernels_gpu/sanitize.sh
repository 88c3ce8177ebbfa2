#!/usr/bin/env bash
# Runs the random scenarios of the GPU kernels under compute-sanitizer's memcheck, racecheck,
# synccheck and initcheck, one process per GPU; exits 1 if anything is reported that
# check_racecheck.py does not know to be false, or if a test failed or did not run.
#
#   tests/kernels_gpu/sanitize.sh BUILD [LOGS]
#
# BUILD is a CMake build folder with JAX_EP_GPU=cuda, JAX_EP_BUILD_TESTS=ON and
# CMAKE_CUDA_FLAGS="-lineinfo -DJAX_EP_RACECHECK": without the first, reports name no lines; without
# the second, one lane arrives at an mbarrier for its warp, behind a SyncWarp, which racecheck does
# not follow and reports, and words that are handed over have no functions of their own to be named
# by. SEEDS (3) scenarios per test; RANKS (2) of a group at most, all on the GPU of their process;
# TOOLS and TESTS choose among what there is. What takes longer than LIMIT (600) seconds has failed.
set -euo pipefail
build=$1
logs=${2:-$build/sanitizer-logs}
read -r -a tools <<<"${TOOLS:-memcheck racecheck synccheck initcheck}"
read -r -a tests <<<"${TESTS:-exchange_gpu_test push_gpu_test wire_gpu_test}"
export JAX_EP_TEST_SEEDS=${SEEDS:-3} JAX_EP_TEST_SMALL_RANKS=${RANKS:-2}
num_gpus=$(nvidia-smi --list-gpus | grep -c '^GPU')
if ((num_gpus == 0)); then
  echo "sanitize.sh: nvidia-smi lists no GPU" >&2
  exit 1
fi
mkdir -p "$logs"

# is_clean TOOL LOG: a log without a summary is a failure, whatever else it says.
is_clean() {
  case $1 in
    memcheck | synccheck | initcheck) grep -qF 'ERROR SUMMARY: 0 errors' "$2" ;;
    racecheck) python3 "$(dirname "$0")/check_racecheck.py" "$2" ;;
    *) return 1 ;;
  esac
}

# check TOOL TEST GPU: one test under one tool on one GPU.
check() {
  local log=$logs/$1-$2.log
  CUDA_VISIBLE_DEVICES=$3 timeout "${LIMIT:-600}" compute-sanitizer --tool "$1" --print-limit 100000 \
    "$build/tests/kernels_gpu/$2" --gtest_filter='*RandomScenarios*' >"$log" 2>&1 || true
  if is_clean "$1" "$log" && grep -q '\[  PASSED  \] 1 test' "$log"; then
    echo "$1 $2 on GPU $3: clean"
  else
    echo "$1 $2 on GPU $3: FAILED, see $log"
    tail -n 40 "$log"
    return 1
  fi
}

jobs=()
for tool in "${tools[@]}"; do
  for test in "${tests[@]}"; do jobs+=("$tool $test"); done
done

# run_on GPU: every num_gpus-th job, one after the other.
run_on() {
  local failed=0
  for ((i = $1; i < ${#jobs[@]}; i += num_gpus)); do
    read -r tool test <<<"${jobs[i]}"
    check "$tool" "$test" "$1" || failed=1
  done
  return "$failed"
}

workers=()
for ((gpu = 0; gpu < num_gpus; gpu++)); do
  run_on "$gpu" &
  workers+=("$!")
done
failed=0
for worker in "${workers[@]}"; do wait "$worker" || failed=1; done
exit "$failed"
