"""Starts the ranks of a Python program: forked, by torchrun, by Ray or by srun.

Whatever starts them, each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as torchrun sets them, so the program need not know its launcher.
"""
