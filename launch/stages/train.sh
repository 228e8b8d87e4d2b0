#!/usr/bin/env bash
# train.sh EXPERIMENT SUBMODEL [section.key=value ...]: one submodel on its cluster, on one card.
# Any number of them can run at once, in the same run folder, each with its own SUBMODEL:
#   for k in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$k launch/stages/train.sh experiment.yaml $k & done; wait
# A killed one goes on from its checkpoint when it is started again.
set -euo pipefail
experiment=${1:?usage: train.sh EXPERIMENT SUBMODEL [section.key=value ...]}
submodel=${2:?usage: train.sh EXPERIMENT SUBMODEL [section.key=value ...]}
exec disco train "$experiment" --submodel "$submodel" "${@:3}"
