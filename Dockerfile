# docker build --target gateway .   the gateway, for production (also the default)
# docker build --target demo .      `gateway up`: Redis, Triton on the CPU, a small model, the gateway

# Debian's release is named, so that a rebuild does not move to the next one. To fix every byte, give
# the digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
# What only installs stays here: the image's environment has neither pip nor setuptools.
RUN python -m venv /opt/tools \
    && python -m venv --without-pip /opt/venv
# Nothing can be compiled later: the root file system may be read-only.
ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy
WORKDIR /src
COPY requirements requirements
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tools/bin/pip install --require-hashes --requirement requirements/tools.txt
# Dependencies change less often than code and have a layer of their own. uv takes a tenth of pip's
# time. It does not read pip's configuration: where that is what leads to a registry, pip installs.
# The file has all that is needed; dependencies of it that it does not name are never imported.
RUN --mount=type=cache,target=/root/.cache \
    /opt/tools/bin/uv pip install --python /opt/venv/bin/python \
        --no-deps --require-hashes --requirement requirements/gateway.txt \
    || /opt/tools/bin/pip --python /opt/venv/bin/python install \
        --no-deps --require-hashes --requirement requirements/gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY adapters adapters
COPY gateway gateway
COPY guides guides
COPY lora_store lora_store
COPY ops ops
COPY triton_repo triton_repo
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/tools/bin/pip --python /opt/venv/bin/python install --no-deps dist/*.whl

FROM build AS build-demo
RUN --mount=type=cache,target=/root/.cache \
    /opt/tools/bin/uv pip install --python /opt/venv/bin/python \
        --require-hashes --requirement requirements/local.txt \
    || /opt/tools/bin/pip --python /opt/venv/bin/python install \
        --require-hashes --requirement requirements/local.txt

FROM ${PYTHON_IMAGE} AS runtime
# A number, not a name: Kubernetes' runAsNonRoot cannot look a name up.
RUN groupadd --gid 10001 gateway \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin gateway \
    && install -d --owner=gateway --group=gateway /var/lib/gateway
# The root file system may be read-only: only /var/lib/gateway and /tmp are written.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_HOST=0.0.0.0 \
    GATEWAY_STORE_DIR=/var/lib/gateway
USER 10001:10001
WORKDIR /
VOLUME /var/lib/gateway
EXPOSE 9000
STOPSIGNAL SIGTERM
# Liveness: some orchestrators replace an unhealthy container, and an engine that is still loading
# is no reason to replace its gateway. The image has no curl.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import sys; from ops.local_stack.servers import answers_ok; sys.exit(not answers_ok('http://127.0.0.1:9000/health/live'))"]
ENTRYPOINT ["gateway"]

FROM runtime AS demo
# Nothing here is worth a key.
ENV GATEWAY_ALLOW_ANONYMOUS=true
COPY --from=build-demo /opt/venv /opt/venv
COPY demo/model /opt/demo/model
COPY demo/adapters /opt/demo/adapters
CMD ["up", "--state-dir", "/var/lib/gateway", "--model", "/opt/demo/model", "--adapter", "zh=/opt/demo/adapters/zh", "--adapter", "ja=/opt/demo/adapters/ja"]

FROM runtime AS gateway
COPY --from=build /opt/venv /opt/venv
CMD ["serve"]
