# Sourced by the scripts beside it: ensure_environment installs this package and its dependencies into .venv.
#
# Nothing happens if .venv was already installed from the same setup.cfg, constraints.txt and Python.
# A run that is stopped half-way leaves no stamp, so the next run continues the installation.
# RECYCLE_PINS: releases in place of those in constraints.txt, as "torch==2.6.0 deepspeed==0.19.3".
# RECYCLE_INSTALL_TIMEOUT: the most seconds that one pip call may take (default 1800).

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$checkout/.venv
constraints=$checkout/scripts/constraints.txt
pins=(${RECYCLE_PINS:-})
megatron_lm=0.19.2  # with its training loop, in its own folder, for the tests' Megatron-LM jobs

say() { echo "$(basename "$0"): $*" >&2; }

fail() { say "$*"; exit 1; }

_wanted() {  # the inputs that .venv has to be installed from
    { "$venv/bin/python" --version; echo "$checkout" "$megatron_lm" "${pins[@]}"; cat "$checkout/setup.cfg" "$checkout/pyproject.toml" "$constraints"; } 2> /dev/null | sha256sum | cut -d' ' -f1
}

_pinned() {  # constraints.txt with RECYCLE_PINS in it
    local pin skip=()
    for pin in "${pins[@]}"; do skip+=(-e "^${pin%%==*}=="); done
    if [ ${#pins[@]} = 0 ]; then cat "$constraints"; else grep -v "${skip[@]}" "$constraints"; printf '%s\n' "${pins[@]}"; fi
}

_pip() {  # one pip call within its deadline
    # PIP_CONSTRAINT also reaches the builds of source packages; pip splits it at spaces, hence the relative path
    cd "$checkout"
    PIP_CONSTRAINT=.venv/constraints.txt timeout "${RECYCLE_INSTALL_TIMEOUT:-1800}" \
        "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >&2 && return
    local status=$?
    [ $status = 124 ] && fail "pip took longer than ${RECYCLE_INSTALL_TIMEOUT:-1800} s; run again to go on, or set RECYCLE_INSTALL_TIMEOUT"
    fail "pip failed (its message stands above); run again once that is repaired"
}

_install() {
    if [ ! -x "$venv/bin/python" ]; then
        say "creating .venv"
        python3 -m venv "$venv" || fail "python3 -m venv failed: install Python 3.11 or newer with its venv module"
    fi
    _pinned > "$venv/constraints.txt"
    say "installing torch (first, so that nothing else chooses its version)"
    _pip $(grep -E '^(setuptools|torch)==' "$venv/constraints.txt")
    say "installing this package and its dependencies"
    _pip --editable ".[deepspeed,megatron,huggingface,report,test,exact,docs,tools]"
    _install_megatron_lm
    say "compiling the planner's inner loops (once)"
    "$venv/bin/python" -c "from recycle_plugin import planner; planner.warm()" || fail "the planner's loops could not be compiled"
    _wanted > "$venv/recycle-installed"
    say "installed into .venv"
}

_install_megatron_lm() {  # its wheel requires Python 3.12; tests/support/megatron_lm.py adds what 3.11 lacks
    local folder=$venv/megatron_lm target=3.12
    "$venv/bin/python" -c "import sys; sys.exit(sys.version_info < (3, 12))" && target=$("$venv/bin/python" -c "import sys; print('%d.%d' % sys.version_info[:2])")
    rm -rf "$folder"
    say "putting Megatron-LM $megatron_lm into $folder"
    if ! timeout "${RECYCLE_INSTALL_TIMEOUT:-1800}" "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
        --no-deps --no-compile --ignore-requires-python --only-binary :all: --python-version "$target" \
        --target "$folder" "megatron-core==$megatron_lm" >&2; then
        rm -rf "$folder"
        say "Megatron-LM $megatron_lm could not be had: its jobs are not tried (tests/cluster/test_megatron_lm.py)"
        return
    fi
    # the compiled index of datasets is for one Python: that of the release whose layers are installed
    cp -n "$venv"/lib/python*/site-packages/megatron/core/datasets/helpers_cpp*.so "$folder/megatron/core/datasets/"
}

_current() { [ "$(cat "$venv/recycle-installed" 2>/dev/null)" = "$(_wanted)" ]; }

ensure_environment() {
    command -v python3 > /dev/null || fail "python3 is missing: install Python 3.11 or newer"
    python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || fail "$(python3 --version) is too old: install Python 3.11 or newer"
    if ! _current; then
        mkdir -p "$venv"
        (
            if command -v flock > /dev/null; then  # two scripts at once: the second finds the first one's work
                flock 9
            fi
            _current || _install
        ) 9> "$venv/install.lock" || exit 1
    fi
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
}
