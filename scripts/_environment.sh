# shellcheck shell=bash
# Sourced by the scripts beside it. `prepare_environment core|dev` makes the repository's .venv ready and puts it first
# on PATH. The first run installs; later runs only compare a stamp, until pyproject.toml changes.
#
# An active virtual environment is never used or changed. To use another PyTorch build (CPU only, another CUDA), install
# it into .venv first: a torch that can be imported is left as it is.

REPOSITORY_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY_ROOT/.venv"
STAMP="$VENV/.yggdrasil-setup" # one line: fingerprint of what was installed, then "core" or "dev"
TORCH_REQUIREMENT="torch==2.13.0"

say() { printf '==> %s\n' "$*" >&2; }

fail() { # status, sentence
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}

is_supported_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_supported_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    if is_supported_python "$VENV/bin/python"; then
        return
    fi
    if [[ -x "$VENV/bin/python" ]]; then
        fail 2 "the Python in .venv is older than 3.11 or does not run; remove .venv and run this again."
    fi
    python="$(find_python)" || fail 2 "Yggdrasil needs Python 3.11 or newer, and no such python3 was found on PATH."
    say "Creating .venv with $("$python" --version)"
    "$python" -m venv "$VENV" || fail 2 "python3 could not create .venv; on Debian and Ubuntu install python3-venv first."
}

# The location counts too: an editable install points at the folder that it was made in.
fingerprint() {
    { printf '%s\n' "$REPOSITORY_ROOT" && cat "$REPOSITORY_ROOT/pyproject.toml"; } |
        "$VENV/bin/python" -IS -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
        fail 1 "set-up could not install: $* (pip's reason is above)."
}

install_package() { # core or dev
    local target="$REPOSITORY_ROOT"
    if [[ "$1" == dev ]]; then
        target+="[dev]"
    fi
    rm -f "$STAMP"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null
    if ! "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
        say "Installing $TORCH_REQUIREMENT (a large download, once)"
        pip_install "$TORCH_REQUIREMENT"
    fi
    say "Installing Yggdrasil ($1) and what it needs"
    pip_install --editable "$target"
}

prepare_environment() { # core or dev
    local extras="$1" current stamped="" stamped_extras=""
    make_venv
    current="$(fingerprint)"
    if [[ -f "$STAMP" ]]; then
        read -r stamped stamped_extras <"$STAMP" || true
    fi
    if [[ "$stamped_extras" == dev ]]; then
        extras=dev # dev holds all of core
    fi
    if [[ "$stamped $stamped_extras" != "$current $extras" ]]; then
        install_package "$extras"
        printf '%s %s\n' "$current" "$extras" >"$STAMP"
        say "Environment ready"
    fi
    if [[ -z "${CXX:-}" ]] && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        say "Note: no C++ compiler was found (g++ or clang++): without a wheel's libraries the slower portable CPU kernels are used."
    fi
    unset PYTHONHOME
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}
