#!/usr/bin/env bash
# finetune.sh EXPERIMENT [section.key=value ...]: the merged MoE, tuned by torchrun and DeepSpeed.
# One machine with four cards:
#   launch/stages/finetune.sh experiment.yaml finetune.processes=4 finetune.zero_stage=2
# Two such machines that share the run folder; node_command starts the same command on both of them:
#   launch/stages/finetune.sh experiment.yaml finetune.processes=8 launch.nodes=2 \
#     'launch.node_command=[srun, --nodes=2, --ntasks-per-node=1]'
set -euo pipefail
experiment=${1:?usage: finetune.sh EXPERIMENT [section.key=value ...]}
exec disco finetune "$experiment" "${@:2}"
