import threading
from collections.abc import Callable


def started_threads() -> Callable[[str], list[threading.Thread]]:
    """Return a function that lists the running threads with a name that were started after this call.

    Other threads may belong to other tests, such as those of a server that several tests share.
    """
    before = set(threading.enumerate())

    def started(name: str) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == name and thread not in before]

    return started
