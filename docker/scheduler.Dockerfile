# The CPU-only scheduler of Octavo. No torch, no compiler.
#
#   docker build --file docker/scheduler.Dockerfile --tag octavo-scheduler:0.1.0 .
#
# PYTHON_IMAGE may name a digest: python:3.13.9-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=docker.io/library/python:3.13.9-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir --disable-pip-version-check \
    --constraint constraints.txt ".[scheduler,otel]" \
    && /opt/octavo/bin/pip uninstall --yes --disable-pip-version-check pip

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="octavo-scheduler" \
      org.opencontainers.image.description="The CPU-only scheduler of Octavo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --system --gid 10001 octavo \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /tmp octavo
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
EXPOSE 50051 9464
# Orchestrators probe by themselves: see helm/octavo.
HEALTHCHECK NONE
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo", "scheduler"]
