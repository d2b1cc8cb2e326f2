"""The process group of a job: a package that depends on torch alone and imports nothing else of Layerproof."""
