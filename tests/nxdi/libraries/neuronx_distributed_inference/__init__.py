"""Stands in for Neuron's library of this name; see neuronx_distributed beside it."""
