#!/usr/bin/env bash
# merge.sh EXPERIMENT [section.key=value ...]: trained submodels to the full MoE, and its router (and what comes before, where it is missing).
set -euo pipefail
experiment=${1:?usage: merge.sh EXPERIMENT [section.key=value ...]}
exec disco merge "$experiment" "${@:2}"
