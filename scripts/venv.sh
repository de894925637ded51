# Sourced by the other scripts: the virtual environment .venv and the package in it. Sets $root and $venv.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

note() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
[ -t 2 ] || note() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Whether $1 is a Python that can make a virtual environment for us. A name on PATH may be a shim that runs nothing.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" || fail "\$PYTHON ($PYTHON) is no Python 3.11 or newer with the venv module"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3; do
        if usable_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module was found (on Debian: apt install python3-venv); \
name one with PYTHON=/path/to/python"
}

# What the installation depends on; when it changes, the package is installed anew.
install_fingerprint() {
    (cd "$root" && cat pyproject.toml setup.py \
        $(find protos service/kernels -name '*.proto' -o -name '*.cpp' -o -name '*.h' -o -name build.py | sort)) |
        sha256sum | cut -d' ' -f1
}

# ensure_venv EXTRA...: .venv exists and holds the package, editable, with these extras.
ensure_venv() {
    if ! usable_python "$venv/bin/python"; then
        local python
        python=$(find_python)
        note "making .venv with $("$python" --version)"
        rm -rf "$venv"
        if command -v uv >/dev/null; then
            uv venv --quiet --seed --python "$python" "$venv"
        else
            "$python" -m venv "$venv"
        fi
    fi
    local fingerprint extra missing=()
    fingerprint=$(install_fingerprint)
    for extra in "$@"; do
        [ "$(cat "$venv/.installed-$extra" 2>/dev/null)" = "$fingerprint" ] || missing+=("$extra")
    done
    if [ ${#missing[@]} -eq 0 ] && [ -f "$root/numaserve/v1/__init__.py" ]; then
        return
    fi
    local joined quiet=()
    joined=$(IFS=,; echo "$*")
    # A terminal gets the installer's own progress.
    [ -t 2 ] || quiet=(--quiet)
    note "installing numaserve[$joined] into .venv (PyTorch is large: the first time takes minutes)"
    if command -v uv >/dev/null; then
        uv pip install "${quiet[@]}" --python "$venv/bin/python" --editable "$root[$joined]"
    else
        "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --editable "$root[$joined]"
    fi
    # setuptools lets an editable install go on when a build step fails.
    "$venv/bin/python" -c 'from numaserve.v1 import inference_pb2, control_pb2' ||
        fail "the installation made no gRPC stubs in numaserve/v1; see: .venv/bin/pip install -v -e ."
    for extra in "$@"; do
        echo "$fingerprint" >"$venv/.installed-$extra"
    done
}
