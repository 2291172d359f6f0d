#!/usr/bin/env bash
# Build the image in images/$1 with docker, podman or buildah, whichever works here first. Settings (environment):
#   IMAGE       its name and tag (converter:VERSION)
#   BASE_IMAGE  what it is made on (the Dockerfile's)
#   PLATFORM    of the machines that run it (linux/amd64, the pool's)
#   BUILDER     docker, podman or buildah
#   PIP_CONF    a pip.conf for the build (a mirror, its credentials, a CA); it does not get into the image
#   SOURCE      the repository's address, for the labels (origin's)
#   REVISION    the commit, for the labels (the one checked out, and whether files differ from it)
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1

# The docker command alone is not enough, there must be a daemon.
builder=${BUILDER:-}
if [[ -z $builder ]] && docker info >/dev/null 2>&1; then builder=docker; fi
for tool in podman buildah; do
  if [[ -z $builder ]] && command -v "$tool" >/dev/null; then builder=$tool; fi
done
if [[ -z $builder ]]; then
  echo "$0: there is no docker (with a running daemon), podman or buildah here; cloudbuild.yaml builds without" >&2
  exit 2
fi

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' converter/__init__.py)
revision=${REVISION-$(git describe --always --abbrev=40 --match '' --dirty 2>/dev/null || true)}
# Without what may stand before the host: a token.
source=${SOURCE-$(git remote get-url origin 2>/dev/null | sed -E 's#^(https?://)[^@/]*@#\1#' || true)}

arguments=(
  --file "images/$name/Dockerfile"
  --tag "${IMAGE:-$name:$version}"
  --platform "${PLATFORM:-linux/amd64}"
  --build-arg "SOURCE=$source" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  # Again: podman 4 and its buildah take the Dockerfile's labels from their cache, whatever the arguments are now.
  --label "org.opencontainers.image.source=$source"
  --label "org.opencontainers.image.version=$version"
  --label "org.opencontainers.image.revision=$revision"
)
if [[ -n ${BASE_IMAGE:-} ]]; then arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE"); fi
if [[ -n ${PIP_CONF:-} ]]; then arguments+=(--secret "id=pip,src=$PIP_CONF"); fi
# Of the three, only buildah puts all into one layer unless told.
if [[ $builder == buildah ]]; then arguments+=(--layers); fi

"$builder" build "${arguments[@]}" .
