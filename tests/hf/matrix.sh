#!/usr/bin/env bash
# The Hugging Face tests against several transformers releases: tests/hf/matrix.sh [pytest arguments]
# VERSIONS and PYTHON may be given; each release goes to a folder of its own, the environment stays as it is.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
folder=${FOLDER:-$(mktemp -d)}
for version in ${VERSIONS:-5.16.1 5.17.0 5.24.0}; do
    target=$folder/$version
    if [ ! -d "$target" ]; then
        "$python" -m pip install --quiet --no-deps --target "$target" "transformers==$version" || exit 1
        # Releases before 5.20 want huggingface_hub 1; those packages are pure Python.
        if [[ $version < 5.20 ]]; then
            "$python" -m pip install --quiet --target "$target" "huggingface_hub<2" || exit 1
        fi
    fi
    PYTHONPATH=$target "$python" -m pytest tests/hf "$@" >"$folder/$version.log" 2>&1
    echo "transformers $version: $([ $? -eq 0 ] && echo pass || echo FAIL)  $(tail -n 1 "$folder/$version.log")"
done
