#!/usr/bin/env bash
# Runs the tests: tier 0 (pure) and tier 1 (software graphs on Vulkan); with --cuda also tier 2.
#
# Tier 1 needs a Vulkan driver, not a GPU: Mesa's software driver is enough. Where none is found, this
# script installs it if it may, and otherwise says what to install. The tiers are in CONTRIBUTING.md.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/test.sh [--features LIST] [--cuda] [-- CARGO_TEST_ARGUMENTS]

  --features LIST  backends to build, comma-separated (default: $FEATURES, or wgpu,flex);
                   without wgpu the tier-1 tests are left out and no Vulkan driver is needed
  --cuda           add the feature cuda and its tests, tests/cuda.rs; needs an NVIDIA GPU
  -h, --help       this text

examples:
  scripts/test.sh
  scripts/test.sh --features flex                     tier 0 alone
  scripts/test.sh --cuda -- --test cuda               the CUDA tests alone
  scripts/test.sh -- --lib -- --nocapture             the unit tests, with their output
USAGE
}

say() {
    printf 'test.sh: %s\n' "$@" >&2
}

features=${FEATURES:-wgpu,flex}
while [ $# -gt 0 ]; do
    case $1 in
        --features)
            [ $# -ge 2 ] || { say "--features needs a list"; exit 2; }
            features=$2
            shift 2
            ;;
        --features=*)
            features=${1#*=}
            shift
            ;;
        --cuda)
            cuda=yes
            shift
            ;;
        --)
            shift
            break
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
done

has_feature() {
    case ,$features, in *,"$1",*) true ;; *) false ;; esac
}

if [ "${cuda:-no}" = yes ] && ! has_feature cuda; then
    features=${features:+$features,}cuda
fi

# A driver that answers, or, without the tool to ask it, a loader and a driver's manifest.
have_vulkan() {
    if command -v vulkaninfo >/dev/null; then
        vulkaninfo --summary >/dev/null 2>&1
        return
    fi
    # An ordinary user's PATH often lacks ldconfig. No `grep -q`: it would end ldconfig early, a failure.
    PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | grep 'libvulkan\.so\.1' >/dev/null || return 1
    local files=${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}} file list
    if [ -n "$files" ]; then # these replace the folders
        IFS=: read -ra list <<<"$files"
        for file in "${list[@]}"; do
            [ -e "$file" ] && return 0
        done
        return 1
    fi
    for file in {/usr/share,/usr/local/share,/etc,"${XDG_DATA_HOME:-$HOME/.local/share}"}/vulkan/icd.d/*.json; do
        [ -e "$file" ] && return 0
    done
    return 1
}

install_vulkan() {
    command -v apt-get >/dev/null || return 1
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    say "no Vulkan driver found: installing Mesa's (mesa-vulkan-drivers, libvulkan1)"
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends mesa-vulkan-drivers libvulkan1 >/dev/null
}

# Without XDG_RUNTIME_DIR the Vulkan loader prints an error at each start. Containers and CI have none.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

# On macOS the feature wgpu uses Metal, on Windows also Direct3D.
if has_feature wgpu && [ "$(uname -s)" = Linux ] && ! have_vulkan; then
    if ! install_vulkan || ! have_vulkan; then
        say "the tier-1 tests need a Vulkan driver, and none was found. Mesa's software driver does:" \
            "  Debian, Ubuntu   apt-get install mesa-vulkan-drivers libvulkan1" \
            "  Fedora           dnf install mesa-vulkan-drivers vulkan-loader" \
            "  Arch             pacman -S vulkan-swrast vulkan-icd-loader" \
            "Without one, 'scripts/test.sh --features flex' runs tier 0."
        exit 1
    fi
fi

# With the feature on, a missing GPU is a failure, never a skip. Said here, it costs no build.
if has_feature cuda && ! nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; then
    say "the CUDA tests need an NVIDIA GPU and its driver, and 'nvidia-smi -L' shows none"
    exit 1
fi

# The derive's tests by themselves: trybuild, which they need, asks for features of serde and toml that Burn's build
# scripts and macros do without. In one command with the others, it would make parts of Burn be built once more than
# the examples need. Arguments other than --locked name targets or tests of the other crates.
case "$*" in
    "" | --locked)
        echo "+ cargo test --release --package burn-cuda-graph-derive $*"
        cargo test --release --package burn-cuda-graph-derive "$@"
        ;;
esac

others=(--workspace --exclude burn-cuda-graph-derive --exclude burn-cuda-graph-stand-in)

# The release profile on purpose: the examples and benchmarks are run with --release, and with the tests in
# the same profile one build of Burn serves them all. A second profile would double the longest part of a
# first run.
echo "+ cargo test --release ${others[*]} --no-default-features --features $features $*"
cargo test --release "${others[@]}" --no-default-features --features "$features" "$@"
