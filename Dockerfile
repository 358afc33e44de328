# Images of shardam. Targets:
#   server   shards on the CPU and the admin API, without torch
#   worker   training programs: shardam with torch
#   gpu      shards on NVIDIA GPUs: the server with torch, Triton and the C compiler that Triton needs at run time
# docs/deploy.md says how they are built and run.

# The version on which constraints.txt was resolved.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS builder
# Debian's archive keeps one version of a package: a pinned one would be gone with the next point release.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt scikit-build-core nanobind cmake ninja
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels/
COPY proto proto/
COPY server server/
COPY client client/
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .

FROM python:${PYTHON}-slim-bookworm AS runtime
# In an image every process that answers HTTP does so on 8080: the admin API by default, a shard by this variable.
ENV PYTHONUNBUFFERED=1 SHARDAM_HTTP_PORT=8080
WORKDIR /opt/shardam
COPY constraints.txt requirements-server.txt ./
RUN pip install --no-cache-dir -c constraints.txt -r requirements-server.txt \
  && useradd --create-home --uid 10001 --shell /usr/sbin/nologin shardam \
  && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/shardam /var/lib/shardam-checkpoints
# For volumes, SHARDAM_DATA_DIR and SHARDAM_CHECKPOINT_DIR; a new volume that is mounted there takes over owner and mode.
# Declared as none, because the admin API and workers keep nothing and would each get a volume without a name.
EXPOSE 7070 8080
# Ready, not only live: what depends on this container may then call it. A start waits for Redis and for the other shards.
HEALTHCHECK --interval=3s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1:8080', timeout=4); c.request('GET', '/readyz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["shardam"]
CMD ["--help"]
STOPSIGNAL SIGTERM

FROM runtime AS server
COPY --from=builder /wheels /wheels/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/shardam

FROM runtime AS worker
# pip reads it: an index with torch's CPU builds, which save the gigabytes of CUDA libraries. Empty: pip's usual one alone.
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir -c constraints.txt torch
COPY --from=builder /wheels /wheels/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/shardam
# A worker is a program; this one trains the demo's click model until it is told to stop.
ENTRYPOINT ["python"]
CMD ["-m", "shardam.demo.click_worker"]
# It serves nobody, so its health is its exit status.
HEALTHCHECK NONE

FROM runtime AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt torch triton
COPY --from=builder /wheels /wheels/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/shardam
