#!/usr/bin/env bash
# prepare.sh EXPERIMENT [section.key=value ...]: the corpus: read, deduplicate, split, tokenise (and what comes before, where it is missing).
set -euo pipefail
experiment=${1:?usage: prepare.sh EXPERIMENT [section.key=value ...]}
exec disco prepare "$experiment" "${@:2}"
