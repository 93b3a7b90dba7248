# A server on the CPU; build it from the root of a clone:
#   docker build -f scripts/docker/cpu.Dockerfile -t sgl-ext .
#   docker run --shm-size 8g --network host sgl-ext --port 30000
# KV memory is shared memory, hence --shm-size. The model is converted when the image is built.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ make libssl-dev libibverbs1 libnuma1 libcurl4 curl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sgl_ext
COPY . .
RUN scripts/setup.sh && .venv/bin/python -m sgl_ext.models SmolLM2-135M-Instruct
EXPOSE 30000
ENTRYPOINT ["scripts/serve.sh", "--host", "0.0.0.0"]
