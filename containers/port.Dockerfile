# The Neuron SDK's own image, named by whoever builds: it brings torch, torch-neuronx and the compiler, which must not be
# replaced by what the package index holds under the same names. A job adds only what the library itself imports.
ARG BASE
FROM ${BASE}
RUN pip install --no-cache-dir h5py safetensors
