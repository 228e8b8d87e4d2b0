#!/usr/bin/env bash
# report.sh EXPERIMENT [section.key=value ...]: report.html and report.md (and what comes before, where it is missing).
set -euo pipefail
experiment=${1:?usage: report.sh EXPERIMENT [section.key=value ...]}
exec disco report "$experiment" "${@:2}"
