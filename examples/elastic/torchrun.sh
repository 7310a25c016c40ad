#!/bin/bash
# torchrun replaces a rank that dies, and with --nnodes=1:2 the training continues without a lost node.
#
#   ROOT=run examples/elastic/torchrun.sh                                          on one machine
#   ROOT=/shared/run NNODES=1:2 HEAD=node1:29400 examples/elastic/torchrun.sh --replicas 1      on each of two
set -euo pipefail

# Without it a restart may read keys of the previous life in torchrun's store: "Gloo connectFullMesh failed", NCCL
# "Connection refused", or a hang. torch 2.13 keeps that store from one restart to the next.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# The defaults, 15 s until a silent node counts as lost and 30 s of waiting for a replacement, are paid at each restart.
timeouts=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5

exec torchrun \
    --nnodes="${NNODES:-1}" \
    --nproc-per-node="${NPROC:-gpu}" \
    --max-restarts="${RESTARTS:-100}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:-localhost:0}" \
    --rdzv-id="${RUN:-train}" \
    --rdzv-conf="$timeouts" \
    "$(dirname "$0")/train.py" --root "$ROOT" --local-dir "${LOCAL_DIR:-/dev/shm/train}" "$@"
