import os


def cpu_mode():
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0
