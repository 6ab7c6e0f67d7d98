import threading
from collections.abc import Callable


def started_threads() -> Callable[[str], list[threading.Thread]]:
    """Return what lists the living threads of a name that have started since this call.

    A test that looks at all threads of the process also sees those of other tests, such as a server that several tests
    share.
    """
    before = set(threading.enumerate())

    def started(name: str) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == name and thread not in before]

    return started
