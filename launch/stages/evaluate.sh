#!/usr/bin/env bash
# evaluate.sh EXPERIMENT [section.key=value ...]: every model of the run on held-out text (and what comes before, where it is missing).
set -euo pipefail
experiment=${1:?usage: evaluate.sh EXPERIMENT [section.key=value ...]}
exec disco evaluate "$experiment" "${@:2}"
