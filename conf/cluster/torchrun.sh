#!/usr/bin/env bash
# One arm on several machines by torchrun: the same command on each, at the same time, with the first machine's name.
#   HEAD_NODE=gpu-01 NUM_NODES=2 conf/cluster/torchrun.sh --arm trm_max_0.05 seed=1
# output.dir must lie on a disk that all machines share.
set -euo pipefail
: "${HEAD_NODE:?the name or address of the first machine, which all others reach}"
: "${NUM_NODES:?the number of machines}"
GPUS="${GPUS:-8}"
exec "${TORCHRUN:-.venv/bin/torchrun}" \
  --nnodes="$NUM_NODES" --nproc-per-node="$GPUS" \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:${PORT:-29500}" --rdzv-id="${RUN_ID:-trm-repro}" \
  -m pipelines.cli train conf/paper.yaml "trainer.num_nodes=$NUM_NODES" "trainer.devices=$GPUS" "$@"
