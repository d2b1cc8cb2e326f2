"""Layerproof: finds the layer where a port of a large language model goes wrong, and says why.

The modules, in the order that data flows: `config` and `stages` say what is to be run; `checkpoint`, `tiny` and `tokens`
are the input; `golden` and `port` run one stage of each side and write `tensors`; `metrics`, `compare` and `verdicts`
judge; `plots`, `report` and `manifest` tell. `jobs`, `records` and `fingerprint` decide what has to run at all.
"""
