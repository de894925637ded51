# syntax=docker/dockerfile:1
# numaserve on CPU. Build: docker build -t numaserve .
#
# pip's PyTorch for x86-64 brings GPU libraries of several GB. For a small image name an index of PyTorch's CPU wheels:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=https://... -t numaserve .
#
# Run, with the checkpoint's folder mounted:
#   docker run --cap-add SYS_NICE -p 50051:50051 -v /path/to/model:/model:ro numaserve
#
# --cap-add SYS_NICE makes Docker's seccomp profile let mbind, set_mempolicy and move_pages through. Without it the
# server runs all the same: CPU affinity and first touch place the pages, and `numaserve status` says what was refused.

FROM python:3.13-slim AS build
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/numaserve
ENV PATH=/opt/numaserve/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# For the native kernels.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# The dependencies first: they change less often than the code.
COPY pyproject.toml ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
        > /tmp/requirements.txt \
    && pip install ${PIP_EXTRA_INDEX_URL:+--extra-index-url "$PIP_EXTRA_INDEX_URL"} -r /tmp/requirements.txt
COPY . .
RUN pip install --no-deps .

FROM python:3.13-slim
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin numaserve \
    && install -d -o numaserve -m 0700 /run/numaserve
COPY --from=build /opt/numaserve /opt/numaserve
ENV PATH=/opt/numaserve/bin:$PATH PYTHONUNBUFFERED=1 XDG_RUNTIME_DIR=/run/numaserve
USER numaserve
EXPOSE 50051
# The launcher passes SIGTERM on as a drain; give `docker stop --time` more than --drain-timeout.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", \
    "import sys, numaserve; sys.exit(numaserve.Client('127.0.0.1:50051').health(timeout=4) != 'SERVING')"]
ENTRYPOINT ["numaserve"]
CMD ["serve", "--host", "0.0.0.0", "--model", "/model"]
