#!/usr/bin/env bash
# cluster.sh EXPERIMENT [section.key=value ...]: the clusters of the corpus (and what comes before, where it is missing).
set -euo pipefail
experiment=${1:?usage: cluster.sh EXPERIMENT [section.key=value ...]}
exec disco cluster "$experiment" "${@:2}"
