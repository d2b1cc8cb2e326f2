"""The process group of a job; this package depends only on torch and imports no other part of Layerproof."""
