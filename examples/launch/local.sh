#!/usr/bin/env bash
# Several processes on this machine, one device each; no cluster needed.
#
#   NUM_PROCESSES=4 examples/launch/local.sh [options of train_moe_lm.py]
#
# The launcher gives each process its rank, prefixes its output, and ends all if one fails.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec python -m jax_ep launch -n "${NUM_PROCESSES:-4}" examples/train_moe_lm.py "$@"
