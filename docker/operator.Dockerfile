# The operator: kopf and the Kubernetes client, no torch. Built from the repository's root:
#   docker build -f docker/operator.Dockerfile -t moe-operator:0.1.0 .
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
        "moe-operator[operator] @ file://$(ls /wheels/*.whl)" \
    && rm /tmp/constraints.txt
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["moe-operator"]
CMD ["run"]
