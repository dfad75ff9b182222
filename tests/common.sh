# Sourced by the scripts of tests/: where downloads and builds are kept, and how one is made once.
#
# Everything expensive (kernels, images, containerd binaries) lives below $CUBE_CACHE, each thing in a
# directory whose name holds a hash of what it was made from: a changed input is simply another directory.

: "${CUBE_CACHE:=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/cube}"
export CUBE_CACHE

# say TEXT…: progress goes to stderr, since stdout is a script's result.
say() {
    printf '%s\n' "$*" >&2
}

# die TEXT…: one line on stderr and the end.
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# hash_of FILE…: a short hash over the contents of the files ("-": stdin), for names of cache directories.
hash_of() {
    local sum
    sum=$(cat -- "$@" | sha256sum)
    echo "${sum:0:16}"
}

# make_once DIR FUNCTION [ARG…]: unless DIR exists, run FUNCTION with a fresh directory as its last argument and
# give that the name DIR. Several processes may ask for the same thing at the same time: one works, the others wait.
# The body is a subshell of its own with -e, because -e is off inside a function whose status is looked at.
make_once() {
    local dir=$1 new
    shift
    [ -d "$dir" ] && return 0
    mkdir -p "${dir%/*}"
    exec 9>"$dir.lock"
    flock 9
    if [ ! -d "$dir" ]; then
        # Left by somebody who was killed.
        rm -rf --one-file-system "$dir".new.*
        new=$(mktemp -d "$dir.new.XXXXXX")
        # Not readable by others until it is whole is mktemp's default; the result is for everyone.
        chmod 755 "$new"
        set +e
        (set -e; "$@" "$new") 9>&-
        local status=$?
        set -e
        if [ "$status" != 0 ]; then
            rm -rf "$new"
            say "${0##*/}: could not make $dir (status $status; the reason stands above)"
            exec 9>&-
            return "$status"
        fi
        mv -T "$new" "$dir"
    fi
    exec 9>&-
}

# fetch_deb DIR PACKAGE…: download packages, without installing them, into DIR.
fetch_deb() (
    cd "$1"
    shift
    # apt wants to download as a user of its own, which cannot write into a directory of root's.
    download=(apt-get download -qq -o APT::Sandbox::User=root "$@")
    # A fresh machine has no package lists, or ones that name versions that are gone.
    "${download[@]}" >/dev/null 2>&1 || { apt-get update -qq >&2 && "${download[@]}" >&2; }
)

# unpack_deb DIR PACKAGE…: download packages and unpack them below DIR.
unpack_deb() {
    local dir=$1 debs
    shift
    debs=$(mktemp -d "$dir/debs.XXXXXX")
    fetch_deb "$debs" "$@"
    for deb in "$debs"/*.deb; do
        dpkg-deb -x "$deb" "$dir"
    done
    rm -rf "$debs"
}
