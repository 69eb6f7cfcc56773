# One image for front end and workers, so that both have the same tokenizer and settings.
#
#   docker build --build-arg PLATFORM=gpu -t titopool:gpu .
#   docker run --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 titopool:gpu
#
# The second line is a whole server in one container; docker-compose.yml has them apart.

# Any image of a Debian kind with Python 3.11 or later and its headers.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# Triton and torch.compile call the compiler while a model loads; vLLM's CPU build needs
# libnuma. A base image that has them already needs no package mirror.
RUN dpkg --status g++ libnuma1 make >/dev/null 2>&1 \
    || { apt-get update \
         && apt-get install -y --no-install-recommends g++ libnuma1 make \
         && rm -rf /var/lib/apt/lists/*; }

# Nothing below runs as root but the build. What the server writes, it writes to /cache (hub
# downloads, the demo model, vLLM's compiled code) and /pool (what front end and workers
# share); a new volume mounted there takes over owner and mode.
RUN useradd --create-home --uid 1000 titopool \
    && install -d -o titopool -g titopool -m 0700 /cache /pool \
    && install -d /models

# gpu or cpu: which build of vLLM is installed.
ARG PLATFORM=gpu

WORKDIR /srv/titopool

# First only what the installation reads: a change of the sources below does not install
# vLLM again. The installation is an editable one; it wants to see the packages, and a README.
COPY Makefile pyproject.toml setup.cfg setup.py ./
COPY constraints constraints
COPY tools tools
COPY titopool/__init__.py titopool/
RUN mkdir app workers && touch README.md app/__init__.py workers/__init__.py \
    && PIP_NO_CACHE_DIR=1 make install PLATFORM=${PLATFORM} VENV=/opt/titopool

COPY gunicorn.conf.py ./
COPY titopool titopool
COPY app app
COPY workers workers

# In a container, only what its owner publishes can be reached.
ENV PATH=/opt/titopool/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TITOPOOL_HOST=0.0.0.0

USER titopool
EXPOSE 8000
# gunicorn's processes touch a file as a sign of life; on a container's disk that can block.
CMD ["gunicorn", "--worker-tmp-dir", "/dev/shm", "app:create_app()"]
