#!/usr/bin/env bash
# Open MPI as the launcher only: it starts the processes, jax_ep sends nothing through it.
#
#   NUM_PROCESSES=8 HOSTFILE=hosts examples/launch/mpirun.sh [options of train_moe_lm.py]
#
# HOSTFILE has a line `NAME slots=PROCESSES` for each host; without it all run on this one. Every
# host needs the checkout and the Python environment at the same paths.
# Open MPI 4: JAX finds the job in mpirun's variables. Open MPI 5 has no coordinator that JAX can
# find: set JAX_COORDINATOR_ADDRESS=HOST:PORT, any free port of the first process's host.
set -euo pipefail
cd "$(dirname "$0")/../.."

options=(-n "${NUM_PROCESSES:-4}")
[ -z "${HOSTFILE-}" ] || options+=(--hostfile "$HOSTFILE")
options+=(--bind-to none)  # a process has many threads; bound to one core they take turns
options+=(-x PATH)
for name in JAX_COORDINATOR_ADDRESS JAX_PLATFORMS; do  # other hosts get only what is named
  [ -z "${!name-}" ] || options+=(-x "$name")
done

exec mpirun "${options[@]}" python examples/train_moe_lm.py "$@"
