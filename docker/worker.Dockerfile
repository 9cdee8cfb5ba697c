# The worker: torch, no Kubernetes client; it carries the tiny model at /models/tiny-moe.
# Built from the repository's root:
#   docker build -f docker/worker.Dockerfile -t moe-worker:0.1.0 .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /wheels

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-compile --constraint /tmp/constraints.txt \
        "moe-operator[worker] @ file://$(ls /wheels/*.whl)" \
    && rm /tmp/constraints.txt
COPY examples/tiny-moe /models/tiny-moe
# Ready-made kernels: pods fill their own folder from them. They fit processors like the builder's;
# elsewhere a worker compiles at its start.
ENV MOE_KERNELS_READY=/opt/moe-kernels
RUN mkdir /opt/moe-kernels && chown 65532:65532 /opt/moe-kernels
USER 65532:65532
RUN MOE_KERNELS_CACHE=/opt/moe-kernels moe-worker warm-up && chmod -R a+rX /opt/moe-kernels
EXPOSE 8000 8001 8002 8003
ENTRYPOINT ["moe-worker"]
CMD ["serve"]
