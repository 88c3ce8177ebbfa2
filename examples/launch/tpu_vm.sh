#!/usr/bin/env bash
# One host of a Cloud TPU slice. Start it on every host at once, from your workstation:
#
#   gcloud compute tpus tpu-vm scp --recurse . NAME:jax_ep --worker=all
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command \
#     'cd jax_ep && pip install ".[examples]" "jax[tpu]" && examples/launch/tpu_vm.sh'
#
# Nothing names a coordinator or a rank: jax.distributed.initialize() asks the TPU's own metadata.
# There are no native kernels for TPUs: jax_ep takes implementation="xla" by itself.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec python examples/train_moe_lm.py "$@"
