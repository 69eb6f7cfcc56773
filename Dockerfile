# One image for front ends and workers, so that both have the same versions of all packages.
#
#   docker build --build-arg PLATFORM=gpu -t titopool:gpu .
#   docker run --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 titopool:gpu
#
# The second command runs the whole server in one container. docker-compose.yml runs front end and
# workers in separate containers.

# Any Debian-based image with Python 3.11 or later and its headers.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# Triton and torch.compile call the compiler while a model loads. vLLM's CPU build needs libnuma. If
# the base image has these packages, no package mirror is needed.
RUN dpkg --status g++ libnuma1 make >/dev/null 2>&1 \
    || { apt-get update \
         && apt-get install -y --no-install-recommends g++ libnuma1 make \
         && rm -rf /var/lib/apt/lists/*; }

# Only the build runs as root. The server writes to /cache (hub downloads, the demo model, vLLM's
# compiled code) and to /pool (the key and locks that front end and workers share). A new volume that
# is mounted there gets owner and mode of the folder.
RUN useradd --create-home --uid 1000 titopool \
    && install -d -o titopool -g titopool -m 0700 /cache /pool \
    && install -d /models

# gpu or cpu: the build of vLLM to install.
ARG PLATFORM=gpu

# Further extras of setup.cfg: ray, kuberay.
ARG EXTRAS=

WORKDIR /srv/titopool

# Copies only what the installation reads, so that a change of the sources does not install vLLM
# again. The editable installation needs the three packages, a README and the module from which
# setup.cfg reads the version.
COPY Makefile pyproject.toml setup.cfg setup.py ./
COPY constraints constraints
COPY tools tools
COPY titopool/__init__.py titopool/release.py titopool/
RUN mkdir app workers && touch README.md app/__init__.py workers/__init__.py \
    && PIP_NO_CACHE_DIR=1 make install PLATFORM=${PLATFORM} VENV=/opt/titopool \
    && { [ -z "${EXTRAS}" ] || /opt/titopool/bin/pip install --no-cache-dir -e ".[${EXTRAS}]"; }

COPY gunicorn.conf.py ./
COPY titopool titopool
COPY app app
COPY workers workers

# Listens at all addresses: a container is reachable only through published ports.
ENV PATH=/opt/titopool/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TITOPOOL_HOST=0.0.0.0

USER titopool
EXPOSE 8000
# gunicorn's processes touch a heartbeat file, which can block on a container's disk.
CMD ["gunicorn", "--worker-tmp-dir", "/dev/shm", "app:create_app()"]
