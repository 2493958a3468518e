# The image `train` of containers/images.yaml. docs/containers.md says how to build it.
# The same parameters, with the same defaults, are in Apptainer.def; the work is in containers/install.sh.

# docker.io/nvidia/cuda:12.4.1-devel-ubuntu22.04
ARG BASE=docker.io/nvidia/cuda@sha256:da6791294b0b04d7e65d87b7451d6f2390b4d36225ab0701ee7dfec5769829f5
FROM ${BASE}

ARG BASE
ARG LOCK=train-cu124-py311
ARG FLASH_ATTN=80;90
ARG MAX_JOBS=4
ARG SOURCE_DATE_EPOCH=1745539200

COPY containers/install.sh /opt/bridge/install.sh
COPY containers/locks /opt/bridge/locks
RUN --mount=type=secret,id=env,target=/mnt/env --mount=type=secret,id=ca,target=/mnt/ca.pem \
    sh /opt/bridge/install.sh

ENV PATH=/opt/venv/bin:${PATH} \
    CUDA_HOME=/usr/local/cuda
LABEL org.opencontainers.image.base.name=${BASE} \
      bridge-rl.lock=${LOCK}
