"""`python` in the commands of rules: `client.py FOLDER PID ARGUMENT...` hands a job to the server that listens in FOLDER.

The first client with one thread starts the server, which ends with process PID. Where there is no server, or it does not
serve this job, the client becomes a Python with these arguments. It imports little, because each warm job waits for it.
"""

import json
import os
import signal
import socket
import sys

ACCEPTED = b"+"


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a traceback
    folder, parent, *argv = sys.argv[1:]
    address = f"{folder}/socket"
    code = handed_over(address, argv)
    # With more threads, those that importing starts could not be forked.
    if code is None and os.environ.get("OMP_NUM_THREADS") == "1" and server_started(address, parent):
        code = handed_over(address, argv)
    if code is None:
        os.execv(sys.executable, [sys.executable, *argv])
    if code < 0:
        print(f"The process of this job was killed by signal {-code}.", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


def handed_over(address: str, argv: list[str]) -> int | None:
    """The job's exit code, or minus the signal that killed it, once it has ended. None if no server took it."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            message = json.dumps({"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
            socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
            server.sendall(message)
            if server.recv(1) != ACCEPTED:
                return None
        except OSError:
            return None
        return int(server.recv(16) or -9)  # a server that was killed says nothing, and its jobs die with it


def server_started(address: str, parent: str) -> bool:
    """Starts the server, unless there is or was one. In a session of its own, because an interrupt from the keyboard is for
    its clients.
    """
    import subprocess  # which takes longer to import than the rest, and most clients start nothing

    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:
            return False
        listener.listen(64)
        number = listener.fileno()
        file = os.path.join(os.path.dirname(__file__), "server.py")
        command = [sys.executable, "-P", file, str(number), parent]
        nothing = subprocess.DEVNULL
        subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, pass_fds=[number]
        )
    return True


if __name__ == "__main__":
    main()
