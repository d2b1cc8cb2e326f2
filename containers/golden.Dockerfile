# torch 2.9.1 from the package index brings the CUDA 12.8 libraries that it needs; the host brings the driver.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY requirements/uv.txt requirements/run.txt /requirements/
RUN pip install --no-cache-dir --require-hashes -r /requirements/uv.txt \
 && uv pip install --system --no-cache --require-hashes --compile-bytecode -r /requirements/run.txt
