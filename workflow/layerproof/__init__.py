"""Layerproof: finds the layer where a port of a large language model goes wrong, and says why.

The packages, in the order in which data flows. None imports one further down:

    the ground floor    errors, files, known_errors, environment, devices, failures, digests, threads, paths, shapes,
                        layouts, taps, wording, running, config
    warm                jobs start from a process that has imported the large packages
    tensors             the tensor type, and the HDF5 files that hold tensors
    rerun               which code a job ran, its record, and whether it must run again
    model               what is to be run: stages, tokens, the checkpoint and how a stage's weights are loaded
    measure             metrics, noise and the pass/fail rule; numpy and numba alone
    golden              the trusted model, one stage at a time
    distributed         process groups, and what explains ranks that hang; imports nothing else of ours
    launch              what starts ranks: forks, torchrun, Ray, srun
    port                the implementation under test, one stage at a time
    compare             port against golden: taps, chains, ranks, weights
    host                what jobs will take, and whether this host has it
    diagnose            why a stage fails
    report              verdicts, the gate, plots, the page, the manifest, the archive
    terminal            a run's progress, and its last words: the verdict
    project             Layerproof in a folder of one's own: init, run, why, snakefile
    cli                 the command line, from the `verbs` of each package
"""

__version__ = "0.2.0"
