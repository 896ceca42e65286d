# docker build --target gateway .   the gateway, for production (also the default)
# docker build --target demo .      `gateway up`: Redis, Triton on the CPU, a small model, the gateway
# docker build --target sbom --output build/sbom .   what the gateway's environment is made of

# Debian's release is named, so that a rebuild does not move to the next one. To fix every byte, give
# the digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# The time that all of the image has, in seconds since 1970: layers that are built twice are the same.
# The default is what hatchling gives to wheels.
ARG SOURCE_DATE_EPOCH=1580601600

FROM ${PYTHON_IMAGE} AS build
# What only installs stays here: the image's environment has neither pip nor setuptools.
RUN python -m venv /opt/tools \
    && python -m venv --without-pip /opt/venv
ENV UV_LINK_MODE=copy
WORKDIR /src
COPY requirements requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tools/bin/pip install --no-compile --require-hashes --requirement requirements/tools.txt
# Dependencies change less often than code and have a layer of their own. uv takes a tenth of pip's
# time. It does not read pip's configuration: where that is what leads to a registry, pip installs.
# The file has all that is needed; dependencies of it that it does not name are never imported.
RUN --mount=type=cache,target=/root/.cache \
    /opt/tools/bin/uv pip install --python /opt/venv/bin/python \
        --no-deps --require-hashes --requirement requirements/gateway.txt \
    || /opt/tools/bin/pip --python /opt/venv/bin/python install --no-compile \
        --no-deps --require-hashes --requirement requirements/gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY adapters adapters
COPY certificates certificates
COPY gateway gateway
COPY guides guides
COPY lora_store lora_store
COPY ops ops
COPY triton_repo triton_repo
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/tools/bin/pip --python /opt/venv/bin/python install --no-compile --no-deps dist/*.whl
COPY deploy/image deploy/image
RUN install deploy/image/healthy /opt/venv/bin

FROM build AS build-gateway
ARG SOURCE_DATE_EPOCH
RUN python deploy/image/lean.py /opt/venv \
    && sh deploy/image/assemble.sh /opt/venv /image "${SOURCE_DATE_EPOCH}"

FROM build AS build-demo
ARG SOURCE_DATE_EPOCH
RUN --mount=type=cache,target=/root/.cache \
    /opt/tools/bin/uv pip install --python /opt/venv/bin/python \
        --require-hashes --requirement requirements/local.txt \
    || /opt/tools/bin/pip --python /opt/venv/bin/python install --no-compile \
        --require-hashes --requirement requirements/local.txt
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist/demo \
        ./triton_repo/cpu_executor \
    && /opt/tools/bin/pip --python /opt/venv/bin/python install --no-compile --no-deps \
        dist/demo/*.whl
COPY demo/model /image/opt/demo/model
COPY demo/adapters /image/opt/demo/adapters
RUN sh deploy/image/assemble.sh /opt/venv /image "${SOURCE_DATE_EPOCH}"

FROM build AS build-sbom
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tools/bin/pip install --no-compile --require-hashes --requirement requirements/sbom.txt
RUN /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file sbom.json \
        --pyproject pyproject.toml --mc-type application /opt/venv/bin/python

FROM scratch AS sbom
COPY --from=build-sbom /src/sbom.json /

FROM ${PYTHON_IMAGE} AS build-user
ARG SOURCE_DATE_EPOCH
# A number, not a name: Kubernetes' runAsNonRoot cannot look a name up.
RUN groupadd --gid 10001 gateway \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin gateway \
    && install -d --owner=gateway --group=gateway /image/var/lib/gateway \
    && cp --archive --parents /etc/passwd /etc/group /etc/shadow /etc/gshadow /image \
    && find /image -exec touch --date="@${SOURCE_DATE_EPOCH}" {} +

# Folders are copied, and nothing is run: folders that the base has take over the copied ones' times.
FROM ${PYTHON_IMAGE} AS runtime
COPY --from=build-user /image/ /
# The root file system may be read-only: only /var/lib/gateway and /tmp are written.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_HOST=0.0.0.0 \
    GATEWAY_STORE_DIR=/var/lib/gateway
ARG REVISION=""
LABEL org.opencontainers.image.title="triton-openai-gateway" \
    org.opencontainers.image.description="OpenAI-compatible gateway for Triton running TensorRT-LLM" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /
VOLUME /var/lib/gateway
EXPOSE 9000
STOPSIGNAL SIGTERM
# Liveness: some orchestrators replace an unhealthy container, and an engine that is still loading
# is no reason to replace its gateway.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["healthy", "/health/live"]
ENTRYPOINT ["gateway"]

FROM runtime AS demo
# Nothing here is worth a key.
ENV GATEWAY_ALLOW_ANONYMOUS=true
COPY --from=build-demo /image/ /
CMD ["up", "--state-dir", "/var/lib/gateway", "--model", "/opt/demo/model", "--adapter", "zh=/opt/demo/adapters/zh", "--adapter", "ja=/opt/demo/adapters/ja"]

FROM runtime AS gateway
COPY --from=build-gateway /image/ /
CMD ["serve"]
