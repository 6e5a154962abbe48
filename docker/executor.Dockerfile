# The executor of Octavo: the model and every byte of its K/V.
#
#   docker build --file docker/executor.Dockerfile --tag octavo-executor:0.1.0 .
#   docker build --file docker/executor.Dockerfile --build-arg DEVICE=cpu --tag octavo-executor:0.1.0-cpu .
#
# The images below may name digests: ubuntu:24.04@sha256:…
ARG DEVICE=gpu
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04
ARG UBUNTU_IMAGE=docker.io/library/ubuntu:24.04

# torch's wheels bring CUDA's libraries; the base brings what the driver is asked for.
FROM ${CUDA_IMAGE} AS base-gpu
ARG TORCH_INDEX=https://pypi.org/simple
ENV TORCH_INDEX=${TORCH_INDEX}

FROM ${UBUNTU_IMAGE} AS base-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV TORCH_INDEX=${TORCH_INDEX}

# A C compiler stays in the image: Triton, and the kernels for CPUs, are compiled at the first start.
# hadolint ignore=DL3006
FROM base-${DEVICE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir --disable-pip-version-check \
    --extra-index-url "${TORCH_INDEX}" --constraint constraints.txt ".[executor,otel]"

FROM base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="octavo-executor" \
      org.opencontainers.image.description="The executor of Octavo: the model and every byte of its K/V" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --system --gid 10001 octavo \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /tmp octavo
# With pip, which fetches the default model.
COPY --from=build /opt/octavo /opt/octavo
# PYTHONSAFEPATH: what lies in the working directory is never imported. HOME is the one folder
# that is written to; mount something there where the root is read-only.
ENV PATH=/opt/octavo/bin:${PATH} \
    HOME=/tmp \
    USER=octavo \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
USER 10001:10001
EXPOSE 50061 9464
# Orchestrators probe by themselves: see helm/octavo.
HEALTHCHECK NONE
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo", "executor"]
