#!/usr/bin/env bash
# Installs the static LLVM that the `cuda` feature links, without its usual download.
#
# The crate `cubecl-llvm` (a dependency of burn-cuda) links LLVM statically. Its build dependency
# `tracel-llvm-bundler` downloads an archive from a GitHub release and unpacks it to
#
#     ${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-<bundler version>
#
# and downloads nothing where the file `.tracel-llvm-installed` already lies in that folder; no
# environment variable moves it. This script fills the folder from two wheels of the Python package
# index, for machines that cannot reach the release. Where the download works, it is not needed.
# The features `wgpu` and `flex` need no LLVM.
#
# Safe to run again: an installed bundle is left alone. A failed run leaves nothing behind.
set -euo pipefail

# What this script serves: every tracel-llvm-bundler 23.1.x, since the wheels hold LLVM 23.1.1.
# For another LLVM, change these lines together.
served_llvm=23.1
wheel_version=23.1.1.post0
# The bundler that burn 0.22.1 resolves to; used where no lock file says otherwise.
default_bundle=23.1.0-4
# Peak while unpacking: about 90 MiB of wheels and 400 MiB of libraries. The latter stay.
needed_mib=600

usage() {
    cat <<USAGE
usage: scripts/provision-llvm.sh [--lock FILE] [--print-prefix]

Installs LLVM $served_llvm where tracel-llvm-bundler $served_llvm.x looks for it
(Linux with glibc 2.28 or later, x86_64 or aarch64).

  --lock FILE      the Cargo.lock that names the bundler's version, for another
                   project than this one (default: this project's)
  --print-prefix   print the folder that the build will use, install nothing
  -h, --help       this text
USAGE
}

die() {
    printf 'provision-llvm: %s\n' "$@" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=
print_prefix=no
while [ $# -gt 0 ]; do
    case $1 in
        --lock)
            [ $# -ge 2 ] || die "--lock needs a file"
            lock=$2
            shift 2
            ;;
        --print-prefix)
            print_prefix=yes
            shift
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

# Which bundle: the version in the lock file.
if [ -n "$lock" ]; then
    [ -r "$lock" ] || die "cannot read $lock"
elif [ -r "$root/Cargo.lock" ]; then
    lock=$root/Cargo.lock
fi
bundle=$default_bundle
if [ -n "$lock" ]; then
    bundle=$(awk '
        $0 == "name = \"tracel-llvm-bundler\"" { found = 1; next }
        found && $1 == "version" { gsub(/"/, "", $3); print $3; found = 0 }
    ' "$lock")
    case $(printf '%s' "$bundle" | wc -w) in
        0) die "$lock holds no tracel-llvm-bundler: a build from it needs no LLVM" ;;
        1) ;;
        *) die "$lock holds several tracel-llvm-bundler versions:" "$bundle" ;;
    esac
fi

# Where: as the crate `dirs` answers for the local data folder, which ignores a relative XDG_DATA_HOME.
case ${XDG_DATA_HOME:-} in
    /*) data=$XDG_DATA_HOME ;;
    *) data=${HOME:?HOME is not set}/.local/share ;;
esac
parent=$data/tracel
prefix=$parent/tracel-llvm-$bundle
marker=.tracel-llvm-installed

if [ "$print_prefix" = yes ]; then
    printf '%s\n' "$prefix"
    exit 0
fi

llvm_config() {
    "$1/bin/llvm-config" --link-static "$2"
}

if [ -e "$prefix/$marker" ]; then
    llvm_config "$prefix" --version >/dev/null || die \
        "$prefix is marked as installed, but its llvm-config does not run (message above)." \
        "If that message is about python3: it must be on PATH, here and in builds." \
        "Otherwise delete that folder and run this script again."
    echo "provision-llvm: LLVM is already installed at $prefix"
    exit 0
fi

# What the wheels can serve.
case $bundle in
    "$served_llvm".*) ;;
    *)
        die "this script serves tracel-llvm-bundler $served_llvm.x, and the version wanted is $bundle." \
            "Change served_llvm, wheel_version and the checksums at the top of it, if such wheels exist."
        ;;
esac
case $(uname -s) in
    Linux) ;;
    Darwin) die "not for macOS: CUDA does not exist there; build with the feature wgpu" ;;
    *) die "only for Linux; elsewhere let the build download its own LLVM" ;;
esac
case $(uname -m) in
    x86_64)
        sha256_base=dcfec888abfaa418be77d41af585805f31463584cf9c90582992c00f392c1ac5
        sha256_extra=c36e834d9a4e9cf9759f27fece65711ece7a2fc2b5a96dbb15d66f5e9e787929
        ;;
    aarch64)
        sha256_base=3d4b1b30cea531ffa5956fa14ff4ffb0b1ed61284bf31eac3ebb752fb308b71d
        sha256_extra=b1ddc694cf75bb1502b64c1898b15915362450453b637534886519e20e3d5522
        ;;
    *) die "no wheel of LLVM $served_llvm for $(uname -m); there are x86_64 and aarch64" ;;
esac
# "glibc 2.36"; musl has no such answer.
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{ print $2 }' || true)
[ -n "$glibc" ] || die "the wheels need glibc, and this system has another C library"
[ "$(printf '%s\n' 2.28 "$glibc" | sort -V | head -n 1)" = 2.28 ] ||
    die "the wheels need glibc 2.28 or later, and this system has $glibc"

command -v python3 >/dev/null || die \
    "python3 is missing. It unpacks the wheels, and their llvm-config is a Python script." \
    "Debian, Ubuntu: apt-get install python3 python3-pip; Fedora: dnf install python3 python3-pip"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "the wheels need Python 3.10 or later, and this is $(python3 --version)"
python3 -m pip --version >/dev/null 2>&1 || die \
    "python3 has no pip, which fetches the wheels." \
    "Debian, Ubuntu: apt-get install python3-pip; Fedora: dnf install python3-pip"

mkdir -p "$parent"
free_mib=$(df -Pm "$parent" 2>/dev/null | awk 'NR == 2 { print $4 }' || true)
[ "${free_mib:-$needed_mib}" -ge "$needed_mib" ] || # unknown is no reason to stop
    die "$parent has $free_mib MiB free; $needed_mib MiB are needed, of which 400 MiB stay in use"

# Everything is built and checked beside its final place; the rename at the end is the installation.
work=$(mktemp -d "$parent/.provision.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# NVPTX, the backend for NVIDIA GPUs, is in the second wheel.
cat >"$work/requirements.txt" <<WHEELS
mlc-llvm-static==$wheel_version --hash=sha256:$sha256_base
mlc-llvm-static-extra-targets==$wheel_version --hash=sha256:$sha256_extra
WHEELS
echo "provision-llvm: fetching LLVM wheels $wheel_version for tracel-llvm-bundler $bundle"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
    --dest "$work" --requirement "$work/requirements.txt" ||
    die "pip could not fetch the wheels (message above)"
for wheel in "$work"/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/unpacked"
    rm "$wheel"
done
staged=$work/unpacked/mlc_llvm_static/static
chmod +x "$staged"/bin/* # zipfile drops the modes

# What the build asks of it: llvm-config, the C headers, the NVIDIA backend.
found=$(llvm_config "$staged" --version) || die "llvm-config does not run (message above)"
case $found in
    "$served_llvm".*) ;;
    *) die "expected LLVM $served_llvm, and llvm-config says $found" ;;
esac
case " $(llvm_config "$staged" --targets-built) " in
    *" NVPTX "*) ;;
    *) die "this LLVM was built without NVPTX" ;;
esac
[ -n "$(llvm_config "$staged" --libs)" ] || die "llvm-config names no libraries"
[ -e "$staged/include/llvm-c/Core.h" ] || die "the headers are missing"

touch "$staged/$marker"
rm -rf "$prefix" # without its marker it is the rest of a broken installation
mv -T "$staged" "$prefix"
echo "provision-llvm: LLVM $found installed at $prefix"
