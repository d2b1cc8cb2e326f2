"""Stands in for Neuron's library of this name, which PyPI does not have: what `layerproof.nxdi` and a model need of it, on
the CPU, with the names, signatures and habits of the library's public sources (2.29).
"""
