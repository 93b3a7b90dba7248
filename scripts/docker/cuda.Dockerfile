# SGLang's image with the extension; build it from the root of a clone:
#   docker build -f scripts/docker/cuda.Dockerfile -t sgl-ext-cuda .
#   docker run --gpus all --shm-size 32g --network host sgl-ext-cuda \
#       python3 -m sglang.launch_server --model-path MODEL --enable-ext
FROM lmsysorg/sglang:v0.5.23
COPY . /opt/sgl_ext
# The image has SGLang and torch, which sgl_ext does not require as packages.
RUN python3 -m pip install --no-cache-dir /opt/sgl_ext
