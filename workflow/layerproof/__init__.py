"""Layerproof: finds the layer where a port of a large language model goes wrong, and says why.

The modules, in the order that data flows:

    what is to be run   config, stages, taps
    input               checkpoint, fp8, tiny, tokens, loading
    before the run      prediction, preflight, checks, neuron, surroundings
    golden              golden, whole, transformers_stage, experts, variants, noise, noise_kernel, stored
    port                port, distributed, ranks, shards, compiled, captured, nxdi, nxdi_taps, provenance, known_errors
    files of tensors    tensors, trimming, files
    judging             metrics, kernel, routing, logits, compare, audit, bisect, verdicts
    saying why          diagnose, findings, faults
    telling             plots, report, report_audit, manifest
    what runs at all    cli, jobs, records, fingerprint, client, worker, containers, errors
"""
