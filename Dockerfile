# Image for cluster schedulers: the repository as working directory, its environment on PATH.
#   docker build -t fuxi-torchrec:0.1.0-cpu .
#   docker build -t fuxi-torchrec:0.1.0-cuda --build-arg VARIANT=cuda .
# Untested: no container engine was at hand where this was written.
FROM python:3.11-slim
ARG VARIANT=cpu
RUN apt-get update && apt-get install -y --no-install-recommends make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY . .
RUN make setup VARIANT=${VARIANT}
ENV PATH=/app/.venv/bin:$PATH
